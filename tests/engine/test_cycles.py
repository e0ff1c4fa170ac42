"""What a save or a restore has made goes with the last who has it: nothing waits for the garbage collector.

That comes when it likes, on the training thread, and holds up device memory and locks until then.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_core
from ckpt_core import (
    BarrierError,
    Checkpointer,
    CkptError,
    CorruptCheckpoint,
    NotCommitted,
    Options,
    PersistError,
    RestoreError,
    StateMismatch,
)
from ckpt_core.errors import RestoreWarning
from ckpt_core.system.files import Files
from ckpt_core.types import step_dir_name

SOON_S = 60.0
ROUNDS = 5
STATE = {
    **{f"w{n}": torch.full((1500 + n,), float(n)) for n in range(3)},
    **{f"b{n}": torch.full((n + 5,), -float(n)) for n in range(2)},
}


def fresh() -> dict[str, Any]:
    return {name: torch.zeros_like(value) for name, value in STATE.items()} | {"step": 0}


def plain(ck: Checkpointer, step: int) -> None:
    ck.save(step, {**STATE, "step": step}).committed.result(SOON_S)


def layers(ck: Checkpointer, step: int) -> None:
    begun = ck.begin(step, STATE)
    begun.stage(["w0"])
    begun.stage([name for name in STATE if name != "w0"])
    begun.seal({**STATE, "step": step, "late": torch.ones(3)}).committed.result(SOON_S)


def files(ck: Checkpointer, step: int) -> None:
    begun = ck.begin_files(step, f"named-{step}")
    begun.add("model.pt", dict(STATE))
    begun.seal().committed.result(SOON_S)


def restored(ck: Checkpointer, step: int) -> None:
    plain(ck, step)
    assert ck.restore(fresh()) is not None


def loaded(ck: Checkpointer, step: int) -> None:
    plain(ck, step)
    assert ckpt_core.load(ck.root)["step"] == step


def waited(ck: Checkpointer, step: int) -> None:
    handle = ck.save(step, {**STATE, "step": step})
    ck.wait_staged()
    handle.committed.add_done_callback(lambda future: None)
    ck.wait()


def refused_by_the_disk(ck: Checkpointer, step: int) -> None:
    """What a writer and the stager had in hand."""
    ck._engine.files.fails = True
    handle = ck.save(step, {**STATE, "step": step})
    assert handle.committed.exception(SOON_S) is not None
    ck._engine.files.fails = False
    with pytest.raises(PersistError):
        ck.wait()
    until_idle(ck)


def changed_too_early(ck: Checkpointer, step: int) -> None:
    """A barrier is missing."""
    state = {f"w{n}": torch.ones(300_000 + n) for n in range(3)}
    ck._engine.files.held.clear()
    handle = ck.save(step, state)
    for one in state.values():
        one.zero_()
    ck._engine.files.held.set()
    assert isinstance(handle.committed.exception(SOON_S), BarrierError)
    with pytest.raises(BarrierError):
        ck.save(step + 1000, state)
    until_idle(ck)


def aborted(ck: Checkpointer, step: int) -> None:
    begun = ck.begin(step, STATE)
    begun.stage(["w0"])
    begun.abort()
    until_idle(ck)


def of_another_shape(ck: Checkpointer, step: int) -> None:
    plain(ck, step)
    with pytest.raises(StateMismatch):
        ck.restore({name: torch.zeros(7) for name in STATE} | {"step": 0})


def of_no_such_step(ck: Checkpointer, step: int) -> None:
    plain(ck, step)
    with pytest.raises(NotCommitted):
        ck.restore(
            {name: torch.zeros_like(value) for name, value in STATE.items()}, step=step + 1000
        )


def of_a_module_that_refuses(ck: Checkpointer, step: int) -> None:
    module = Refuses()
    ck.save(step, {"module": module}).committed.result(SOON_S)
    with pytest.raises(RestoreError, match="not this one"):
        ck.restore({"module": module})


def damaged(ck: Checkpointer, step: int) -> None:
    plain(ck, step)
    for shard in (ck.root / step_dir_name(step)).glob("shard-*"):
        shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(CorruptCheckpoint):
        ck.restore(fresh(), step=step)


def passed_over(ck: Checkpointer, step: int) -> None:
    """The newest is damaged, the one before is restored."""
    plain(ck, 2 * step)
    plain(ck, 2 * step + 1)
    for shard in (ck.root / step_dir_name(2 * step + 1)).glob("shard-*"):
        shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.warns(RestoreWarning):
        found = ck.restore(fresh())
    assert found is not None and found.step == 2 * step


class Refuses(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(30, 50)

    def load_state_dict(self, *given: Any, **named: Any) -> Any:
        raise RuntimeError("not this one")


class Troubled(Files):
    """Writes of pieces that fail or wait, and of manifests that wait."""

    def __init__(self) -> None:
        self.fails = False
        self.held = threading.Event()
        self.held.set()
        self.words = threading.Event()
        self.words.set()

    def write_new(self, *given: Any) -> Any:
        self.words.wait(SOON_S)
        return super().write_new(*given)

    def pwrite(self, *given: Any) -> Any:
        if self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.held.wait(SOON_S)
        return super().pwrite(*given)


HOW: list[tuple[Callable[[Checkpointer, int], None], dict[str, Any]]] = [
    (plain, {}),
    (plain, {"mode": "direct"}),
    (plain, {"share_unchanged": True}),
    (plain, {"pipelined": False}),
    (plain, {"blocking": True}),
    (layers, {}),
    (layers, {"share_unchanged": True}),
    (files, {}),
    (files, {"share_unchanged": True}),
    (restored, {}),
    (loaded, {}),
    (waited, {}),
    (refused_by_the_disk, {}),
    (changed_too_early, {"mode": "host"}),
    (aborted, {}),
    (of_another_shape, {}),
    (of_no_such_step, {}),
    (of_a_module_that_refuses, {}),
    (damaged, {}),
    (passed_over, {}),
]
TENSORS_ALONE = (refused_by_the_disk, changed_too_early, aborted)
"""A save that has failed is a circle, of a few hundred bytes."""


@contextlib.contextmanager
def left_to_the_collector() -> Iterator[list[Any]]:
    """What only it would have freed of what was made within."""
    found: list[Any] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize(
    ("act", "changes"), HOW, ids=[f"{act.__name__} {changes or ''}" for act, changes in HOW]
)
def test_nothing_of_it_waits_for_the_garbage_collector(
    tmp_path: Path, act: Callable[[Checkpointer, int], None], changes: dict[str, Any]
) -> None:
    options = Options(chunk_bytes=4096, staging_bytes="256KiB", eager_leaf_bytes=256, **changes)
    with Checkpointer(tmp_path, options, files=Troubled()) as ck:
        act(ck, 1)
        act(ck, 2)
        with left_to_the_collector() as left:
            for step in range(3, 3 + ROUNDS):
                act(ck, step)
            until_idle(ck)
        ours = [
            type(one)
            for one in left
            if isinstance(one, torch.Tensor)
            or (act not in TENSORS_ALONE and type(one).__module__.startswith("ckpt_core"))
        ]
        left.clear()
    # A thread that an earlier test has left behind may come to its end meanwhile, once.
    assert not [kind for kind, count in Counter(ours).items() if count >= ROUNDS]


def test_whoever_was_told_of_a_failure_goes_on_when_the_storage_comes_back(tmp_path: Path) -> None:
    """Python ends a generator whose frame is let go of."""
    files = Troubled()

    def training(ck: Checkpointer) -> Iterator[int]:
        for step in range(1, 4):
            try:
                ck.save(step, {"w": torch.ones(100)}).committed.result(SOON_S)
            except CkptError:
                yield -step
            else:
                yield step

    with Checkpointer(tmp_path, Options(timeout=1.0), files=files) as ck:
        steps = training(ck)
        files.words.clear()
        assert next(steps) == -1
        files.words.set()
        with pytest.raises(CkptError):
            ck.save(8, {"w": torch.ones(100)})
        # The thread that finishes saves is behind the first one then.
        ck.save(9, {"w": torch.ones(100)}).committed.exception(SOON_S)
        assert abs(next(steps)) == 2  # a second is short for a busy machine


def until_idle(ck: Checkpointer) -> None:
    """A save has ended for its threads too, which tell of it before they are through."""
    deadline = time.monotonic() + SOON_S
    while ck._engine.flights.active():
        assert time.monotonic() < deadline
        time.sleep(0.001)
