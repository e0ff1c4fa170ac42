"""Threads, locks, one with a wait, and the end of the process, all such that an interrupt leaves them whole.

Danger: Python raises KeyboardInterrupt between any two calls of the training thread. `threading.Condition` is
entered and left by functions written in Python, and an interrupt inside them leaves its lock taken for ever.
A signal handler that does not raise, but calls us, may have interrupted its own thread with a lock of ours in
the hand: each is made by `own_lock`, which knows whose it is.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from multiprocessing.util import Finalize
from operator import call
from typing import Any, TypeVar

from ckpt_core.errors import ConfigError, PersistError
from ckpt_core.system.interrupts import putting_back

_log = logging.getLogger("ckpt_core")

T = TypeVar("T")

_RLock: Any = type(threading.RLock())
_IS_OWN: Callable[[Any], bool] = _RLock._is_owned

_locks: set[weakref.ref[Any]] = set()
"""All that `own_lock` has made. Each is added, dropped or looked at by one call that is written in C."""

_newest = object()
"""Another one for each lock that is made."""
_known: tuple[object, tuple[Any, ...]] = (None, ())
"""What `_newest` was, and all locks then: those that have gone since are kept until this is made anew."""

_LOOK_AGAIN_S = 0.5
"""Whoever rings the bells may be interrupted between two of them."""

_HURRIES = 10
_HURRIED = "%r at the end of the process: what is in flight is given up, committed steps are safe"


def own_lock() -> threading.RLock:
    """For `with`: a lock of which `locks_held` knows whether this thread has it."""
    lock = threading.RLock()
    _know(lock)
    return lock


def _know(lock: threading.RLock) -> None:
    global _newest
    _locks.add(weakref.ref(lock, _locks.discard))
    _newest = object()


def locks_held() -> list[Any]:
    """What this thread has of the locks of `own_lock`. Where a call of ours begins that is none, unless a
    signal handler calls, which has interrupted another one half-way.
    """
    global _known
    known = _known
    # Each call of training begins with this, and those that save nothing find no lock that is new.
    if known[0] is not _newest:
        # Let go of first: else those that have gone would be found again each time, and never go.
        _known = known = None, ()
        # Order matters: one that is made meanwhile is looked for at the next call, and nobody has it yet.
        newest = _newest
        # A copy, since it is made in C at one go: others make locks, and the collector drops some, meanwhile.
        _known = known = newest, tuple(filter(None, map(call, _locks.copy())))
    return list(filter(_IS_OWN, known[1]))


def lending_locks(method: Callable[[T], None]) -> Callable[[T], None]:
    """Of a method that a signal handler may call: other threads have the locks of this one meanwhile.

    They find what an interrupt would have left them here, which is whole. What was interrupted goes on
    afterwards with what it had seen before: so this is for the end, after which that counts no more.
    """

    @functools.wraps(method)
    def lending(self: T, /) -> None:
        lent: dict[Any, Any] = {}

        def lend() -> None:
            for lock in locks_held():
                lent[lock] = lock._release_save()
            method(self)

        def take_back() -> None:
            for lock, had in lent.items():
                if not lock._is_owned():
                    lock._acquire_restore(had)

        putting_back(lend, take_back)

    return lending


class Monitor:
    """A lock, and a wait for what others change under it.

    Attributes:
        lock: `with monitor.lock` runs no Python code where it takes it and gives it back, so that no
            interrupt comes between.
    """

    def __init__(self) -> None:
        self.lock = own_lock()
        self._bells: list[threading.Lock] = []

    def wait_for(self, ready: Callable[[], bool], *, deadline: float) -> bool:
        """Wait, without the lock, until `ready`, called with the lock, is true; False after the deadline.

        Args:
            ready: looks, and may take what it waits for; may raise, which ends the wait.
            deadline: on the `time.monotonic` clock.
        """
        while True:
            with self.lock:
                if ready():
                    return True
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                bell = threading.Lock()
                bell.acquire()
                self._bells.append(bell)
            bell.acquire(timeout=min(left_s, _LOOK_AGAIN_S))

    def notify_all(self) -> None:
        """Something has changed: everyone who waits looks again. Called with the lock."""
        while self._bells:
            self._bells.pop().release()


class _Condition(_RLock):  # type: ignore[misc]
    """What a future has of `threading.Condition`; entered and left as `own_lock` is, by no Python code."""

    def __init__(self) -> None:
        self._bells: list[threading.Lock] = []
        _know(self)

    def wait(self, timeout: float | None = None) -> bool:
        """See `threading.Condition`; interrupted, it comes back with the lock as well."""
        had = 1, threading.get_ident()
        bell = threading.Lock()
        bell.acquire()

        def sleep() -> bool:
            nonlocal had
            self._bells.append(bell)
            had = self._release_save()
            return bell.acquire(timeout=-1 if timeout is None else max(timeout, 0))

        def take() -> None:
            if not self._is_owned():
                self._acquire_restore(had)
            if bell in self._bells:
                self._bells.remove(bell)

        return putting_back(sleep, take)

    def notify_all(self) -> None:
        """See `threading.Condition`."""
        while self._bells:
            self._bells.pop().release()


class OwnFuture(Future[T]):
    """A future that an interrupt leaves whole: it can be settled, and asked again."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = _Condition()


class ThreadFuture(OwnFuture[T]):
    """A future that a thread of this process settles: no fork of it waits for one that is not done.

    `result`, `exception` and `add_done_callback` raise ConfigError there, at once: the threads stayed behind.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()

    def result(self, timeout: float | None = None) -> T:
        self._check_process()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._check_process()
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        self._check_process()
        super().add_done_callback(functools.partial(_outlived, fn))

    def _check_process(self) -> None:
        if os.getpid() != self._pid and not self.done():
            raise ConfigError(
                f"this save was begun in process {self._pid}, and this is a fork of it: ask there"
            )


def _outlived(callback: Callable[[Future[T]], object], done: Future[T]) -> None:
    try:
        callback(done)
    except BaseException as exc:
        if not is_harmless(exc):
            raise
        _log.exception("a callback of a save failed")


_worker = threading.local()


def is_harmless(error: BaseException) -> bool:
    """Of what a user's function has raised: whether it is to be logged, and goes no further.

    `sys.exit()` and the like on a thread of ours would end that thread, and what it had still to tell.
    """
    return isinstance(error, Exception) or hasattr(_worker, "runs")


class Worker:
    """A daemon thread that is started once, and can be waited for again after an interrupt.

    Args:
        run: what it does; ends when its owner has told it so.
        name: of the thread.
    """

    def __init__(self, run: Callable[[], None], *, name: str) -> None:
        self._run = run
        self._thread = threading.Thread(target=self._run_to_end, name=name, daemon=True)
        # Not by Thread.join: interrupted, that takes a thread for ended which is not.
        self._changed = Monitor()
        self._running = False

    def start(self) -> None:
        """Start it.

        Raises:
            PersistError: the system gives no more threads.
        """
        self._running = True
        try:
            self._thread.start()
        except RuntimeError as exc:
            self._running = False
            raise PersistError(
                f"the thread {self._thread.name} cannot be started ({exc}): this process may have no more. "
                f"Nothing was opened or changed. Raise the limit (ulimit -u, TasksMax= of the service, pids "
                f"limit of the container; ulimit -v, which the stack of each counts against), or run fewer "
                f"threads and processes"
            ) from exc

    @property
    def runs_here(self) -> bool:
        """Whether it is this very thread that asks: whoever waits here for what it does waits in vain."""
        return threading.current_thread() is self._thread

    def join(self, *, deadline: float) -> bool:
        """Wait until it has ended, if it was started at all; False for one that hangs, and is left behind."""
        ended = self._changed.wait_for(lambda: not self._running, deadline=deadline)
        if ended and self._thread.is_alive():
            self._thread.join(_LOOK_AGAIN_S)
        return ended

    def _run_to_end(self) -> None:
        _worker.runs = True
        try:
            self._run()
        finally:
            with self._changed.lock:
                self._running = False
                self._changed.notify_all()


def start_all(workers: Iterable[Worker]) -> None:
    """Start them, when the Checkpointer is made: later there may be no more to be had.

    Raises:
        PersistError: the system gives no more threads; some may run.
    """
    for worker in workers:
        worker.start()


def join_all(workers: Iterable[Worker], *, timeout_s: float) -> bool:
    """Wait for those that have been told to end; whether all have. One that hangs is left behind."""
    deadline = time.monotonic() + timeout_s
    return all(worker.join(deadline=deadline) for worker in workers)


def at_exit(close: Callable[[], None], hurry: Callable[[], None], *, priority: int) -> Finalize:
    """Have `close` called when the process ends, also in children of multiprocessing, which skip atexit.

    If an interrupt ends it, `hurry` is called until it comes to its end: nobody wants to wait any more, but a
    daemon thread that comes back from C++ code of torch when Python is gone aborts the process. The interrupt
    is told and goes no further, so that whatever else is to end does.

    Args:
        close: may take its time; not called any more once the result has been cancelled.
        hurry: ends within some seconds, and can be called again where it was interrupted.
        priority: higher ones come first.
    """
    return Finalize(None, _ended, args=(close, hurry), exitpriority=priority)


def _ended(close: Callable[[], None], hurry: Callable[[], None]) -> None:
    disturbed: BaseException | None = None
    for action in (close, *[hurry] * _HURRIES):
        try:
            if disturbed is not None:
                _log.error(_HURRIED, disturbed)
            action()
            return
        except BaseException as exc:
            disturbed = exc
