"""Real Ctrl-C, at random instants of a first save of many leaves, caught as in a notebook."""

from __future__ import annotations

import random
import signal
import sys
import time
from pathlib import Path

import torch

import ckpt_core
from ckpt_core import Checkpointer, Options
from ckpt_core.types import step_dir_name
from tests.crash.promises import QuickFiles

LEAVES, ROUNDS, SOON_S = 1_000, 20, 60.0


def make(step: int, length: int) -> dict[str, torch.Tensor]:
    """Of `length` elements: in a later state they are longer."""
    whole = torch.full((LEAVES * length,), float(step))
    return {f"leaf{at}": piece for at, piece in enumerate(whole.split(length))}


def interrupted(ck: Checkpointer, state: dict[str, torch.Tensor], after_s: float) -> bool:
    """Whether the save of step 1 was."""
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        ck.save(1, state)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        time.sleep(0)
    except KeyboardInterrupt:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    return False


def test_after_ctrl_c_in_the_first_save_every_later_step_is_that_of_its_state(
    tmp_path: Path,
) -> None:
    draw, struck = random.Random(7), 0
    options = Options(keep_last=None, timeout=SOON_S, eager_leaf_bytes=8)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    # Python itself drops what is raised in a destructor, or in a callback of its collector.
    hook, sys.unraisablehook = sys.unraisablehook, lambda found: None
    try:
        for number in range(ROUNDS):
            root = tmp_path / str(number)
            with Checkpointer(root, options, files=QuickFiles()) as ck:
                began = time.monotonic()
                if number == 0:
                    ck.save(1, make(1, 3)).committed.result(SOON_S)
                    whole_s = time.monotonic() - began
                    continue
                struck += interrupted(ck, make(1, 3), draw.uniform(0.0, 0.6 * whole_s) + 1e-6)
                for step, length in ((2, 3), (3, 5)):
                    state = make(step, length)
                    ck.save(step, state).committed.result(SOON_S)
                    found = ckpt_core.load(root / step_dir_name(step))
                    assert all(torch.equal(found[name], state[name]) for name in state)
    finally:
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook
    assert struck
