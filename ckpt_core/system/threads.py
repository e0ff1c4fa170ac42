"""Threads, a lock with a wait, and the end of the process, all such that an interrupt leaves them whole.

Danger: Python raises KeyboardInterrupt between any two calls of the training thread. `threading.Condition` is
entered and left by functions written in Python, and an interrupt inside them leaves its lock taken for ever.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.util import Finalize

from ckpt_core.errors import PersistError

_log = logging.getLogger("ckpt_core")

_LOOK_AGAIN_S = 0.5
"""Whoever rings the bells may be interrupted between two of them."""

_HURRIES = 10
_HURRIED = "%r at the end of the process: what is in flight is given up, committed steps are safe"


class Monitor:
    """A lock, and a wait for what others change under it.

    Attributes:
        lock: `with monitor.lock` runs no Python code where it takes it and gives it back, so that no
            interrupt comes between.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
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
                f"limit of the container), or run fewer threads and processes"
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
