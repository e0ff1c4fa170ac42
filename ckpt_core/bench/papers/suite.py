"""The order of a run of the suite `papers`, and what is noted of each turn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckpt_core.bench.crew import Crew
from ckpt_core.bench.machine import check_room, work_folder
from ckpt_core.bench.papers.drawing import drawings, write
from ckpt_core.bench.papers.found import THROUGHPUT, Found, per_s
from ckpt_core.bench.papers.parts import PARTS, Answer, Part, Turn, chosen
from ckpt_core.bench.papers.settings import PapersMeasure, PapersSettings
from ckpt_core.bench.papers.tables import part_json, tables, training_line
from ckpt_core.bench.papers.ways import IDEAL, PRESETS, TORCH, Way, title
from ckpt_core.bench.remote import ContenderFailed
from ckpt_core.bench.results import Entrant
from ckpt_core.bench.run import Run
from ckpt_core.bench.suite import Suite
from ckpt_core.bench.team import Launcher
from ckpt_core.bench.views import Own
from ckpt_core.system.machine import describe

LAUNCH = Launcher(worker="ckpt_core.bench.papers.worker:PapersWorker")
_PROCESS = "papers"
_DISK_STATES = 3
"""Files of a way in sizes of the state, besides one for each checkpoint under way."""

_MEMORY_STATES = 4
"""State, staging memory of two checkpoints, dirty pages."""

_LONE_FILES = 2
"""That take turns while one step is kept and one save at a time is made."""

_IN_MEMORY_STATES = 2 * _DISK_STATES
_PROCESS_BYTES = 500 * 2**20
_NO_MEMORY = "no filesystem in memory: name one with --memory-root"


def measure(run: Run[PapersSettings]) -> None:
    """One part after the other, all in one process, which is new after it has failed.

    Raises:
        ConfigError: there is no room for the run.
    """
    run.report.ours = PRESETS
    run.report.more["papers"] = {}
    _check_room(run.settings)
    with Crew(run, LAUNCH, shared=True) as crew:
        for part in PARTS:
            if part.measure in run.settings.measures and chosen(part, run.settings):
                _Job(part, run, crew).measure()


@contextlib.contextmanager
def _places(settings: PapersSettings) -> Iterator[tuple[Path, Path | None]]:
    """Folders for the files of one size, which are gone before the next begins: on disk, in memory."""
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(work_folder(settings.root))
        memory = settings.memory and stack.enter_context(work_folder(settings.memory))
        yield disk, memory


def _check_room(settings: PapersSettings) -> None:
    """Raise before anything is written when the largest part would not fit."""
    disk_bytes = memory_bytes = 0
    for part in PARTS:
        if part.measure not in settings.measures:
            continue
        ways = chosen(part, settings)
        size = max(part.sizes(settings)) if part.sizes else settings.state_bytes
        on_disk = [way.in_flight + _DISK_STATES for way in ways if not way.in_memory]
        disk_bytes = max(disk_bytes, size * sum(on_disk))
        memory_bytes = max(memory_bytes, size * _MEMORY_STATES + _PROCESS_BYTES)
    in_memory = {PapersMeasure.INTERVALS, PapersMeasure.SEPARATED} & set(settings.measures)
    if settings.memory is not None and in_memory:
        more = settings.state_bytes * _IN_MEMORY_STATES
        check_room(settings.memory, disk_bytes=more, memory_bytes=memory_bytes + more)
    check_room(settings.root, disk_bytes=disk_bytes, memory_bytes=memory_bytes)


class _Job:
    """One part."""

    def __init__(self, part: Part, run: Run[PapersSettings], crew: Crew) -> None:
        self.settings, self.report = run.settings, run.report
        self._part = part
        self._crew = crew
        self._out: set[str] = set()
        self._found = Found()
        self._restored: dict[str, bool] = {}

    def measure(self) -> None:
        """All rounds of all ways, and the check of what each has saved."""
        part, settings = self._part, self.settings
        self._crew.notify(f"{part.measure}: starting")
        ways = chosen(part, settings)
        try:
            self._introduce(ways)
            for size in part.sizes(settings) if part.sizes else (settings.state_bytes,):
                with _places(settings) as (disk, memory):
                    self._all_rounds(ways, size, disk, memory)
        except ContenderFailed as exc:
            self._crew.disband(_PROCESS)
            for contender in {way.contender for way in ways}:
                self.report.entrants[contender].fail(f"{part.measure}: {exc}")
        self.report.more["papers"][str(part.measure)] = {
            **part_json(part, self._found, settings),
            "restored": self._restored,
        }

    def _ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        return self._crew.team(_PROCESS).ask(operation, **arguments)[0]

    def _introduce(self, ways: tuple[Way, ...]) -> None:
        hello = self._ask("hello")
        for way in ways:
            release = hello["torch" if way.contender == TORCH else "core"]
            entrant = self.report.entrants.setdefault(
                way.contender, Entrant(title=title(way.contender))
            )
            entrant.version, entrant.fsyncs = release, "yes"
            entrant.settings = (
                "torch.save, then fsync" if way.contender == TORCH
                else f'Options.preset("{way.contender}")'
            )  # fmt: skip
        if (
            any(way.in_memory for way in self._part.ways(self.settings))
            and not self.settings.memory
        ):
            for way in ways:
                self.report.entrants[way.contender].remark(_NO_MEMORY)

    def _all_rounds(
        self, ways: tuple[Way, ...], size: int, disk: Path, memory: Path | None
    ) -> None:
        settings = self.settings
        built = self._ask(
            "build",
            state_bytes=size,
            leaves=settings.leaves,
            iteration_s=settings.iteration_s,
        )
        ideal = [] if self._part.intervals is None else [Way(line=IDEAL, contender=IDEAL)]
        for number in self._crew.rounds(f"{self._part.measure}, {size / 1e6:.0f} MB"):
            answers: dict[str, Answer] = {}
            for way in self._crew.shuffled([*ideal, *ways]):
                root = memory if way.in_memory else disk
                assert root is not None, "chosen() leaves such ways out"
                answer = self._turn(way, root, number)
                if answer is not None:
                    answers[way.name] = answer
            self._note(ways, answers, built["state_bytes"])

    def _turn(self, way: Way, root: Path, number: int) -> Answer | None:
        """One turn; None for a way that has failed, now or before."""
        settings = self.settings
        if way.name in self._out:
            return None
        arguments = {
            "way": way.to_json(),
            "root": str(root / way.name.replace(" ", "-")),
            "warm_ups": self._warm_ups(way, first=number == 0),
            "check": way.contender != IDEAL and number == settings.rounds - 1,
            "timeout_s": settings.timeout_s,
        }
        if self._part.intervals is None:
            answer = self._ask("persist", **arguments)
        else:
            answer = self._ask("train", **arguments, blocks=self._blocks(way))
        if "failed" in answer:
            self._out.add(way.name)
            self.report.entrants[way.contender].fail(
                f"{self._part.measure}, {way.name}: {answer['failed']}"
            )
            return None
        if answer["restored"] is not None:
            self._note_check(way, answer["restored"])
        return answer

    def _warm_ups(self, way: Way, *, first: bool) -> int:
        """Untimed saves before a turn; every file that is reused is there before the first block."""
        if self._part.intervals is None:
            return _LONE_FILES if first else 0
        return way.in_flight + 2 if first else 1

    def _blocks(self, way: Way) -> list[tuple[int, int]]:
        """Interval and saves of each block of a turn, in random order."""
        settings = self.settings
        if way.contender == IDEAL:
            return [(settings.least, 1)]
        assert self._part.intervals is not None
        every = self._crew.shuffled(self._part.intervals(settings))
        return [(interval, settings.saves_of(interval, way.in_flight)) for interval in every]

    # -- notes -----------------------------------------------------------------------------------

    def _note(self, ways: tuple[Way, ...], answers: dict[str, Answer], state_bytes: int) -> None:
        """The points of a round, in the order of the ways rather than of the turns."""
        settings, part = self.settings, self._part
        base_s = 0.0
        if part.intervals is not None:
            (base,) = answers[IDEAL]["blocks"]
            base_s = 1 / per_s(base)
            if part.measure is PapersMeasure.THROUGHPUT:
                for every in part.intervals(settings):
                    self._found.add(THROUGHPUT, IDEAL, every, per_s(base))
        for way in ways:
            if way.name in answers:
                answer = answers[way.name]
                blocks = {
                    block["iterations"] // len(block["stalls_s"]): block
                    for block in answer.get("blocks", ())
                }
                blocks = dict(sorted(blocks.items()))
                part.note(self._found, Turn(way, blocks, base_s, answer, state_bytes), settings)

    def _note_check(self, way: Way, equal: bool) -> None:
        entrant = self.report.entrants[way.contender]
        entrant.restored = equal and entrant.restored is not False
        self._restored[way.name] = equal and self._restored.get(way.name, True)
        if not equal:
            entrant.remark(f"{self._part.measure}, {way.name}: restored other bytes")


def _fields(settings: PapersSettings) -> dict[str, Any]:
    memory = None if settings.memory is None else describe(settings.memory).filesystem
    return {"memory_root": memory}


SUITE = Suite(
    settings=PapersSettings,
    schedule=measure,
    figures=lambda report: [Own(tables, drawings)],
    about=training_line,
    fields=_fields,
    write=write,
)
