"""The stager: one thread that copies leaves out of the way of training, first come, first served.

States of a `Snapshot`:  open --stage()*--> open --seal()--> sealed --last leaf copied--> staged
                            \\____________________ fail() ____________________/-> failed

A leaf may be changed by training once it has been copied, or once the snapshot has failed: then nobody
reads it any more. `wait` is that barrier, for all leaves or for some (LightCheck III-B: the update of a
layer waits only for that layer).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import torch

from ckpt_core.errors import StagingError

_log = logging.getLogger("ckpt_core")

StageItem = tuple[torch.Tensor, int, int]
"""A live leaf, its offset in the shard file, and its bytes."""


class Snapshot:
    """Progress of copying the leaves of one checkpoint; the training thread waits on it."""

    def __init__(self, step: int) -> None:
        self.step = step
        self._leaf_of: Callable[[str], str | None] = lambda name: None
        self.staged: Future[None] = Future()
        self._changed = threading.Condition()
        self._queued: dict[str, int] = {}
        self._handed = 0
        self._before_all = 0
        self._copied = 0
        self._busy = 0

    def name_leaves(self, leaf_of: Callable[[str], str | None]) -> None:
        """Say which leaf a name stands for; None for a name that is not known.

        Called before the first `expect`. A tensor may have several names in a state, and whoever waits
        may know another one than its leaf has: a name that nobody knows waits for all leaves.
        """
        with self._changed:
            self._leaf_of = leaf_of

    def expect(self, names: Sequence[str]) -> None:
        """Note that these leaves have been handed to the stager and may not change until copied."""
        with self._changed:
            for name in names:
                self._handed += 1
                self._queued[name] = self._handed

    def expect_before_all(self) -> None:
        """Note that any leaf may be read before the first of those that are handed over from now on."""
        with self._changed:
            self._handed += 1
            self._before_all = self._handed

    def arrived(self, count: int) -> None:
        """The next `count` leaves, in hand-over order, have been copied. Called by the stager."""
        with self._changed:
            self._copied += count
            self._changed.notify_all()

    def complete(self) -> None:
        """All leaves have been copied."""
        self._settle(None)

    def fail(self, error: BaseException) -> None:
        """Give up: the live leaves are free once a copy that is under way has ended. Idempotent."""
        self._settle(error)

    def _settle(self, error: BaseException | None) -> None:
        with self._changed:
            if not self.staged.done():
                if error is None:
                    self.staged.set_result(None)
                else:
                    self.staged.set_exception(error)
            self._changed.notify_all()

    def enter_copy(self) -> bool:
        """The stager is about to read live leaves; False when the snapshot has been settled."""
        with self._changed:
            if self.staged.done():
                return False
            self._busy += 1
            return True

    def leave_copy(self) -> None:
        """The stager no longer reads live leaves."""
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()

    def is_clear(self, names: Iterable[str] | None) -> bool:
        """Whether training may change these leaves (None: all of them) now."""
        with self._changed:
            return self._clear(names)

    def wait(self, names: Iterable[str] | None, *, deadline: float) -> None:
        """Block until training may change these leaves (None: every leaf of the snapshot).

        Raises:
            StagingError: the deadline passed; the leaves are still being read.
        """
        names = None if names is None else tuple(names)
        with self._changed:
            while not self._clear(names):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StagingError(
                        f"step {self.step} was not staged before the deadline: its leaves are still "
                        f"being copied, so changing them now would tear the snapshot. Storage is "
                        f"probably stuck; earlier steps are untouched",
                        step=self.step,
                    )
                self._changed.wait(left)

    def _clear(self, names: Iterable[str] | None) -> bool:
        if self.staged.done():
            return self._busy == 0
        if names is None:
            return self._copied >= self._handed and self._busy == 0
        return max(map(self._place, names), default=0) <= self._copied

    def _place(self, name: str) -> int:
        """How many leaves must have been copied before training may change the one of this name."""
        leaf = self._leaf_of(name)
        if leaf is None:
            return self._queued.get(name, self._handed)
        return self._queued.get(leaf, self._before_all)


class Stager:
    """Owns the staging thread. Jobs run in the order in which they were given."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` on the staging thread, after all earlier ones. A job handles its own errors."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ckpt-stager", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self, *, timeout_s: float) -> None:
        """End the thread after the jobs already given. Idempotent."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException:  # the thread outlives any job
                _log.exception("a staging job failed outside its own error handling")
