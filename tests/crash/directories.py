"""Saves of named files that may be cut short, and what must hold of their directories and the pointer.

A directory `tag<step>` stands for a save as a step does in the other scenarios, with the same marks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckpt_core import Checkpointer, verify
from ckpt_core.system.files import Files
from tests.crash.layers import NoExchange, NoLinks
from tests.crash.promises import LATER, Found, QuickFiles
from tests.crash.scenarios import LATER_ON, Acknowledge, Run, Scenario
from tests.crash.states import HOUSEKEEPING, assert_same, make_state, options

POINTER = "latest"
_FOREIGN = {"foreign.pt": b"somebody else's", "sub/more.pt": b"also"}
_BASE = "sub/base.pt"
_KEPT = ("model.pt", "optim.pt")
_WAIT_S = 60


def name_of(step: int) -> str:
    return f"tag{step}"


def files_of(step: int, mark: int, *, base: bool = False) -> dict[str, Any]:
    """Two files, one of them in a directory, that show what they are of.

    Args:
        base: with one more that is the same at every step.
    """
    state = make_state(step, mark)
    rest = {key: state.pop(key) for key in ("moment", "buffer")}
    files = {"model.pt": state, "sub/optim.pt": rest | {"step": step, "mark": mark}}
    return files | ({_BASE: {"base": torch.arange(3000.0).sin()}} if base else {})


def start(
    run: Run,
    step: int,
    mark: int = 0,
    *,
    base: bool = False,
    replaces: tuple[str, ...] | None = None,
) -> Any:
    """Save a directory, and acknowledge behind the training thread."""
    save = run.ck.begin_files(step, name_of(step), pointer=POINTER, replaces=replaces)
    for name, tree in files_of(step, mark, base=base).items():
        save.add(name, tree)
    return run.watch(save.seal(), step, mark)


def save(run: Run, step: int, mark: int = 0) -> None:
    """The same, and wait for the commit."""
    start(run, step, mark).committed.result(_WAIT_S)


def _keep(run: Run, step: int, mark: int) -> None:
    start(run, step, mark, replaces=_KEPT).committed.result(_WAIT_S)


def _share(run: Run) -> None:
    for step, mark in _SHARED:
        start(run, step, mark, base=True).committed.result(_WAIT_S)


@dataclass(frozen=True)
class Directories(Scenario):
    """A history of directories and what happens next.

    Attributes:
        foreign: others have made `tag20` before; that counts as its mark 0.
        keeps: what they have put there stays, whatever is saved.
    """

    history: tuple[tuple[int, int], ...] = ((5, 0), (10, 0))
    foreign: bool = False
    keeps: bool = False

    def prepare(
        self, root: Path, files: Files | None = None, acknowledge: Acknowledge = lambda *_: None
    ) -> None:
        """Make the root as it is before the process that dies."""
        files = files or QuickFiles()
        if self.history:
            with Checkpointer(root, options(), files=files) as ck:
                for step, _ in self.history:
                    save(Run(ck, acknowledge), step)
        if self.foreign:
            _make_foreign(root / name_of(20), files)
            acknowledge(20, 0)

    @property
    def order(self) -> tuple[Found, ...]:
        """Every save that moves the pointer, in the order in which they begin."""
        return (*((step, 0) for step, _ in self.history), *self.started)

    @property
    def known(self) -> frozenset[Found]:
        """Everything that may ever be visible."""
        return frozenset({*self.order, *([(20, 0)] if self.foreign else [])})

    @property
    def promised(self) -> frozenset[Found]:
        """What is there before `act` begins."""
        return self.known - set(self.started)

    def check(self, root: Path, acknowledged: Collection[Found]) -> None:
        """Whatever is visible is whole; after a restart all that was promised is there."""
        sure = {*acknowledged, *self.promised}
        floors = {step: max(m for s, m in sure if s == step) for step, _ in sure}
        marks = {step: frozenset(range(floor, 3)) for step, floor in floors.items()}
        self.check_restart(root, marks, save_on=True)

    def look(self, root: Path, promised: dict[int, frozenset[int]]) -> None:
        """The same after a power loss."""
        self.check_restart(root, promised, save_on=False)

    def go_on(self, run: Run) -> None:
        """What the next process does."""
        save(run, LATER_ON)

    def check_restart(self, root: Path, marks: dict[int, frozenset[int]], *, save_on: bool) -> None:
        """Restart, and look for directories of these steps, each with one of its marks."""
        self._check_visible(root, needs_pointed=self.base is QuickFiles)
        with Checkpointer(root, options(), files=QuickFiles()) as ck:
            self._check_visible(root, needs_pointed=True)
            for step, allowed in marks.items():
                found = found_in(root / name_of(step), keeps=self.keeps)
                assert found in {(step, mark) for mark in allowed}, f"{found}, promised {marks}"
            self._check_pointer(root, marks)
            assert ck.steps() == ()
            if save_on:
                save(Run(ck, lambda *_: None), LATER)
        if save_on:
            assert (root / POINTER).read_text() == name_of(LATER)
            _check_clean(root)

    def _check_visible(self, root: Path, *, needs_pointed: bool) -> None:
        for path in root.glob("tag*"):
            assert found_in(path, keeps=self.keeps) in self.known, path
        pointer = root / POINTER
        if pointer.exists():
            named = root / pointer.read_text()
            assert named.name in {name_of(step) for step, _ in self.order}, named
            assert named.exists() or not needs_pointed, f"{named} is gone"

    def _check_pointer(self, root: Path, marks: dict[int, frozenset[int]]) -> None:
        sure = [i for i, (step, mark) in enumerate(self.order) if _is_sure(marks, step, mark)]
        if not sure:
            return
        allowed = {name_of(step) for step, _ in self.order[max(sure) :]}
        assert (root / POINTER).read_text() in allowed, f"promised {marks}"


def _is_sure(marks: dict[int, frozenset[int]], step: int, mark: int) -> bool:
    """Whether that save was acknowledged: nothing older may be there any more."""
    return step in marks and min(marks[step]) >= mark


def found_in(path: Path, *, keeps: bool = False) -> Found:
    """What a directory holds, once every bit of it has been checked.

    Args:
        keeps: what others have put into `tag20` is still there.
    """
    there = {str(p.relative_to(path)): p for p in path.rglob("*") if p.is_file()}
    if "manifest.json" not in there:
        assert {name: p.read_bytes() for name, p in there.items()} == _FOREIGN
        return 20, 0
    if keeps and path.name == name_of(20):
        assert {name: there.pop(name).read_bytes() for name in _FOREIGN} == _FOREIGN
    report = verify(path)
    assert report.ok, report
    trees = {n: torch.load(p, weights_only=True) for n, p in there.items() if n.endswith(".pt")}
    step, mark = trees["model.pt"]["step"], trees["model.pt"]["mark"]
    expected = files_of(step, mark, base=_BASE in trees)
    assert trees.keys() == expected.keys()
    assert_same({name: trees[name] for name in expected}, expected)
    assert path.name == name_of(step)
    return step, mark


def _make_foreign(path: Path, files: Files) -> None:
    for folder in (path, path / "sub"):
        files.mkdir(folder)
    for name, data in _FOREIGN.items():
        files.write_new(path / name, data)
    for folder in (path / "sub", path, path.parent):
        files.sync_dir(folder)


def _check_clean(root: Path) -> None:
    names = {entry.name for entry in root.iterdir()}
    strange = {name for name in names if not name.startswith("tag")} - HOUSEKEEPING - {POINTER}
    assert not strange, strange
    assert not list(root.glob(".inflight/*")), "leftovers of attempts"
    assert not list(root.glob(".slots/*"))


def _two(act: Callable[..., Any], *saves: Found) -> Callable[[Run], None]:
    def run_them(run: Run) -> None:
        for step, mark in saves:
            act(run, step, mark)
        run.ck.wait()

    return run_them


_NEXT = ((30, 0), (40, 0))
_AGAIN = ((10, 1), (10, 2))
_OVER = ((20, 1), (20, 2))

_SHARED = ((30, 0), (40, 0), (45, 0), (45, 1), (47, 0))
_SHARING = {"share_unchanged": True, "rebase_every": 3}

DIRECTORIES: dict[str, Directories] = {
    "files_first": Directories(_two(save, (30, 0)), history=(), started=((30, 0),)),
    "files_next": Directories(_two(save, *_NEXT), started=_NEXT),
    "files_two_in_flight": Directories(
        _two(start, *_NEXT), started=_NEXT, options={"writers": 3, "direct_io": "off"}
    ),
    "files_again": Directories(_two(save, *_AGAIN), started=_AGAIN),
    "files_again_by_two_renames": Directories(_two(save, *_AGAIN), started=_AGAIN, base=NoExchange),
    "files_over_others": Directories(_two(save, *_OVER), started=_OVER, foreign=True),
    "files_over_others_by_two_renames": Directories(
        _two(save, *_OVER), started=_OVER, foreign=True, base=NoExchange
    ),
    "files_beside_others": Directories(
        _two(_keep, *_OVER), started=_OVER, foreign=True, keeps=True
    ),
    "files_beside_others_without_links": Directories(
        _two(_keep, *_OVER), started=_OVER, foreign=True, keeps=True, base=NoLinks
    ),
    "files_share": Directories(_share, started=_SHARED, options=_SHARING),
    "files_share_without_links": Directories(
        _share, started=_SHARED, options=_SHARING, base=NoLinks
    ),
}
