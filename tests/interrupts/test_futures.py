"""A wait for a future is interrupted anywhere: what is raised is the interrupt, and the future is whole."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from ckpt_core.system import threads
from ckpt_core.system.threads import ThreadFuture
from tests.interrupts.scenarios import SOON_S
from tests.interrupts.trap import Trap

_PLACES = (
    str(Path(concurrent.futures.__file__).parent),
    threading.__file__,
    threads.__file__,
)
_WAITS: dict[str, Callable[[ThreadFuture[int]], object]] = {
    "result": lambda future: future.result(SOON_S),
    "until": lambda future: future.exception(1e-3),
    "exception": lambda future: future.exception(SOON_S),
    "callback": lambda future: future.add_done_callback(lambda _: None),
    "done": lambda future: future.done(),
}


@pytest.mark.parametrize("event", ["line", "opcode"])
@pytest.mark.parametrize("way", _WAITS)
def test_an_interrupted_wait_leaves_a_future_that_can_be_settled_and_waited_for(
    way: str, event: str
) -> None:
    for n in itertools.count():
        future = ThreadFuture[int]()
        settle = threading.Timer(0.01, future.set_result, [n])
        trap = Trap(n, event=event, package=_PLACES)
        if way != "until":
            settle.start()
        with suppress(KeyboardInterrupt, TimeoutError):
            trap.run(partial(_WAITS[way], future))
        if way == "until":
            settle.start()
        settle.join(SOON_S / 10)
        assert not settle.is_alive(), trap.struck
        assert future.result(SOON_S) == n
        if not trap.struck:
            break
    assert n > 2
