"""The garbage collector is as it was after a save, and has no hundred thousand objects more to walk soon."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckpt_core import Checkpointer, Options, StateMismatch

LEAVES = 12_000


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[Checkpointer, dict[str, torch.Tensor]]]:
    """After a first save, which does not know yet of how many leaves it is."""
    named = {f"leaf{number}": torch.zeros(8) for number in range(LEAVES)}
    with Checkpointer(tmp_path, Options(mode="host", eager_leaf_bytes=0)) as ck:
        ck.save(1, named)
        ck.wait()
        gc.unfreeze()  # What conftest.py has frozen.
        gc.collect()
        yield ck, named
    gc.freeze()


def test_what_a_save_of_many_leaves_made_is_old(
    saved: tuple[Checkpointer, dict[str, torch.Tensor]],
) -> None:
    ck, state = saved
    walks: list[int] = []

    def note(phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            walks.append(len(gc.get_objects(generation=0)))

    gc.callbacks.append(note)
    try:
        ck.save(2, state)
        young = len(gc.get_objects(generation=0))
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled() and not gc.get_freeze_count()
    assert young < LEAVES // 2
    assert all(walked < LEAVES // 2 for walked in walks)


def test_no_garbage_gets_old_with_it(
    saved: tuple[Checkpointer, dict[str, torch.Tensor]],
) -> None:
    ck, state = saved
    gone = weakref.ref(Cycle())
    ck.save(2, state)
    assert gone() is None


def test_what_the_user_has_frozen_stays_so(
    saved: tuple[Checkpointer, dict[str, torch.Tensor]],
) -> None:
    ck, state = saved
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        ck.save(2, state)
        # What was made of the first save may have ended since; nothing has joined.
        assert before // 2 < gc.get_freeze_count() <= before
    finally:
        gc.unfreeze()
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off(
    saved: tuple[Checkpointer, dict[str, torch.Tensor]],
) -> None:
    ck, state = saved
    gc.disable()
    try:
        ck.save(2, state)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("collects", [False, True])
def test_a_restore_is_not_interrupted_by_the_collector_and_leaves_it_as_it_was(
    saved: tuple[Checkpointer, dict[str, torch.Tensor]], fails: bool, collects: bool
) -> None:
    ck, state = saved
    walks: list[str] = []
    live = {name: torch.ones_like(leaf) for name, leaf in state.items()}
    if fails:
        live["leaf0"] = torch.ones(3)
    gc.collect()
    if not collects:
        gc.disable()
    gc.callbacks.append(lambda phase, about: walks.append(phase))
    try:
        with pytest.raises(StateMismatch) if fails else contextlib.nullcontext():
            ck.restore(live)
        during, enabled = list(walks), gc.isenabled()
    finally:
        gc.callbacks.pop()
        gc.enable()
    assert enabled is collects
    assert len(during) <= 2, "more than the one behind it"
    assert fails or not live["leaf7"].any()


def test_a_process_that_is_forked_while_a_save_has_paused_the_collector_has_one(
    tmp_path: Path,
) -> None:
    entered, forked = threading.Event(), threading.Event()

    class Slow:
        def state_dict(self) -> dict[str, torch.Tensor]:
            entered.set()
            assert forked.wait(60)
            assert not gc.isenabled()
            return {"x": torch.ones(3)}

        def load_state_dict(self, state: dict[str, torch.Tensor]) -> None: ...

    with Checkpointer(tmp_path) as ck:
        saving = threading.Thread(target=ck.save, args=(1, {"slow": Slow()}))
        saving.start()
        assert entered.wait(60)
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
        forked.set()
        saving.join(60)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gc.isenabled()


def test_a_fork_leaves_a_collector_off_that_the_program_has_switched_off(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"x": torch.ones(3)})
        gc.disable()
        try:
            child = os.fork()
            if child == 0:
                os._exit(1 if gc.isenabled() else 0)
        finally:
            gc.enable()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
