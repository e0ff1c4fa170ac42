"""Random faults, delays and orders at once: commits are exact, failures say so, nothing hangs."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import Checkpointer, CommitError, PersistError, StagingError
from tests.crash.layers import hooked
from tests.crash.promises import QuickFiles, check_restart, check_visible
from tests.crash.states import make_state, options
from tests.faults.layers import fail

_WAIT_S = 60


class Chaos:
    """Each operation dawdles, and now and then fails."""

    def __init__(self, seed: int, *, one_in: int) -> None:
        self._random = random.Random(seed)
        self._one_in = one_in
        self._lock = threading.Lock()
        self.armed = True
        self.struck = 0

    def __call__(self, name: str, args: tuple[Any, ...], act: Callable[[], Any]) -> Any:
        with self._lock:
            fails = self.armed and self._random.randrange(self._one_in) == 0
            code = self._random.choice((errno.EIO, errno.ENOSPC, errno.EROFS, errno.ENOENT))
            nap_s = self._random.random() ** 4 * 0.004
            self.struck += fails
        time.sleep(nap_s)
        if fails:
            fail(name, code, args, act)
        return act()


def save_somehow(ck: Checkpointer, kind: int, step: int) -> Any:
    state = make_state(step)
    if kind == 0:
        save = ck.begin(step, {name: state[name] for name in ("weight", "moment")})
        save.stage(["weight", "moment"])
        return save.seal(state)
    return ck.save(step, state)


@pytest.mark.parametrize("mode", ["host", "direct"])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_fails_in_whatever_order_every_visible_step_is_exact(
    seed: int, mode: str, root: Path
) -> None:
    chaos, steps = Chaos(seed, one_in=40), random.Random(seed)
    chosen = options(in_flight=4, writers=3, on_error="warn", keep_last=3, mode=mode)
    chaos.armed = False
    with Checkpointer(root, chosen, files=hooked(QuickFiles, chaos)) as ck:
        ck.save(0, make_state(0)).committed.result(_WAIT_S)
        chaos.armed = True
        handles, step = [], 0
        for _ in range(80):
            # Now and then a step is saved again, maybe while it is still in flight.
            step += steps.choice((0, 1, 1, 3))
            handles.append(save_somehow(ck, steps.randrange(4), step))
        errors = [handle.committed.exception(_WAIT_S) for handle in handles]
        good = {h.step for h, error in zip(handles, errors, strict=True) if error is None}
        for handle, error in zip(handles, errors, strict=True):
            if error is not None:
                assert isinstance(error, PersistError | CommitError | StagingError), repr(error)
                assert error.step == handle.step and error.path is not None, repr(error)
        check_visible(root)
        assert ck.latest_step() is not None and ck.latest_step() >= max(good)
        chaos.armed = False
        ck.save(step + 1, make_state(step + 1)).committed.result(_WAIT_S)
        assert ck.latest_step() == step + 1
    assert chaos.struck > 10 and len(good) > 5
    known = {(number, 0) for number in range(2000)}
    check_restart(root, least={(step + 1, 0)}, started=known)


def test_memory_comes_back_after_many_failed_saves(root: Path) -> None:
    chaos = Chaos(7, one_in=4)
    chosen = options(in_flight=2, on_error="warn", staging_bytes=16 * 4096, keep_last=2)
    chaos.armed = False
    with Checkpointer(root, chosen, files=hooked(QuickFiles, chaos)) as ck:
        ck.save(0, make_state(0)).committed.result(_WAIT_S)
        fds = len(os.listdir("/proc/self/fd"))
        chaos.armed = True
        for step in range(1, 120):
            save_somehow(ck, step % 2, step)
            ck.wait_staged()
        ck.wait()
        chaos.armed = False
        for step in (200, 201):
            ck.save(step, make_state(step)).committed.result(_WAIT_S)
        assert ck.staging_peak_bytes <= 16 * 4096
        assert len(os.listdir("/proc/self/fd")) <= fds + 2, "descriptors leak"
    check_restart(root, least={(201, 0)}, started={(n, 0) for n in range(2000)})
