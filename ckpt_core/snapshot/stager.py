"""The stager: one thread that copies leaves out of the way of training, first come, first served.

States of a `Snapshot`:  open --stage()*--> open --seal()--> sealed --last leaf copied--> staged
                            \\____________________ fail() ____________________/-> failed

A leaf may be changed by training once it has been copied, or once the snapshot has failed: then nobody
reads it any more. `wait` is that barrier, for all leaves or for some (LightCheck III-B: the update of a
layer waits only for that layer).

For a leaf on a device it is enough that the copy is queued: whoever waits has the work that it queues from
then on wait for the copy, and goes on at once.
"""

from __future__ import annotations

import logging
import queue
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import torch

from ckpt_core.errors import StagingError
from ckpt_core.snapshot.items import StageItem
from ckpt_core.system.devices import NOTHING_QUEUED, Devices, Queued
from ckpt_core.system.threads import Monitor, ThreadFuture, Worker, join_all

_log = logging.getLogger("ckpt_core")

_KEPT_S = 0.5
"""How long the thread holds on to its last job."""

_NOBODY = 1 << 62
"""A place that no copy reaches: nobody waits for one."""


def _unnamed(name: str) -> None:
    """Before the names are known, and when nobody has to wait any more."""


class Snapshot:
    """Progress of copying the leaves of one checkpoint; the training thread waits on it.

    Args:
        step: of the checkpoint.
        on_staged: called once all leaves have been copied.
        devices: hold back what training asks of them.

    Attributes:
        staged: for users. Danger: the training thread must not ask it anything, since a future may stay
            locked for other threads where an interrupt comes.
    """

    def __init__(
        self, step: int, *, devices: Devices, on_staged: Callable[[], None] = lambda: None
    ) -> None:
        self.step = step
        self._on_staged = on_staged
        self._devices = devices
        self._ending = self._settled = False
        self._leaf_of: Callable[[str], str | None] = _unnamed
        self.staged: Future[None] = ThreadFuture()
        self._changed = Monitor()
        self._queued: dict[str, int] = {}
        # What is not in there yet: few ask for a leaf by its name.
        self._named: list[tuple[int, Sequence[str]]] = []
        self._live: list[tuple[int, Sequence[StageItem | None]]] = []
        self._handed = 0
        self._before_all = 0
        self._copied = 0
        self._awaited = _NOBODY
        # How many had been copied when, for the last time, so much was queued on devices.
        self._behind: list[tuple[int, Queued]] = []
        self._busy = 0

    def name_leaves(self, leaf_of: Callable[[str], str | None]) -> None:
        """Say which leaf a name stands for; None for a name that is not known.

        Called before the first `expect`. A tensor may have several names in a state, and whoever waits
        may know another one than its leaf has: a name that nobody knows waits for all leaves.
        """
        with self._changed.lock:
            self._leaf_of = leaf_of

    def expect(
        self, names: Sequence[str], items: Sequence[StageItem | None], *, behind: int = 0
    ) -> int:
        """Note that these leaves have been handed to the stager and may not change until copied.

        Args:
            names: of the leaf of each piece. Not to be changed.
            items: what is read for each piece; None for memory that nobody else has. Not to be changed.
            behind: how many had been handed over before; a call that is repeated changes nothing.

        Returns:
            How many have been handed over now.
        """
        with self._changed.lock:
            self._live.append((behind, items))
            self._named.append((behind + 1, names))
            self._handed = behind + len(names)
            return self._handed

    def expect_before_all(self) -> int:
        """Note that any leaf may be read before the first of those that are handed over; called first.

        Returns:
            How many have been handed over now.
        """
        with self._changed.lock:
            self._handed = self._before_all = 1
            return self._handed

    @property
    def handed(self) -> int:
        """How many leaves have been handed over so far."""
        with self._changed.lock:
            return self._handed

    def has_live(self) -> bool:
        """Whether leaves are still read, for a save that has not failed."""
        with self._changed.lock:
            return bool(self._live) and (self._copied < self._handed or bool(self._behind))

    def live_from(self, start: int) -> Sequence[tuple[int, Sequence[StageItem | None]]]:
        """What was handed over, call by call from the given one on: how many pieces before, and which.

        Nothing once the snapshot is settled.
        """
        with self._changed.lock:
            return self._live[start:]

    def wait_copied(self, place: int, *, deadline: float) -> bool:
        """Block until the leaves up to that place have been copied, or nobody needs them; whether it did.

        Raises:
            StagingError: the deadline passed; the leaves are still being read.
        """
        last = max(place, self._before_all)
        with self._changed.lock:
            waits = not self._settled and self._copied < last
        if waits:
            self._wait(lambda: self._settled or self._reached(last), deadline)
        self._hold_back(last)
        return waits

    def arrived(self, count: int, behind: Queued = NOTHING_QUEUED) -> None:
        """The next `count` leaves, in hand-over order, have been copied. Called by the stager.

        Args:
            behind: what is queued of these copies, and of all before them.
        """
        with self._changed.lock:
            self._copied += count
            if behind.events:
                self._behind.append((self._copied, behind))
            self._tell()

    def complete(self) -> None:
        """All leaves have been copied."""
        self._settle(None)

    def fail(self, error: BaseException) -> None:
        """Give up: the live leaves are free once a copy that is under way has ended. Idempotent."""
        self._settle(error)

    def _settle(self, error: BaseException | None) -> None:
        with self._changed.lock:
            first, self._ending = not self._ending, True
            # Let go of here, since it knows this snapshot in turn.
            told, self._on_staged = self._on_staged, lambda: None
        if not first:
            return
        # Order matters: whoever has passed the barrier finds the future done.
        if error is None:
            self.staged.set_result(None)
        else:
            self.staged.set_exception(error)
        with self._changed.lock:
            self._settled = True
            self._live, self._behind = [], []
            self._leaf_of = _unnamed
            self._changed.notify_all()
        if error is None:
            told()

    def enter_copy(self) -> bool:
        """The stager is about to read live leaves; False when the snapshot has been settled."""
        with self._changed.lock:
            if self._settled:
                return False
            self._busy += 1
            return True

    def leave_copy(self) -> None:
        """The stager no longer reads live leaves."""
        with self._changed.lock:
            self._busy -= 1
            self._tell()

    def _tell(self) -> None:
        """Wake those who wait, if one of them may find what it waits for. Called with the lock."""
        # To be woken for each leaf, and to look, takes two cores from the copy that is waited for.
        if self._settled or self._copied >= self._awaited:
            self._awaited = _NOBODY
            self._changed.notify_all()

    def is_clear(self, names: Iterable[str] | None) -> bool:
        """Whether training may change these leaves (None: all of them) now, on this thread."""
        with self._changed.lock:
            clear, place = self._clear(names), self._last_of(names)
        if clear:
            self._hold_back(place)
        return clear

    def wait(self, names: Iterable[str] | None, *, deadline: float) -> None:
        """Block until training may change these leaves (None: every leaf of the snapshot).

        Raises:
            StagingError: the deadline passed; the leaves are still being read.
        """
        names = None if names is None else tuple(names)
        self._wait(lambda: self._clear(names), deadline)
        with self._changed.lock:
            place = self._last_of(names)
        self._hold_back(place)

    def _hold_back(self, place: int) -> None:
        """What this thread asks of devices from now on runs behind the copies of the leaves up to a place."""
        with self._changed.lock:
            if not self._behind:
                return
            index = bisect_left(self._behind, place, key=lambda entry: entry[0])
            _, behind = self._behind[min(index, len(self._behind) - 1)]
        self._devices.hold_back(behind)

    def _wait(self, clear: Callable[[], bool], deadline: float) -> None:
        if not self._changed.wait_for(clear, deadline=deadline):
            raise StagingError(
                f"step {self.step} was not staged before the deadline: its leaves are still being copied, so "
                f"changing them now would tear the snapshot. Storage is probably stuck; earlier steps are "
                f"untouched",
                step=self.step,
            )

    def _clear(self, names: Iterable[str] | None) -> bool:
        if self._settled:
            return self._busy == 0
        return self._reached(self._last_of(names), idle=names is None)

    def _reached(self, place: int, *, idle: bool = False) -> bool:
        """Whether so many leaves have been copied; if not, whoever asks is woken then. With the lock.

        Args:
            idle: and no copy may be under way.
        """
        if self._copied >= place and not (idle and self._busy):
            return True
        self._awaited = min(self._awaited, place)
        return False

    def _last_of(self, names: Iterable[str] | None) -> int:
        """How many leaves must have been copied before training may change all of these."""
        return self._handed if names is None else max(map(self._place, names), default=0)

    def _place(self, name: str) -> int:
        """How many leaves must have been copied before training may change the one of this name."""
        while self._named:
            begin, names = self._named[0]
            self._queued.update(zip(names, range(begin, begin + len(names)), strict=True))
            del self._named[0]
        leaf = self._leaf_of(name)
        if leaf is None:
            return self._queued.get(name, self._handed)
        return self._queued.get(leaf, self._before_all)


class Stager:
    """Owns the staging thread. Jobs run in the order in which they were given."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.worker = Worker(self._run, name="ckpt-stager")

    def start(self) -> None:
        """Start the thread. Called once, when the Checkpointer is made.

        Raises:
            PersistError: the system gives no more threads.
        """
        self.worker.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` on the staging thread, after all earlier ones. A job handles its own errors."""
        self._jobs.put(job)

    def close(self, *, timeout_s: float) -> bool:
        """End the thread after the jobs already given; whether it has ended. Idempotent."""
        self._jobs.put(None)
        return join_all([self.worker], timeout_s=timeout_s)

    @torch.no_grad()
    def _run(self) -> None:
        job = self._jobs.get()
        while job is not None:
            try:
                job()
            except BaseException:  # the thread outlives any job
                _log.exception("a staging job failed outside its own error handling")
            try:
                # Whoever is the last to hold a job frees its leaves, by the thousand: not training, which
                # may still be inside the `save` that made it.
                following = self._jobs.get(timeout=_KEPT_S)
            except queue.Empty:
                # The next one may come in an hour.
                job = None
                following = self._jobs.get()
            job = following
