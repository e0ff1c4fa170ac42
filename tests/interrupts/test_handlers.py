"""A signal handler that calls the Checkpointer, at every line of what it interrupts: nothing stands still.

`close` does its work there. Whatever would wait for the call that was interrupted is refused at once.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import ckpt_core
from ckpt_core import CkptError, ConfigError, SaveHandle
from ckpt_core.system import threads
from ckpt_core.system.threads import locks_held
from ckpt_core.types import step_dir_name
from tests import places
from tests.interrupts.scenarios import SOON_S, Run
from tests.interrupts.trap import Trap

MOST = 8
"""So many lines of one call; CKPT_PLACES=all tries all of them."""

Act = Callable[[Run], Any]


class Handler(Trap):
    """Calls `act` at its line, and lets what it has interrupted go on.

    Args:
        inside: strikes at the first line of this function instead.

    Attributes:
        result, error: what came of it.
        locked: whether it found its thread with a lock in the hand.
    """

    def __init__(self, n: int, act: Callable[[], Any], *, inside: str = "") -> None:
        super().__init__(n)
        self._act, self._inside = act, inside
        self.result: Any = None
        self.error: CkptError | None = None
        self.locked = False

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self._inside and frame.f_code.co_qualname == self._inside:
            self._inside, self._n = "", self.lines
        return super()._enter(frame, event, arg)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.locked = bool(locks_held())
        try:
            self.result = self._act()
        except CkptError as exc:
            self.error = exc


def opened(root: Path, **changes: Any) -> Run:
    """A run whose memory and files are there, with a save in flight."""
    run = Run(root, changes)
    for _ in range(2):
        run.save().committed.result(SOON_S)
        run.train()
    run.ck.wait()
    return run


def save(run: Run) -> SaveHandle:
    return run.save()


def save_layers(run: Run) -> SaveHandle:
    begun = run.ck.begin(run.step, run.tensors())
    begun.stage(run.tensors())
    return begun.seal(run.state)


def wait(run: Run) -> None:
    run.ck.wait()


def close(run: Run) -> None:
    run.ck.close()


def restore(run: Run) -> Any:
    into = {key: torch.zeros_like(value) for key, value in run.tensors().items()} | {"step": 0}
    return run.ck.restore(into)


def save_next(run: Run) -> SaveHandle:
    return run.ck.save(run.step + 1, run.state)


CALLS: list[Act] = [save, save_layers, wait, restore, close]
IN_FLIGHT: list[Act] = [wait, close]
"""These have something to wait for."""


def outcome(run: Run, call: Act, handler: Handler) -> list[SaveHandle]:
    """Do it; the saves that were started, all of which have ended within a moment."""
    began = time.monotonic()
    started: list[Any] = [run.save()] if call in IN_FLIGHT else []
    # Of what a handler closed the Checkpointer in: it is closed, or a save was never sealed.
    with contextlib.suppress(CkptError):
        started.append(handler.run(lambda: call(run)))
    saves = [one for one in (*started, handler.result) if isinstance(one, SaveHandle)]
    run.ck.close()
    assert time.monotonic() - began < SOON_S
    assert all(one.committed.done() for one in saves)
    return saves


def check(run: Run, saves: list[SaveHandle]) -> None:
    """What is said to be committed is, and whole."""
    assert run.ck.steps()
    for step in run.ck.steps():
        ckpt_core.load(run.root / step_dir_name(step))
    for one in saves:
        if one.committed.exception() is None and one.step in run.ck.steps():
            assert one.committed.result().is_dir()
    run.check_ended()


PAIRS = [(call, act) for call in CALLS for act in (close, wait, restore, save_next)]


@pytest.mark.parametrize(("call", "act"), PAIRS, ids=lambda act: act.__name__)
def test_a_handler_that_calls_us_at_any_line_stands_still_nowhere(
    tmp_path: Path, call: Act, act: Act
) -> None:
    run = opened(tmp_path / "counted")
    counting = Handler(-1, lambda: None)
    outcome(run, call, counting)
    lines = places.some(range(counting.lines), MOST, of=f"{call.__name__} {act.__name__}")
    for n in lines:
        run = opened(tmp_path / str(n))
        handler = Handler(n, lambda run=run: act(run))
        saves = outcome(run, call, handler)
        check(run, saves)
        assert act is not close or not isinstance(handler.error, ConfigError), handler.struck


def test_a_save_that_comes_into_the_pause_of_the_garbage_collector_leaves_it_on(
    tmp_path: Path,
) -> None:
    run, begins = opened(tmp_path / "counted"), list[int]()
    counting = Handler(-1, lambda: begins.append(counting.lines), inside="Journal.pause_collector")
    outcome(run, save, counting)
    for n in range(begins[0] - 1, begins[0] + 12):
        run = opened(tmp_path / str(n))
        check(run, outcome(run, save, Handler(n, lambda run=run: save_next(run))))
        assert gc.isenabled(), n


HELD = ["Flights.admit.<locals>.enter", "StagingPool.acquire.<locals>.take"]
"""Functions that run with a lock in the hand of the thread that saves."""


@pytest.mark.parametrize("inside", HELD)
def test_close_in_a_handler_that_came_while_a_lock_was_held_closes(
    tmp_path: Path, inside: str
) -> None:
    run = opened(tmp_path / "root")
    before = run.save()
    run.train()
    handler = Handler(-1, run.ck.close, inside=inside)
    with pytest.raises(ConfigError, match="closed during this call"):
        handler.run(run.save)
    assert handler.locked
    assert handler.error is None
    assert before.committed.result(0).is_dir()
    run.check_ended()


@pytest.mark.parametrize("act", [wait, restore, save_next], ids=lambda act: act.__name__)
@pytest.mark.parametrize("inside", HELD)
def test_another_call_there_is_refused_at_once_and_the_save_goes_on(
    tmp_path: Path, inside: str, act: Act
) -> None:
    run = opened(tmp_path / "root")
    handler = Handler(-1, lambda: act(run), inside=inside)
    handle = handler.run(run.save)
    assert handler.locked
    assert "in the middle of another call" in str(handler.error)
    assert handle.committed.result(SOON_S).is_dir()
    run.check()
    run.close()


@pytest.mark.parametrize("act", [wait, restore, save_next], ids=lambda act: act.__name__)
def test_what_would_wait_for_the_save_that_it_came_into_is_refused_at_once(
    tmp_path: Path, act: Act
) -> None:
    run = opened(tmp_path / "root", in_flight=1)
    handler = Handler(-1, lambda: act(run), inside="PlainSaves._start")
    handle = handler.run(run.save)
    assert not handler.locked
    assert "in the middle of another call" in str(handler.error)
    assert handle.committed.result(SOON_S).is_dir()
    run.check()
    run.close()


def test_wait_beside_a_save_that_its_own_thread_has_begun_is_refused_at_once(
    tmp_path: Path,
) -> None:
    run = opened(tmp_path / "root")
    begun = run.ck.begin(run.step, run.tensors())
    with pytest.raises(ConfigError, match="begun and is not sealed"):
        wait(run)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait, run)  # another thread waits for this one
        begun.stage(run.tensors())
        handle = begun.seal(run.state)
        waiting.result(SOON_S)
    assert handle.committed.result(SOON_S).is_dir()
    files = run.ck.begin_files(run.step + 1, "named")
    with pytest.raises(ConfigError, match="begun and is not sealed"):
        wait(run)
    files.abort()
    run.close()


@pytest.mark.parametrize(
    "inside", ["StagingPool.wait_idle", "StagingPool.wait_idle.<locals>.<lambda>", "Files.unlock"]
)
def test_close_in_a_handler_that_came_into_close_leaves_that_nothing_to_wait_for(
    tmp_path: Path, inside: str
) -> None:
    run = opened(tmp_path / "root")
    handler = Handler(-1, run.ck.close, inside=inside)
    began = time.monotonic()
    handler.run(run.ck.close)
    assert handler.error is None
    assert time.monotonic() - began < SOON_S
    run.check_ended()


def test_the_locks_of_a_save_go_with_it(tmp_path: Path) -> None:
    with contextlib.closing(opened(tmp_path)) as run:
        counts = []
        for _ in range(3):
            for _ in range(10):
                run.save().committed.result(SOON_S)
                run.ck.wait()
            counts.append(len(threads._locks))
    # The last ones are still known, and one more or less is in a thread's hand.
    assert counts[2] < counts[0] + 10
