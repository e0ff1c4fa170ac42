"""Holds: retention leaves a step alone that parity rests on, also one that is held at the last moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_core.errors import ConfigError
from ckpt_core.levels.parity.holds import held_steps, hold, let_go
from ckpt_core.store import committed_steps
from ckpt_core.system.files import Files
from tests.levels.making import make_store, save
from tests.store.harness import QuickFiles


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / ".levels").mkdir(parents=True)
    return tmp_path / "root"


def test_a_step_that_is_held_stays_until_it_is_let_go(root: Path) -> None:
    store = make_store(root, keep_last=1)
    store.held = lambda: held_steps(root)
    save(store, 1)
    assert hold(root, 1, files=Files())
    for step in (2, 3):
        save(store, step)
        store.retire()
    assert committed_steps(root) == (1, 3)
    let_go(root, [1], files=Files())
    store.retire()
    assert committed_steps(root) == (3,)
    store.close()


def test_a_step_that_is_not_there_cannot_be_held(root: Path) -> None:
    assert not hold(root, 7, files=Files()) and held_steps(root) == frozenset()


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_hold_beside_a_retirement_keeps_the_step_or_is_refused(root: Path, number: int) -> None:
    class Late(QuickFiles):
        """Somebody holds the step right before one of the renames of a retirement."""

        renames = 0
        held: bool | None = None

        def rename(self, source: Path, target: Path) -> None:
            if "0001" in str(source) and retiring:
                if self.renames == number:
                    self.held = hold_now(root)
                self.renames += 1
            super().rename(source, target)

    files, retiring = Late(), False
    store = make_store(root, keep_last=1, files=files)
    store.held = lambda: held_steps(root)
    save(store, 1)
    save(store, 2)
    retiring = True
    store.retire()
    assert committed_steps(root) == ((1, 2) if files.held else (2,))
    assert held_steps(root) == (frozenset({1}) if files.held else frozenset())
    store.close()


def test_a_hold_that_comes_while_a_step_is_removed_by_hand_keeps_it(root: Path) -> None:
    class Late(QuickFiles):
        """Somebody has held the step when its name is gone, and has not looked for it yet."""

        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            if source.name.startswith("step-"):
                (root / ".levels" / "holds" / f"{1:012d}").touch()

    store = make_store(root, files=Late())
    for step in (1, 2):
        save(store, step)
    (root / ".levels" / "holds").mkdir()
    with pytest.raises(ConfigError, match=r"steps \[1\] are .*held for parity"):
        store.remove([1], held=lambda: held_steps(root))
    assert committed_steps(root) == (1, 2)
    with pytest.raises(ConfigError, match=r"steps \[1\] are .*held for parity"):
        store.remove([1, 2], held=lambda: held_steps(root))
    store.remove([1])
    assert committed_steps(root) == (2,)
    store.close()


def hold_now(root: Path) -> bool:
    """As another process does, which does not wait long for one that has stopped."""
    from ckpt_core.store import names

    waited = names._DECIDING_S
    names._DECIDING_S = 0.05
    try:
        return hold(root, 1, files=Files())
    finally:
        names._DECIDING_S = waited
