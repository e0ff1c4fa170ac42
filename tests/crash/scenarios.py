"""What a training process may be doing when it dies. Each runs on a root that `prepare` made."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from ckpt_core import Checkpointer
from ckpt_core.restore import RestoreWarning
from ckpt_core.system.files import Files
from ckpt_core.types import step_dir_name
from tests.crash.layers import NoExchange, NoLinks
from tests.crash.promises import Found, QuickFiles, check_restart
from tests.crash.states import make_state, options

Acknowledge = Callable[[int, int], None]
"""Called with (step, mark) once that step has been committed."""

_WAIT_S = 60

LATER_ON = 50


def _ignore(step: int, mark: int) -> None:
    pass


def _ignore_all(name: str, *args: Any) -> None:
    pass


class Run:
    """One process that saves: a Checkpointer, and whoever wants to know what it has committed."""

    def __init__(
        self, ck: Checkpointer, acknowledge: Acknowledge, note: Callable[..., None] = _ignore_all
    ) -> None:
        self.ck = ck
        self.note = note
        self._acknowledge = acknowledge

    def start(self, step: int, *, mark: int = 0, rows: int = 2, base: bool = False) -> Any:
        """Save, and acknowledge behind the training thread."""
        handle = self.ck.save(step, make_state(step, mark, rows=rows, base=base))
        return self.watch(handle, step, mark)

    def save(self, step: int, *, mark: int = 0, rows: int = 2, base: bool = False) -> None:
        """Save, and wait for the commit."""
        self.start(step, mark=mark, rows=rows, base=base).committed.result(_WAIT_S)

    def layerwise(self, step: int, *, base: bool = False) -> None:
        """Save name by name."""
        state = make_state(step, base=base)
        save = self.ck.begin(step, {name: state[name] for name in ("weight", "moment")})
        save.stage(["moment"])
        save.stage(["weight"])
        self.watch(save.seal(state), step, 0).committed.result(_WAIT_S)

    def watch(self, handle: Any, step: int, mark: int) -> Any:
        """Acknowledge a save once it is committed."""

        def done(future: Any) -> None:
            if future.exception() is None:
                self._acknowledge(step, mark)

        handle.committed.add_done_callback(done)
        return handle


@dataclass(frozen=True)
class Scenario:
    """A history and what happens next.

    Attributes:
        act: what the process does that dies.
        history: (step, rows) of the saves before it.
        started: what `act` may commit.
        options: changes to the options of both.
        base: the files below; one without `exchange` takes the other way to replace a step.
        damaged: the newest step of the history has a flipped bit when `act` begins.
    """

    act: Callable[[Run], None]
    history: tuple[tuple[int, int], ...] = ((5, 2), (10, 2), (20, 2))
    started: tuple[Found, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    base: type[Files] = QuickFiles
    damaged: bool = False

    def prepare(
        self, root: Path, files: Files | None = None, acknowledge: Acknowledge = _ignore
    ) -> None:
        """Make the root as it is before the process that dies."""
        if not self.history:
            return
        with Checkpointer(root, options(), files=files or QuickFiles()) as ck:
            run = Run(ck, acknowledge)
            for step, rows in self.history:
                run.save(step, rows=rows)
        if self.damaged:
            flip_newest(root, files or QuickFiles())

    def run(
        self,
        root: Path,
        files: Files,
        acknowledge: Acknowledge,
        note: Callable[..., None] = _ignore_all,
    ) -> None:
        """Open the root, act, close; `note` is told of what is promised beside steps."""
        with Checkpointer(root, options(**self.options), files=files) as ck:
            self.act(Run(ck, acknowledge, note))

    @property
    def known(self) -> frozenset[Found]:
        """Everything that may ever be visible."""
        return frozenset({*self.started, *((step, 0) for step, _ in self.history)})

    @property
    def corrupt(self) -> frozenset[int]:
        """Steps that were damaged."""
        return frozenset({max(step for step, _ in self.history)} if self.damaged else ())

    @property
    def promised(self) -> frozenset[Found]:
        """What is committed before `act` begins, the newest of it."""
        steps = [step for step, _ in self.history if step not in self.corrupt]
        return frozenset({(max(steps), 0)} if steps else ())

    def check(self, root: Path, acknowledged: Collection[Found]) -> None:
        """Restart a killed root, and hold it to what was promised."""
        sure = {*acknowledged, *self.promised}
        newest = max((step for step, _ in sure), default=None)
        floor = max((mark for step, mark in sure if step == newest), default=0)
        # The last acknowledged form of the newest promised step, or a later one.
        least = {(step, mark) for step, mark in self.known if step == newest and mark >= floor}
        check_restart(root, least=least, started=self.known, corrupt=self.corrupt)

    def look(self, root: Path, promised: dict[int, frozenset[int]]) -> None:
        """The same after a power loss: each of these steps is there, with one of its marks."""
        sound = {step: marks for step, marks in promised.items() if step not in self.corrupt}
        least = {(step, mark) for step, marks in sound.items() for mark in marks}
        check_restart(root, least=least, started=self.known, corrupt=self.corrupt, save_on=False)
        there = {entry.name for entry in root.iterdir()}
        lost = [step for step in sound if step_dir_name(step) not in there]
        assert not lost, f"steps {lost} are gone"
        for step in self.corrupt:
            found = list(root.glob(f"**/{step_dir_name(step)}*"))
            assert found, f"the corrupt step {step} was deleted"

    def go_on(self, run: Run) -> None:
        """What the next process does, which adds `LATER_ON` to what is known."""
        run.save(LATER_ON)

    def went_on(self) -> Self:
        """The plan together with that."""
        return replace(self, started=(*self.started, (LATER_ON, 0)))


def _save_two(run: Run) -> None:
    run.save(30)
    run.save(40)


def _save_many(run: Run) -> None:
    for step in (30, 40, 50, 60, 70, 80):
        run.save(step)


def _save_two_at_once(run: Run) -> None:
    run.start(30)
    run.start(40)
    run.ck.wait()


def _replace(run: Run) -> None:
    run.save(20, mark=1)
    run.save(20, mark=2)


def _layerwise(run: Run) -> None:
    run.layerwise(30)
    run.save(40)


def _pin(run: Run) -> None:
    run.ck.pin(10)
    run.note("pinned", frozenset({10}))
    run.save(30)
    run.note("pinned", None)
    run.ck.unpin(10)
    run.note("pinned", frozenset())
    run.save(40)


def _share(run: Run) -> None:
    for step in (30, 40, 45):
        run.save(step, base=True)
    # A step that has the file too takes the place of one; the last save writes its own.
    run.save(45, mark=1, base=True)
    run.save(47, base=True)


def _share_layerwise(run: Run) -> None:
    for step in (30, 40, 45):
        run.layerwise(step, base=True)


def _save_after_a_corrupt_step(run: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RestoreWarning)
        found = run.ck.restore(make_state(0))
    assert found is not None and found.step == 10
    run.save(30)


def flip_newest(root: Path, files: Files) -> None:
    """Change one bit of the newest step's weights, durably."""
    newest = max(path for path in root.iterdir() if path.name.startswith("step-"))
    shard = newest / "shard-00000-0.safetensors"
    byte = shard.read_bytes()[8192]
    fd = files.open_write(shard)
    files.pwrite(fd, bytes([byte ^ 1]), 8192)
    files.sync(fd)
    files.close(fd)


_TWO = ((30, 0), (40, 0))
_BIG = ((5, 4), (10, 4), (20, 2))
_SMALL = ((5, 1), (10, 1), (20, 2))
_MANY = tuple((step, 0) for step in (30, 40, 50, 60, 70, 80))
_MARKS = ((20, 1), (20, 2))
_SHARED = ((30, 0), (40, 0), (45, 0), (45, 1), (47, 0))
_SHARING = {"share_unchanged": True, "frozen": ["base"], "rebase_every": 4}

SCENARIOS: dict[str, Scenario] = {
    "first_save": Scenario(lambda run: run.save(30), history=(), started=((30, 0),)),
    "retire_and_recycle": Scenario(_save_two, started=_TWO),
    "recycle_larger_files": Scenario(_save_two, history=_BIG, started=_TWO),
    "recycle_smaller_files": Scenario(_save_two, history=_SMALL, started=_TWO),
    "replace_by_exchange": Scenario(_replace, started=_MARKS),
    "replace_by_two_renames": Scenario(_replace, started=_MARKS, base=NoExchange),
    "two_in_flight": Scenario(_save_two_at_once, started=_TWO, options={"writers": 3}),
    "keep_one": Scenario(_save_two, started=_TWO, options={"keep_last": 1}),
    "layerwise": Scenario(_layerwise, started=_TWO),
    "two_phases": Scenario(
        lambda run: run.layerwise(30),
        history=((20, 1),),
        started=((30, 0),),
        options={"pipelined": False, "blocking": True, "in_flight": 1},
    ),
    "direct": Scenario(_save_two, started=_TWO, options={"mode": "direct"}),
    "buffered": Scenario(_save_two, started=_TWO, options={"direct_io": "off", "writers": 2}),
    "pins": Scenario(_pin, started=_TWO),
    "share": Scenario(_share, started=_SHARED, options=_SHARING),
    "share_layerwise": Scenario(
        _share_layerwise, started=((30, 0), (40, 0), (45, 0)), options=_SHARING
    ),
    "share_without_links": Scenario(_share, started=_SHARED, options=_SHARING, base=NoLinks),
    "corrupt_newest": Scenario(_save_after_a_corrupt_step, started=((30, 0),), damaged=True),
}

IN_MEMORY: dict[str, Scenario] = {
    "mapped_for_good": Scenario(_save_many, started=_MANY, options={"keep_last": 1}),
    "written_through_mappings": Scenario(
        _save_many, started=_MANY, options={"keep_last": 1, "mode": "host"}
    ),
}
"""On tmpfs, where files stay mapped from the save that wrote them to the one that overwrites them."""
