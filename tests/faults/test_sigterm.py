"""SIGTERM with on_sigterm="save": whoever else has handlers, wherever the main thread is, in children too."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ckpt_core import CkptError
from ckpt_core.system import sigterm
from ckpt_core.system.sigterm import SigtermGuard
from tests.faults.test_exit import assert_saved
from tests.forks import Forks
from tests.interrupts.trap import Trap

_WAIT_S = 120
_BY_ITSELF, _OURS = -signal.SIGTERM, 128 + signal.SIGTERM


@pytest.fixture(autouse=True)
def calls() -> Iterator[list[int]]:
    """The calls of an earlier handler of SIGTERM, which has to be there again at the end."""
    made: list[int] = []

    def earlier(number: int, frame: FrameType | None) -> None:
        made.append(number)

    before = signal.signal(signal.SIGTERM, earlier)
    try:
        yield made
        assert signal.getsignal(signal.SIGTERM) is earlier
        os.kill(os.getpid(), signal.SIGTERM)
        assert made
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def program(forks: Forks, name: str, root: Path) -> Iterator[subprocess.Popen[str]]:
    """A running program of `sigterm_programs` that is ready; killed at the end if it still runs."""
    process = forks.popen(
        [sys.executable, "-m", "tests.faults.sigterm_programs", name, root],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=_WAIT_S)


def words_of(process: subprocess.Popen[str]) -> list[str]:
    """What it says next."""
    assert process.stdout is not None
    return process.stdout.readline().split()


def ended_by_sigterm(forks: Forks, name: str, root: Path) -> int:
    with program(forks, name, root) as process:
        assert words_of(process) == ["ready"]
        process.send_signal(signal.SIGTERM)
        return process.wait(_WAIT_S)


def test_a_process_that_waits_for_a_dead_peer_is_gone_in_time_and_what_was_in_flight_is_saved(
    forks: Forks, root: Path
) -> None:
    with program(forks, "wait_for_a_dead_peer", root) as process:
        peer = int(words_of(process)[1])
        try:
            process.send_signal(signal.SIGTERM)
            assert words_of(process) == ["asked"]
            assert process.wait(_WAIT_S) == _OURS
        finally:
            os.kill(peer, signal.SIGKILL)
    assert_saved(root, 1)


def test_a_process_that_is_stuck_in_its_own_log_is_gone_in_time(forks: Forks, root: Path) -> None:
    assert ended_by_sigterm(forks, "hang_in_the_log", root) == _OURS


def test_a_main_thread_that_never_comes_back_to_python_is_gone_in_time(
    forks: Forks, root: Path
) -> None:
    assert ended_by_sigterm(forks, "stop_in_c_by_default", root) == _OURS


@pytest.mark.parametrize(
    "name",
    [
        "close_in_order",
        "close_on_a_thread",
        "close_on_a_thread_while_c_runs",
        "have_ours_put_back",
    ],
)
def test_after_the_last_close_sigterm_ends_the_process_by_itself(
    forks: Forks, name: str, root: Path
) -> None:
    root.mkdir()
    assert ended_by_sigterm(forks, name, root) == _BY_ITSELF


def test_a_later_handler_that_calls_ours_has_its_say_and_the_process_ends(
    forks: Forks, root: Path
) -> None:
    with program(forks, "leave_a_later_handler", root) as process:
        assert words_of(process) == ["ready"]
        process.send_signal(signal.SIGTERM)
        assert words_of(process) == ["later"]
        assert process.wait(_WAIT_S) == _OURS


@pytest.mark.parametrize(
    "name", ["keep_a_handler_in_c", "leave_a_daemonic_child", "end_children", "save_in_a_child"]
)
def test_a_program_ends_well(forks: Forks, name: str, root: Path) -> None:
    with program(forks, name, root) as process:
        out, err = process.communicate(timeout=_WAIT_S)
        assert process.returncode == 0, out + err


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_earlier_handler_comes_back_in_whatever_order_guards_close(
    order: tuple[int, ...], calls: list[int]
) -> None:
    guards = [SigtermGuard(30.0) for _ in order]
    for count, number in enumerate(order):
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(calls) == count + 1
        assert all(guard.asked for guard in guards)
        guards[number].close()
        guards[number].close()


def test_a_guard_that_is_made_while_the_end_is_near_knows_it() -> None:
    with contextlib.closing(SigtermGuard(30.0)) as first:
        os.kill(os.getpid(), signal.SIGTERM)
        with contextlib.closing(SigtermGuard(30.0)) as second:
            assert first.asked and second.asked
    with contextlib.closing(SigtermGuard(30.0)) as third:
        assert not third.asked


def test_a_later_handler_is_never_replaced_and_no_call_goes_in_circles(calls: list[int]) -> None:
    first = SigtermGuard(30.0)
    ours = signal.getsignal(signal.SIGTERM)
    seen: list[int] = []

    def later(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        assert callable(ours)
        ours(number, frame)

    signal.signal(signal.SIGTERM, later)
    second = SigtermGuard(30.0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert first.asked and second.asked and len(seen) == len(calls) == 1
    first.close()
    second.close()
    assert signal.getsignal(signal.SIGTERM) is later
    os.kill(os.getpid(), signal.SIGTERM)
    assert len(seen) == len(calls) == 2
    signal.signal(signal.SIGTERM, ours)
    with contextlib.closing(SigtermGuard(30.0)):
        pass


def test_a_signal_at_any_instant_of_opening_and_closing_is_lost_to_nobody(calls: list[int]) -> None:
    unheard: list[int] = []

    def send() -> None:
        for number in range(300):
            known = len(calls)
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + 30
            while len(calls) == known and time.monotonic() < deadline:
                time.sleep(0)
            if len(calls) == known:
                unheard.append(number)

    sender = threading.Thread(target=send)
    sender.start()
    while sender.is_alive():
        guards = [SigtermGuard(30.0), SigtermGuard(30.0)]
        for guard in guards:
            guard.close()
    assert unheard == []


class _Interrupted:
    """Ctrl-C at one line of sigterm.py, on this thread."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != sigterm.__file__:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> _Interrupted:
        sys.settrace(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)


def _opened_and_closed(line: int) -> bool:
    """Whether the interrupt came; whatever it hit, closing what there is puts everything right."""
    guard: list[SigtermGuard] = []
    interrupted = False
    try:
        with _Interrupted(line):
            guard.append(SigtermGuard(30.0))
            guard[0].close()
    except KeyboardInterrupt:
        interrupted = True
    for each in guard:
        each.close()
    return interrupted


def test_an_interrupt_at_any_line_leaves_the_earlier_handler_when_all_is_closed(
    calls: list[int],
) -> None:
    earlier = signal.getsignal(signal.SIGTERM)
    line = 1
    while _opened_and_closed(line):
        assert signal.getsignal(signal.SIGTERM) is earlier, line
        before = len(calls)
        with contextlib.closing(SigtermGuard(30.0)) as guard:
            os.kill(os.getpid(), signal.SIGTERM)
            assert guard.asked and len(calls) == before + 1
        line += 1
    assert line > 30


def test_an_earlier_handler_may_raise(calls: list[int]) -> None:
    def angry(number: int, frame: FrameType | None) -> None:
        raise SystemExit(3)

    earlier = signal.signal(signal.SIGTERM, angry)
    with contextlib.closing(SigtermGuard(30.0)) as guard:
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
        assert guard.asked
    assert signal.signal(signal.SIGTERM, earlier) is angry


def test_sigterm_that_was_ignored_is_ignored_again(calls: list[int]) -> None:
    earlier = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.closing(SigtermGuard(30.0)) as guard:
        os.kill(os.getpid(), signal.SIGTERM)
        assert guard.asked
    assert signal.signal(signal.SIGTERM, earlier) == signal.SIG_IGN


def test_asyncio_keeps_its_signals_beside_a_guard() -> None:
    async def signalled() -> int:
        loop, heard = asyncio.get_running_loop(), asyncio.Queue[int]()
        loop.add_signal_handler(signal.SIGUSR1, heard.put_nowait, 1)
        guard = SigtermGuard(30.0)
        os.kill(os.getpid(), signal.SIGUSR1)
        total = await asyncio.wait_for(heard.get(), 30)
        guard.close()
        os.kill(os.getpid(), signal.SIGUSR1)
        total += await asyncio.wait_for(heard.get(), 30)
        loop.remove_signal_handler(signal.SIGUSR1)
        return total

    assert asyncio.run(signalled()) == 2
    assert signal.set_wakeup_fd(-1) == -1


def test_without_a_thread_there_is_no_guard_and_sigterm_is_as_before() -> None:
    # More than any process has: addresses end at 2**47, or at 2**56 where the processor has five levels.
    usual = threading.stack_size(2**60)
    try:
        with pytest.raises(CkptError, match="no thread can be started"):
            SigtermGuard(30.0)
    finally:
        threading.stack_size(usual)


def test_an_interrupt_of_a_fork_leaves_no_signal_blocked(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.sigterm_programs", "interrupt_a_fork", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=_WAIT_S,
    )
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr
    assert "KeyboardInterrupt" in done.stderr, "it came elsewhere"


def test_after_ctrl_c_at_any_instruction_whoever_had_the_signals_has_them_again() -> None:
    def guarded() -> None:
        guards.append(SigtermGuard(60))
        guards[-1].close()

    guards: list[SigtermGuard] = []
    counting = Trap(-1, event="opcode")
    counting.run(guarded)
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        for n in range(counting.lines):
            trap = Trap(n, event="opcode")
            with contextlib.suppress(KeyboardInterrupt):
                trap.run(guarded)
            for guard in guards:
                guard.close()
            SigtermGuard(60).close()  # takes over from one that was lost while it was made
            assert signal.set_wakeup_fd(writer, warn_on_full_buffer=False) == writer, trap.struck
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
