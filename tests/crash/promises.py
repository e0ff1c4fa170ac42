"""What holds after any crash: open the root again, look, and save on."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from ckpt_core import Checkpointer, load, verify
from ckpt_core.store import committed_steps
from ckpt_core.system.files import Files
from ckpt_core.types import step_dir_name
from tests.crash.states import (
    HOUSEKEEPING,
    NAMES,
    SECOND,
    blank_like,
    describe,
    make_state,
    options,
    step_state,
)

Found = tuple[int, int]
"""(step, mark)"""

LATER = 1000


class QuickFiles(Files):
    """Real files without the waiting for the disk."""

    def sync_dir(self, path: Path) -> None:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))

    def sync(self, fd: int) -> None:
        pass


def check_visible(root: Path, *, corrupt: Collection[int] = ()) -> None:
    """Every step that a reader sees now is whole and bit-exact, but for those known as corrupt."""
    for step in committed_steps(root):
        if step not in corrupt:
            step_state(root, step)


def check_restart(
    root: Path,
    *,
    least: Collection[Found],
    started: Collection[Found],
    corrupt: Collection[int] = (),
    save_on: bool = True,
) -> Found | None:
    """Restart, and hold the root to its promise.

    Args:
        least: what was promised; one of the newest step in it, or something newer, is restored. Empty:
            nothing was promised.
        started: everything that may have become visible.
        corrupt: steps that were damaged on purpose.
        save_on: save once more and look for leftovers.
    """
    check_visible(root, corrupt=corrupt)
    with warnings.catch_warnings():
        # A sound step that is passed over is a broken promise.
        warnings.simplefilter("ignore" if corrupt else "error")
        with Checkpointer(root, options(), files=QuickFiles()) as ck:
            found = _restored(ck, corrupt)
            check_visible(root, corrupt=corrupt)
            if least:
                assert found is not None, f"{sorted(least)} were promised and nothing is there"
                newest = max(step for step, _ in least)
                assert found in least or found[0] > newest, f"promised {sorted(least)}, got {found}"
            assert found is None or found in started, f"{found} was never saved"
            if save_on:
                _save_on(ck)
    if save_on:
        check_clean(root)
    return found


def _restored(ck: Checkpointer, corrupt: Collection[int]) -> Found | None:
    sound = [step for step in ck.steps() if step not in corrupt]
    if not sound:
        return None
    live = blank_like(load(ck.root / step_dir_name(max(sound))))
    restored = ck.restore(live)
    assert restored is not None and restored.step == max(sound)
    live |= {key: restored.state[key] for key in ("step", "mark", "notes")}
    return describe(live)


def _save_on(ck: Checkpointer) -> None:
    for step in (LATER, LATER + 1):
        ck.save(step, make_state(step)).committed.result(60)
    assert ck.latest_step() == LATER + 1


def check_clean(root: Path, *, spare_slots: int = 2) -> None:
    """Nothing lies in the root that does not belong there."""
    steps = committed_steps(root)
    names = {entry.name for entry in root.iterdir()}
    strange = {name for name in names if not name.startswith("step-")} - HOUSEKEEPING
    assert not strange, strange
    assert len(steps) == len(names) - len(names & HOUSEKEEPING)
    assert not list((root / ".inflight").glob("*")), "leftovers of attempts"
    assert len(list((root / ".slots").glob("*"))) <= spare_slots
    for step in steps:
        found = {entry.name for entry in (root / f"step-{step:012d}").iterdir()}
        assert found - {SECOND} == NAMES, found
    report = verify(root)
    assert report.ok, report


def quiet() -> None:
    """What the engine logs about repairs is no news here. For good: for processes of their own."""
    logging.getLogger("ckpt_core").setLevel(logging.CRITICAL)


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    """The same for one test; a conftest imports it."""
    logger = logging.getLogger("ckpt_core")
    level = logger.level
    quiet()
    yield
    logger.setLevel(level)
