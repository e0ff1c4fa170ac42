"""What a call changes for the whole process for a while is put back, whichever two lines are interrupted."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckpt_core.state.quiet import quietly
from ckpt_core.system.collector import uncollected
from tests.interrupts.scenarios import of_the_process
from tests.interrupts.trap import Trap


def _changing() -> list[object]:
    with torch.no_grad():
        warnings.warn("not shown", stacklevel=1)
        return [gc.isenabled(), torch.is_grad_enabled()]


def _set() -> tuple[object, ...]:
    return (*of_the_process(), gc.isenabled())


def _interrupted(call: Callable[[], Any], trap: Trap) -> BaseException | None:
    """What comes out; it is kept, and with it the frames that were left."""
    try:
        trap.run(call)
    except KeyboardInterrupt as exc:
        return exc
    return None


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(uncollected(lambda: quietly(_changing)), id="both"),
        pytest.param(uncollected(lambda: [gc.isenabled()]), id="collector"),
        pytest.param(lambda: quietly(_changing)[1:], id="warnings and gradients"),
    ],
)
@pytest.mark.filterwarnings("ignore:not shown")
def test_two_interrupts_at_any_lines_leave_the_process_as_it_was(call: Callable[[], Any]) -> None:
    before, counting = _set(), Trap(-1)
    assert not any(counting.run(call)) and _set() == before
    struck_twice = 0
    for first in range(counting.lines):
        following = Trap(first, then=-1)
        error = _interrupted(call, following)
        assert error is not None and _set() == before, following.struck
        for second in range(following.lines):
            trap = Trap(first, then=second)
            error = _interrupted(call, trap)
            assert error is not None and _set() == before, trap.struck
            struck_twice += len(trap.struck.split(") ")) > 1
    assert struck_twice


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        assert uncollected(gc.isenabled)() is False
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert uncollected(gc.isenabled)() is False
    assert gc.isenabled()
