"""The suite `policy`: settings, the order of a run, and what is noted of each round."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median
from typing import Any, ClassVar

from ckpt_core.bench.checks import check_bound
from ckpt_core.bench.crew import Crew
from ckpt_core.bench.machine import check_room
from ckpt_core.bench.policy import conditions, shown
from ckpt_core.bench.policy.conditions import ALONE, CONDITIONS, FIXED, NAMES
from ckpt_core.bench.policy.processors import MEMORY, Load
from ckpt_core.bench.policy.reaction import (
    added_from,
    compare,
    counted_from,
    intervals_of,
    iterations_until,
    overheads_from,
    settled_overhead,
)
from ckpt_core.bench.results import Entrant, Figure
from ckpt_core.bench.run import Run
from ckpt_core.bench.settings import ModelSize, RunSettings, model_of
from ckpt_core.bench.suite import Suite
from ckpt_core.bench.team import Launcher

_LEAST_BYTES = 2**20
_MEMORY_STATES = 6
"""In sizes of the state: what trains with its gradients, staging memory of two saves, dirty pages."""

_DISK_STATES = 5
_PROCESS_BYTES = 500 * 2**20
_CALM = 1.5
"""By how much the interval may be longer than alone for the second job to begin."""

_CUT = "a block ended before its interval: it took too long"
Answer = dict[str, Any]


class PolicyMeasure(StrEnum):
    """Groups of figures that can be asked for one by one."""

    OVERHEAD = "overhead"
    DECISION = "decision"


@dataclass(frozen=True, slots=True)
class Blocks:
    """How long the parts of a round are, in iterations.

    Attributes:
        settle_saves: saves before the first block.
        pairs: blocks with saves in a round, each with one without saves before it, and one behind the last.
            Many short ones: iterations drift, and only what is close together can be compared.
        base: of a block without saves.
        saving: least of a block with saves, which is made of whole intervals.
        change: least that is looked at after the second job has begun.
        quiet: most that `Auto` is given, before the second job begins, to come back to a short interval.
        limit_s: longest time that a block with saves may take.
    """

    settle_saves: int = 3
    pairs: int = 6
    base: int = 12
    saving: int = 15
    change: int = 100
    quiet: int = 200
    limit_s: float = 60.0


_BLOCKS = Blocks()


@dataclass(frozen=True, kw_only=True)
class PolicySettings(RunSettings):
    """One run of CheckFreq's experiment; see `RunSettings` for the other fields. Nothing is drawn at random.

    Attributes:
        state_bytes: parameters and AdamW state of the model.
        max_overhead: the bound that `Auto` is given.
        threads: that the training computes with; the engine has what is left, as it has beside a GPU.
        batch, tokens: of one iteration; together with `state_bytes` they set how long it takes. With few
            tokens it is mostly memory traffic, and differs by a fifth from one time to the next.
        load_threads: of the second job that compute; None: as many as there are processors besides
            those that train, and at least one.
        load_writers: of its threads that write, each into a file of its own.
        load_file_bytes: of such a file, which is written again and again.
        blocks: parts of a round.
        questions: decisions of `Auto` that are timed.
        contenders: names of conditions; `auto_alone` always runs, since the others need its interval.
        staging_bytes: bound of our staging memory; None leaves the engine's default.
    """

    state_bytes: int = 128 * 10**6
    max_overhead: float = 0.05
    threads: int = 1
    batch: int = 1
    tokens: int = 128
    load_threads: int | None = None
    load_writers: int = 1
    load_file_bytes: int = 256 * 2**20
    blocks: Blocks = _BLOCKS
    questions: int = 100_000
    contenders: tuple[str, ...] = NAMES
    measures: tuple[PolicyMeasure, ...] = tuple(PolicyMeasure)
    staging_bytes: int | None = None

    suite: ClassVar = "policy"
    leasts: ClassVar = dict.fromkeys(
        ("threads", "batch", "tokens", "load_writers", "questions"), 1
    ) | dict.fromkeys(("state_bytes", "load_file_bytes"), _LEAST_BYTES)
    numbers: ClassVar = ()
    trial: ClassVar = {
        "state_bytes": 2 * 2**20,
        "rounds": 2,
        "tokens": 8,
        "load_file_bytes": 4 * 2**20,
        "blocks": Blocks(
            settle_saves=1, pairs=2, base=4, saving=5, change=12, quiet=15, limit_s=1.0
        ),
        "questions": 2000,
    }

    def check(self) -> None:
        """The bound is a part of 1."""
        check_bound(self.max_overhead)

    @property
    def model(self) -> ModelSize:
        """A model whose state is about `state_bytes`."""
        size = model_of(self.state_bytes)
        return dataclasses.replace(size, batch=self.batch, tokens=self.tokens)

    @property
    def load(self) -> Load:
        """The second job."""
        free = len(os.sched_getaffinity(0)) - self.threads
        threads = max(1, free) if self.load_threads is None else self.load_threads
        return Load(threads, disk_threads=self.load_writers, file_bytes=self.load_file_bytes)


def measure(run: Run[PolicySettings]) -> None:
    """One condition after the other; the first one is needed for whatever is asked.

    Raises:
        ConfigError: there is no room for the run.
    """
    settings, report = run.settings, run.report
    report.ours = NAMES
    report.more["policy"] = {"decision": None, "conditions": {}}
    load_bytes = (settings.load.disk_threads + 1) * settings.load.file_bytes
    check_room(
        settings.root,
        disk_bytes=settings.state_bytes * _DISK_STATES + load_bytes,
        memory_bytes=settings.state_bytes * _MEMORY_STATES + 3 * _PROCESS_BYTES,
    )
    overhead = PolicyMeasure.OVERHEAD in settings.measures
    for name in CONDITIONS:
        if name == ALONE or (overhead and name in settings.contenders):
            with _Condition(run, name) as job:
                job.measure()


class _Condition(Crew):
    """The one process that is at work. Close it, or use it in a `with` block."""

    def __init__(self, run: Run[PolicySettings], name: str) -> None:
        environment = {"OMP_NUM_THREADS": str(run.settings.threads), **MEMORY}
        worker = "ckpt_core.bench.policy.worker:JobWorker"
        super().__init__(run, Launcher(worker=worker, environment=environment))
        self.settings = run.settings
        self.name = name
        self.enter([name], about={name: Entrant(fsyncs="yes", title=CONDITIONS[name].title)})
        self._condition = CONDITIONS[name]
        self._found: dict[str, Any] = {
            "title": self._condition.title,
            "fixed": None,
            "trace": [],
            "rounds": [],
            "changes": [],
        }

    def measure(self) -> None:
        """All rounds of the condition, and the check of what it has saved."""
        interval = self._fixed() if self.name == FIXED else None
        if self.name == FIXED and interval is None:
            self.report.entrants[FIXED] = Entrant(
                reason=f"{ALONE} has found no interval", title=self._condition.title
            )
            return
        measures = self.settings.measures
        if self.name == ALONE and PolicyMeasure.DECISION in measures:
            self.notify("the time of a decision")
            answer = self._ask("decide", questions=self.settings.questions)
            if answer is not None:
                names = ("questions", "median_s", "mean_s", "worst_s")
                self.report.more["policy"]["decision"] = {name: answer[name] for name in names}
        if PolicyMeasure.OVERHEAD not in measures:
            return
        if self._open(interval) and self._settle() and self._all_rounds():
            answer = self._ask("check")
            if answer is not None:
                entrant = self.report.entrants[self.name]
                entrant.compare(answer["live"], answer["restored"])

    def _ask(self, operation: str, **arguments: Any) -> Answer | None:
        return self.ask_one(self.name, operation, **arguments)

    def _fixed(self) -> int | None:
        """The interval that was usual alone."""
        found = self.report.stats(conditions.INTERVAL).get(ALONE)
        return None if found is None else max(1, round(found.median))

    def _open(self, interval: int | None) -> bool:
        settings, report = self.settings, self.report
        self.notify(f"{self.name}: starting")
        self._found["fixed"] = interval
        report.more["policy"]["conditions"][self.name] = self._found
        hello = self._ask("hello")
        opened = self._ask(
            "open",
            size=dataclasses.asdict(settings.model),
            policy={"interval": interval, "max_overhead": settings.max_overhead},
            load=dataclasses.asdict(settings.load),
            threads=settings.threads,
            staging_bytes=settings.staging_bytes,
            timeout_s=settings.timeout_s,
        )
        if hello is None or opened is None:
            return False
        entrant = report.entrants[self.name]
        entrant.introduce(hello)
        policy = f"every {interval} steps"
        if self._condition.adapts:
            policy = f"Auto(max_overhead={settings.max_overhead:g})"
        entrant.settings = f"{policy}, {self._condition.title}"
        report.settings.update(state_bytes=opened["state_bytes"], leaves=opened["leaves"])
        return True

    def _settle(self) -> bool:
        """Before the rounds; the second job is there from the beginning where it never begins anew."""
        blocks = self.settings.blocks
        if self._condition.disturbed and not self._condition.adapts:
            self._ask("disturb", on=True)
        answer = self._ask("settle", saves=blocks.settle_saves, within_s=blocks.limit_s)
        if answer is None:
            return False
        self._trace("settle", answer["block"])
        return True

    def _all_rounds(self) -> bool:
        changes = self._condition.disturbed and self._condition.adapts
        for _ in self.rounds(self.name):
            changed = self._change() if changes else None
            if changes and changed is None:
                return False
            answer = self._compare()
            if answer is None:
                return False
            if changed is not None:
                self._note_change(changed, compare(answer).base_s)
                self._ask("disturb", on=False)
        if changes:
            self._note_settled()
        return True

    def _change(self) -> Answer | None:
        """The second job begins in the middle of the run."""
        blocks = self.settings.blocks
        answer = self._ask(
            "change",
            below=round((self._fixed() or 1) * _CALM),
            quiet=blocks.quiet,
            least=blocks.change,
            within_s=blocks.limit_s,
        )
        if answer is not None:
            self._trace("calm", answer["calm"])
            self._trace("change", answer["change"])
        return answer

    def _compare(self) -> Answer | None:
        blocks = self.settings.blocks
        sizes = {"pairs": blocks.pairs, "base": blocks.base, "saving": blocks.saving}
        answer = self._ask("compare", **sizes, within_s=blocks.limit_s)
        if answer is None:
            return None
        for pair in answer["pairs"]:
            for part in ("before", "saving", "drain"):
                self._trace(part, pair[part])
        self._trace("after", answer["after"])
        self._note_compared(answer)
        return answer

    # -- notes -----------------------------------------------------------------------------------

    def _note_compared(self, answer: Answer) -> None:
        found = compare(answer)
        saving = [pair["saving"] for pair in answer["pairs"]]
        intervals = [interval for block in saving for interval in intervals_of(block)]
        told = None if None in answer["told"] else median(answer["told"])
        values = {
            conditions.OVERHEAD: found.overhead,
            conditions.ITERATION: found.base_s,
            conditions.COST: found.cost_s,
            conditions.INTERVAL: median(intervals),
            conditions.TOLD: told,
        }
        for figure, value in values.items():
            if value is not None:
                self.report.add(figure, self.name, value)
        if any(block["cut"] for block in saving):
            self.report.entrants[self.name].remark(_CUT)
        self._found["rounds"].append(
            {
                "overhead": found.overhead,
                "told": told,
                "base_s": found.base_s,
                "cost_s": found.cost_s,
                "stall_s": sum(block["stall_s"] for block in saving) / found.saves,
                "iterations": found.iterations,
                "drained": sum(len(pair["drain"]["seconds"]) for pair in answer["pairs"]),
                "intervals": intervals,
            }
        )

    def _note_change(self, answer: Answer, base_s: float) -> None:
        block = answer["change"]
        overheads = overheads_from(block["seconds"], base_s)
        after = self._note_reaction(conditions.REACTION, overheads)
        added = None
        if len(block["active"]) < len(block["seconds"]):
            added = added_from(block["seconds"], block["active"])
            self._note_reaction(conditions.ADDED, added)
        self._found["changes"].append(
            {
                "after": after,
                "overheads": overheads,
                "added": added,
                "saves": block["saves"],
                "intervals": block["intervals"],
                "calmed": len(answer["calm"]["seconds"]),
            }
        )

    def _note_reaction(self, figure: Figure, overheads: list[float]) -> int | None:
        """After how many iterations the following ones are within the bound; None: never."""
        after = iterations_until(self.settings.max_overhead, overheads)
        if after is None:
            text = f"a change was not met within {len(overheads)} iterations"
            self.report.entrants[self.name].remark(text)
        # A bound from below is better than a value that is left out.
        self.report.add(figure, self.name, len(overheads) if after is None else after)
        return after

    def _note_settled(self) -> None:
        """Afterwards, when it is known what a save costs beside the second job."""
        fixed = self.report.more["policy"]["conditions"].get(FIXED, {})
        rounds = [*fixed.get("rounds", ()), *self._found["rounds"]]
        cost = fmean(row["cost_s"] / row["base_s"] for row in rounds)
        for change in self._found["changes"]:
            settled = settled_overhead(change["saves"], len(change["overheads"]), cost)
            change["settled"] = settled
            self.report.add(conditions.SETTLED, self.name, settled)
            counted = counted_from(change["saves"], len(change["overheads"]), cost)
            change["counted"] = self._note_reaction(conditions.COUNTED, counted)

    def _trace(self, part: str, block: Answer) -> None:
        """Every iteration is kept, for the picture and for whoever doubts a figure."""
        if block["seconds"]:
            seconds = [round(value, 6) for value in block["seconds"]]
            self._found["trace"].append({"part": part, **block, "seconds": seconds})


SUITE = Suite(
    settings=PolicySettings,
    schedule=measure,
    figures=lambda report: shown.FIGURES,
    about=shown.job_line,
    fields=lambda settings: {"load": dataclasses.asdict(settings.load), "leaves": 0},
)
