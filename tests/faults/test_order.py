"""Many saves in flight: commits may come in any order, and the newest step never goes back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ckpt_core import Checkpointer, load
from tests.crash.layers import hooked
from tests.crash.promises import QuickFiles, check_clean
from tests.crash.states import make_state, options, step_state
from tests.faults.layers import Delays

_WAIT_S = 60


class HoldStep:
    """The first write of one step waits until `release`."""

    def __init__(self, step: int) -> None:
        self._part = f"/{step:012d}-"
        self.free = threading.Event()
        self._once = threading.Lock()

    def __call__(self, name: str, args: tuple[Any, ...], act: Callable[[], Any]) -> Any:
        path = os.readlink(f"/proc/self/fd/{args[0]}")
        if self._part in path and self._once.acquire(blocking=False):
            assert self.free.wait(_WAIT_S)
        return act()


@pytest.mark.parametrize("keep_last", [None, 1, 2])
def test_an_older_step_that_ends_later_never_becomes_the_newest(
    keep_last: int | None, root: Path
) -> None:
    hold = HoldStep(10)
    chosen = options(in_flight=3, writers=3, keep_last=keep_last)
    with Checkpointer(root, chosen, files=hooked(QuickFiles, hold, ("pwrite",))) as ck:
        ck.save(5, make_state(5)).committed.result(_WAIT_S)
        late = ck.save(10, make_state(10))
        ck.save(20, make_state(20)).committed.result(_WAIT_S)
        ck.save(30, make_state(30)).committed.result(_WAIT_S)
        assert ck.latest_step() == 30 and not late.committed.done()
        hold.free.set()
        late.committed.result(_WAIT_S)
        assert ck.latest_step() == 30
        for step in ck.steps():
            assert step_state(root, step) == (step, 0)
        expected = {None: (5, 10, 20, 30), 1: (30,), 2: (20, 30)}[keep_last]
        assert ck.steps() == expected
    check_clean(root, spare_slots=3)


def test_the_newest_committed_step_never_goes_back_as_a_reader_sees_it(root: Path) -> None:
    stop = threading.Event()
    seen: list[int] = []

    def look() -> None:
        while not stop.is_set():
            steps = ck.steps()
            seen.append(max(steps, default=-1))

    chosen = options(in_flight=4, writers=4, keep_last=1)
    with Checkpointer(root, chosen, files=Delays(0.004).files()) as ck:
        reader = threading.Thread(target=look)
        reader.start()
        try:
            for step in range(60):
                ck.save(step, make_state(step))
            ck.wait()
        finally:
            stop.set()
            reader.join(_WAIT_S)
    assert seen == sorted(seen)


SAVES = 400
CHECK_EVERY = 25


def test_hundreds_of_saves_with_four_in_flight_are_exact_and_leak_nothing(root: Path) -> None:
    state = {f"w{index}": torch.zeros(3000 + index) for index in range(4)}
    chosen = options(in_flight=4, writers=3, keep_last=2 * CHECK_EVERY, staging_bytes=24 * 4096)
    process, sizes = psutil.Process(), []
    with Checkpointer(root, chosen, files=Delays(0.002, seed=1).files()) as ck:
        for step in range(SAVES):
            ck.wait_staged()
            for tensor in state.values():
                tensor.fill_(step)
            ck.save(step, {**state, "step": step})
            if step % CHECK_EVERY == CHECK_EVERY - 1:
                ck.wait()
                _check_exact(root, range(step - CHECK_EVERY + 1, step + 1))
                sizes.append((process.memory_info().rss, process.num_fds(), process.num_threads()))
        assert ck.staging_peak_bytes <= 24 * 4096
    check_clean(root, spare_slots=4)
    rss, fds, threads = zip(*sizes[8:], strict=True)
    assert max(rss) - rss[0] < 24 * 2**20, [size // 2**20 for size in rss]
    assert max(fds) <= fds[0] + 2 and max(threads) <= threads[0] + 2, (fds, threads)


def _check_exact(root: Path, steps: range) -> None:
    for step in steps:
        tree = load(root / f"step-{step:012d}")
        assert tree["step"] == step
        for index in range(4):
            expected = torch.full((3000 + index,), float(step))
            assert torch.equal(tree[f"w{index}"], expected), f"w{index} of step {step}"
