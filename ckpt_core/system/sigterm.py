"""SIGTERM as a request: finish what is in flight, let the loop save once more, and be gone in time.

The signal only sets a flag, which the training loop reads between steps (`Checkpointer.stop_requested`).
Since it no longer ends the process by itself, a thread makes sure that the grace period does: when it is
over the process ends with status 143 (128 + SIGTERM). Committed steps are safe either way.

All Checkpointers of a process share one `_Watch`, installed for the first guard and taken away with the
last, in whatever order they close. The signal reaches it on two ways:

- Python calls it on the main thread, between two instructions. A main thread that waits in a call to C,
  such as a collective whose other side is dead, never gets there.
- Python's own handler, in C, writes the number of the signal into a pipe at once, whatever the main thread
  does. The guards' thread reads the pipe.

What is guaranteed to the rest of the process:

- Once the last guard is gone SIGTERM does what it did before, also in the C of somebody else.
- A handler that somebody installs after ours stays. If it calls ours, SIGTERM still ends the process
  when we are long closed, a grace period later.
- A forked child has what there was before the first guard, from its first instruction.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import threading
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any

from ckpt_core.errors import ConfigError, StagingError
from ckpt_core.units import parse_timeout

_log = logging.getLogger("ckpt_core")
_SIGACTION_BYTES = 1024
"""More than struct sigaction has on any system."""
_LAST_WORDS_S = 1.0
_LOOK, _HUNG_UP = 0, 255
"""What rings beside numbers of signals."""
_RING_AT = partial(signal.set_wakeup_fd, warn_on_full_buffer=False)
"""A full pipe is no loss: the byte that counts is in it, or Python calls the handler."""


class SigtermGuard:
    """Installed while a Checkpointer is open. Made on the main thread, closed on any.

    Attributes:
        asked: whether SIGTERM has come. True at once, on every thread.
        grace_s: how long the process may live on then, while this guard is open.

    Raises:
        ConfigError: `grace` is none, or this is not the main thread.
        StagingError: no thread can be started; SIGTERM does what it did before.
    """

    def __init__(self, grace: timedelta | float) -> None:
        self.grace_s = parse_timeout(grace, field="sigterm_grace").total_seconds()
        self.asked = False
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "on_sigterm='save' needs the main thread, where Python handles signals: "
                "make the Checkpointer there, or leave on_sigterm out"
            )
        _WATCH.add(self)

    def close(self) -> None:
        """End the grace period of this guard; the last one puts the earlier handler back. Idempotent."""
        _WATCH.remove(self)


@dataclass(frozen=True)
class _Disposition:
    """What SIGTERM does: as Python knows it, and as the system does, who alone knows of handlers in C."""

    python: Any
    system: ctypes.Array[ctypes.c_char]

    @classmethod
    def now(cls) -> _Disposition:
        system = ctypes.create_string_buffer(_SIGACTION_BYTES)
        ctypes.CDLL(None).sigaction(int(signal.SIGTERM), None, system)
        return cls(signal.getsignal(signal.SIGTERM), system)

    def restore(self) -> None:
        """On the main thread."""
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self.python is None else self.python)
        finally:
            self.restore_in_system()

    def restore_in_system(self) -> None:
        """On any thread; for Python our handler is still the one. Nothing changes if both are Python's."""
        ctypes.CDLL(None).sigaction(int(signal.SIGTERM), self.system, None)


class _Bell:
    """A pipe that rings when a signal comes: `signal.set_wakeup_fd`, of which a process has one.

    Made, hung up and taken down on the main thread.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # What `set_wakeup_fd` has answered: noted in C, with the call, since Ctrl-C may come behind each.
        self._had: list[int] = []
        self._taken: list[int] = []

    @property
    def _earlier(self) -> int:
        """Who had the signals before us; -1: nobody."""
        return next((fd for fd in reversed(self._had) if fd != self._writer), -1)

    def hang_up(self) -> None:
        """Have every signal ring. Whoever had that before (asyncio) still gets the numbers."""
        self._taken.clear()
        self._had.extend(map(_RING_AT, (self._writer,)))

    def take_down(self) -> None:
        """Give the signals back to whoever had them; who took them from us keeps them.

        Goes on where an earlier call of it was interrupted.
        """
        self._taken.extend(map(_RING_AT, (-1,)))
        later = self._taken[0]
        back = self._earlier if later == self._writer else later
        with contextlib.suppress(OSError, ValueError):  # it has been closed meanwhile
            signal.set_wakeup_fd(back)
        self._taken.clear()

    def ring(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.write(self._writer, bytes([number]))

    def heard(self, patience_s: float | None) -> bytes:
        """The numbers that have come, after at most that long; none if the time was up."""
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        # A little more than asked for, so that a deadline is over then; poll takes 24 days at most.
        poll.poll(None if patience_s is None else min(max(patience_s, 0.0), 3600.0) * 1000 + 1)
        with contextlib.suppress(BlockingIOError):
            return os.read(self._reader, 4096)
        return b""

    def pass_on(self, numbers: bytes) -> None:
        """To whoever had the signals before."""
        signals = bytes(number for number in numbers if number != _LOOK)
        earlier = self._earlier
        if earlier != -1 and signals:
            with contextlib.suppress(OSError):
                os.write(earlier, signals)

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


class _Link:
    """Our place in the chain of handlers: installed once, over what was there before."""

    def __init__(self) -> None:
        self.before = _Disposition.now()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """On the main thread, between any two instructions of it."""
        _WATCH.called(self, number)
        if callable(self.before.python):
            self.before.python(number, frame)

    def die(self) -> None:
        """Do to this process what SIGTERM would have done without us."""
        self.before.restore_in_system()
        os.kill(os.getpid(), signal.SIGTERM)


class _Watch:
    """What this process knows of SIGTERM, and the thread that ends it. There is one: `_WATCH`.

    Without locks, since a signal handler may interrupt their holder: `add` and all that changes handlers
    runs on the main thread; what other threads share with it, each changes in one instruction.
    """

    def __init__(self) -> None:
        # Weak: one that an interrupt took from its Checkpointer while that was made counts no more.
        self._guards: set[weakref.ref[SigtermGuard]] = set()
        self._links: list[weakref.ref[_Link]] = []  # gone when nobody can call them any more
        self._asked_at: float | None = None
        self._last_grace_s = 0.0
        self._bell: _Bell | None = None  # rings for the thread, which closes it
        self._pid = 0  # 0 until the hooks for forks are there
        self._masks: dict[int, set[Any]] = {}

    # -- guards ----------------------------------------------------------------------------------

    def add(self, guard: SigtermGuard) -> None:
        """Called on the main thread."""
        try:
            # Order matters: whenever SIGTERM comes, all that a handler needs is there.
            self._hook_forks()
            self._start_thread()
            guard.asked = self._asked_at is not None
            self._guards.add(weakref.ref(guard))
            self._install()
        except BaseException:
            self.remove(guard)
            raise

    def remove(self, guard: SigtermGuard) -> None:
        """Called on any thread. Only the main one changes handlers: else ours stays, and stands aside."""
        self._last_grace_s = guard.grace_s
        self._guards.discard(weakref.ref(guard))
        if self._open():
            return
        self._asked_at = None
        if threading.current_thread() is threading.main_thread():
            self._uninstall()

    def _install(self) -> None:
        assert self._bell is not None
        if _installed() is None:
            link = _Link()
            self._links = [*self._callable(), weakref.ref(link)]
            signal.signal(signal.SIGTERM, link)
        self._bell.hang_up()

    def _uninstall(self) -> None:
        _unlink()
        bell = self._bell
        if bell is None:
            return
        bell.take_down()
        # A later handler may call a link: the thread stays, to end the process then.
        if not self._callable():
            self._bell = None
            bell.ring(_HUNG_UP)

    def _callable(self) -> list[weakref.ref[_Link]]:
        return [link for link in self._links if link() is not None]

    # -- the signal ------------------------------------------------------------------------------

    def called(self, link: _Link, number: int) -> None:
        """SIGTERM, as Python tells it."""
        if os.getpid() != self._pid:
            self._forget()  # a fork that ran no hooks
        if self._open():
            self._ask()
        elif callable(link.before.python) or link.before.python == signal.SIG_IGN:
            return
        elif self._bell is None or link is _installed():
            link.die()
        else:
            # A later handler calls ours: it has its say, as while a guard is open, and then it is over.
            self._asked_at = self._asked_at or time.monotonic()
        if self._bell is not None:
            self._bell.ring(_LOOK)

    def _rung(self) -> None:
        """SIGTERM, as the system tells it to the thread; the main one may never come to the handler."""
        link = _installed()
        if link is None:
            return  # a later handler decides whether to call ours
        if self._open():
            self._ask()
        elif not callable(link.before.python):
            link.die()

    def _ask(self) -> None:
        self._asked_at = self._asked_at or time.monotonic()
        for guard in self._open():
            guard.asked = True

    def _open(self) -> list[SigtermGuard]:
        return [guard for each in tuple(self._guards) if (guard := each()) is not None]

    # -- the thread ------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        if self._bell is not None:
            return
        bell = _Bell()
        # Now: a signal handler may interrupt the threading module itself, so it starts none.
        thread = threading.Thread(target=self._run, args=(bell,), name="ckpt-sigterm", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:
            bell.close()
            raise StagingError(
                f"no thread can be started to end the process after SIGTERM ({exc}): raise the limit of "
                f"processes, or leave on_sigterm out"
            ) from exc
        except BaseException:
            bell.ring(_HUNG_UP)  # it may run
            raise
        self._bell = bell

    def _run(self, bell: _Bell) -> None:
        while _HUNG_UP not in (numbers := bell.heard(self._left_s())):
            bell.pass_on(numbers)
            if signal.SIGTERM in numbers:
                self._rung()
            left_s = self._left_s()
            if left_s is not None and left_s <= 0:
                _end(self._grace_s())
        bell.close()

    def _grace_s(self) -> float:
        return min((guard.grace_s for guard in self._open()), default=self._last_grace_s)

    def _left_s(self) -> float | None:
        asked_at = self._asked_at
        return None if asked_at is None else asked_at + self._grace_s() - time.monotonic()

    # -- forks -----------------------------------------------------------------------------------

    def _hook_forks(self) -> None:
        if not self._pid:
            os.register_at_fork(
                before=self._before_fork,
                after_in_parent=self._after_fork,
                after_in_child=self._after_fork_in_child,
            )
            # Once more: Ctrl-C while the system forks is raised in a hook, before that does a thing.
            os.register_at_fork(after_in_parent=self._after_fork)
        self._pid = os.getpid()

    def _before_fork(self) -> None:
        # A signal to the child that comes before its hooks would ring in the parent: the pipe is shared.
        if self._bell is not None:
            # Not a mask that an interrupt has left behind, but the one before it.
            self._masks.setdefault(
                threading.get_ident(), signal.pthread_sigmask(signal.SIG_BLOCK, [])
            )
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def _after_fork(self) -> None:
        mask = self._masks.get(me := threading.get_ident())
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            self._masks.pop(me, None)

    def _after_fork_in_child(self) -> None:
        self._forget()
        self._after_fork()
        self._masks.clear()

    def _forget(self) -> None:
        """Be the process that never had a guard. The thread is the parent's."""
        self._pid = os.getpid()
        self._guards.clear()
        self._asked_at = None
        bell, self._bell = self._bell, None
        _unlink()
        if bell is not None:
            bell.take_down()
            bell.close()


_WATCH = _Watch()


def _installed() -> _Link | None:
    """Our handler, if it is the first to be called."""
    now = signal.getsignal(signal.SIGTERM)
    return now if isinstance(now, _Link) else None


def _unlink() -> None:
    while (link := _installed()) is not None:
        link.before.restore()


def _end(grace_s: float) -> None:
    """End the process, whatever the other threads do or hold."""
    text = "%.0f s after SIGTERM the process is still there: ending it; committed steps are safe"
    try:
        # Not here: whoever holds the lock of a handler of the log may be stuck with it.
        words = threading.Thread(target=_log.error, args=(text, grace_s), daemon=True)
        words.start()
        words.join(_LAST_WORDS_S)
    finally:
        os._exit(128 + signal.SIGTERM)
