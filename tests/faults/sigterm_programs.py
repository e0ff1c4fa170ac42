"""Programs that get SIGTERM: `python -m tests.faults.sigterm_programs <name> <root>`.

Each says `ready` when the signal may come. Status 143 is ours, -15 is what SIGTERM does by itself.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from ckpt_core import Checkpointer
from ckpt_core.system.sigterm import SigtermGuard
from tests.crash.states import make_state, options
from tests.faults.layers import Delays

_LONG_S = 600.0


def _ready(*words: object) -> None:
    print("ready", *words, flush=True)


def wait_for_a_dead_peer(root: Path) -> None:
    """The main thread is in a collective whose other side has stopped; a save is in flight."""
    address = f"file://{root}-meet"
    peer = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.sigterm_programs", "be_a_peer", address]
    )
    dist.init_process_group("gloo", address, rank=0, world_size=2)
    dist.barrier()
    os.kill(peer.pid, signal.SIGSTOP)
    ck = Checkpointer(
        root, options(), on_sigterm="save", sigterm_grace=3.0, files=Delays(0.05).files()
    )
    threading.Thread(target=_tell_when_asked, args=(ck,), daemon=True).start()
    ck.save(1, make_state(1))
    _ready(peer.pid)
    dist.barrier()


def _tell_when_asked(ck: Checkpointer) -> None:
    while not ck.stop_requested:
        time.sleep(0.01)
    print("asked", flush=True)


def be_a_peer(address: Path) -> None:
    """The other side, until it is stopped and killed."""
    dist.init_process_group("gloo", str(address).replace(":/", ":///", 1), rank=1, world_size=2)
    dist.barrier()
    dist.barrier()


def hang_in_the_log(root: Path) -> None:
    """Nobody reads standard error, and the main thread is stuck in it with the handler's lock."""
    logging.basicConfig()
    ck = Checkpointer(root, options(), on_sigterm="save", sigterm_grace=0.5)
    ck.save(1, make_state(1)).committed.result(60)
    _ready()
    while True:  # the signal ends one write, half done
        logging.error("x" * 10**6)


def close_in_order(root: Path) -> None:
    """Two Checkpointers, closed in the order in which they were made."""
    both = [Checkpointer(root / name, options(), on_sigterm="save") for name in ("a", "b")]
    for ck in both:
        ck.close()
    _ready()
    time.sleep(_LONG_S)


def close_on_a_thread(root: Path) -> None:
    """Only the main thread can change handlers, and it sleeps."""
    ck = Checkpointer(root, options(), on_sigterm="save")
    closing = threading.Thread(target=ck.close)
    closing.start()
    closing.join()
    _ready()
    time.sleep(_LONG_S)


def close_on_a_thread_while_c_runs(root: Path) -> None:
    """The main thread is in a call to C that no signal ends."""
    ck = Checkpointer(root, options(), on_sigterm="save")

    def close() -> None:
        ck.close()
        _ready()

    threading.Thread(target=close, daemon=True).start()
    _sleep_in_c()


def stop_in_c_by_default(root: Path) -> None:
    """The main thread is in a call to C while the guard is open."""
    ck = Checkpointer(root, options(), on_sigterm="save", sigterm_grace=0.5)
    ck.save(1, make_state(1)).committed.result(60)
    _ready()
    _sleep_in_c()


def _sleep_in_c() -> None:
    # Waiting for a lock of C++ is not interrupted by signals, other than what Python itself waits in.
    dist.TCPStore("localhost", 0, 1, is_master=True).wait(["never"], timedelta(days=1))


def leave_a_later_handler(root: Path) -> None:
    """A handler that calls ours outlives it, and sees to nothing itself."""
    guard = SigtermGuard(0.5)
    ours = signal.getsignal(signal.SIGTERM)
    assert callable(ours)

    def later(number: int, frame: FrameType | None) -> None:
        # Not print: the signal may come before the call of it that says `ready` is over.
        os.write(1, b"later\n")
        ours(number, frame)

    signal.signal(signal.SIGTERM, later)
    guard.close()
    assert signal.getsignal(signal.SIGTERM) is later
    _ready()
    time.sleep(_LONG_S)


def have_ours_put_back(root: Path) -> None:
    """Somebody else's restores ours, as Lightning does at the end of a fit, when it is long closed."""
    guard = SigtermGuard(30.0)
    ours = signal.signal(signal.SIGTERM, lambda number, frame: None)
    guard.close()
    signal.signal(signal.SIGTERM, ours)
    _ready()
    time.sleep(_LONG_S)


def keep_a_handler_in_c(root: Path) -> None:
    """Python does not know of it, and it must be there again afterwards."""
    with root.open("w") as dump:
        faulthandler.register(signal.SIGTERM, file=dump, chain=False)
        SigtermGuard(30.0).close()
        os.kill(os.getpid(), signal.SIGTERM)
    assert "keep_a_handler_in_c" in root.read_text()


def leave_a_daemonic_child(root: Path) -> None:
    """multiprocessing ends such a child with SIGTERM and joins it without a deadline."""
    context = multiprocessing.get_context("fork")
    with Checkpointer(root, options(), on_sigterm="save"):
        child = context.Process(target=time.sleep, args=(_LONG_S,), daemon=True)
        child.start()
    _ready()


def end_children(root: Path) -> None:
    """Forked children die of SIGTERM at any instant, and the parent hears nothing of it."""
    guard = SigtermGuard(30.0)
    for count in range(50):
        assert _ended_child(wait=bool(count % 2)) == -signal.SIGTERM, count
    in_thread: list[int] = []
    thread = threading.Thread(target=lambda: in_thread.append(_ended_child(wait=True)))
    thread.start()
    thread.join()
    assert in_thread == [-signal.SIGTERM]
    ours = signal.getsignal(signal.SIGTERM)
    assert callable(ours)
    signal.signal(signal.SIGTERM, lambda number, frame: ours(number, frame))
    assert _ended_child(wait=True) == -signal.SIGTERM
    assert not guard.asked
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def _ended_child(*, wait: bool) -> int:
    """The status of a forked child that was ended with SIGTERM, before or after its first instruction."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"!")
        time.sleep(_LONG_S)
        os._exit(0)
    if wait:
        os.read(reader, 1)
    os.kill(child, signal.SIGTERM)
    os.close(reader)
    os.close(writer)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    raise AssertionError(f"the child has outlived SIGTERM, status {os.waitpid(child, 0)[1]}")


def interrupt_a_fork(root: Path) -> None:
    """Ctrl-C while the system forks: Python raises it in the first hook after that is no C."""
    press = ctypes.pythonapi.PyErr_SetInterrupt
    press.restype = None
    os.register_at_fork(after_in_parent=press)
    guard = SigtermGuard(30.0)
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    left = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    guard.close()
    _ready(*left)


def save_in_a_child(root: Path) -> None:
    """A forked child has a guard of its own, and its SIGTERM is its own."""
    guard = SigtermGuard(30.0)
    child = os.fork()
    if child == 0:
        with Checkpointer(root, options(), on_sigterm="save") as ck:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0 if ck.stop_requested else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not guard.asked


PROGRAMS = {
    program.__name__: program
    for program in (
        wait_for_a_dead_peer,
        be_a_peer,
        hang_in_the_log,
        close_in_order,
        close_on_a_thread,
        close_on_a_thread_while_c_runs,
        stop_in_c_by_default,
        leave_a_later_handler,
        have_ours_put_back,
        keep_a_handler_in_c,
        leave_a_daemonic_child,
        end_children,
        interrupt_a_fork,
        save_in_a_child,
    )
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    PROGRAMS[sys.argv[1]](Path(sys.argv[2]))
