"""Who lives: each rank says so every beat, and those who wait for a rank look whether it still does.

A rank is dead when its beat has stood still for `dead_after_s` while it was looked at. Silence is counted
in steps of at most one and a half beats, so that a process that was stopped itself, and looks again for
the first time after a minute, does not take everybody else for dead.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ckpt_core.coordination.channel import Channel
from ckpt_core.coordination.client import StoreGone
from ckpt_core.system.threads import Worker, own_lock

_log = logging.getLogger("ckpt_core")

BYE = "bye"


class Heartbeat:
    """The thread that says that this rank lives, and does for others what must not wait for the store.

    Args:
        channel: makes a channel for one round of requests.
        key: under which it beats; already set.
        beat_s: seconds from one beat to the next.
        under_way: ids of the attempts that this rank has begun and not ended.
    """

    def __init__(
        self,
        channel: Callable[[], Channel],
        key: str,
        beat_s: float,
        under_way: Callable[[], Iterable[str]],
    ) -> None:
        self._channel = channel
        self._under_way = under_way
        self._key = key
        self._beat_s = beat_s
        self._jobs: queue.SimpleQueue[Callable[[Channel], None] | None] = queue.SimpleQueue()
        self._worker = Worker(self._run, name="ckpt-heartbeat")
        self._worker.start()

    def do(self, job: Callable[[Channel], None]) -> None:
        """Run `job` soon, on this thread; a store that is gone is its only excuse. Never blocks."""
        self._jobs.put(job)

    def stop(self, timeout_s: float) -> None:
        """Carry out what was asked, say goodbye, end the thread; gives up after `timeout_s`."""
        self._jobs.put(None)
        self._worker.join(deadline=time.monotonic() + timeout_s)

    def _run(self) -> None:
        beats = 0
        due = time.monotonic() + self._beat_s
        while True:
            try:
                job = self._jobs.get(timeout=max(due - time.monotonic(), 0.0))
            except queue.Empty:
                beats += 1
                due = time.monotonic() + self._beat_s
                self._say(" ".join([str(beats), *self._under_way()]))
                continue
            if job is None:
                self._say(BYE)
                return
            self._carry_out(job)

    def _carry_out(self, job: Callable[[Channel], None]) -> None:
        try:
            job(self._channel())
        except StoreGone as exc:
            _log.warning("another rank could not be told of a failure here: %s", exc)
        except Exception:
            _log.exception("a message to the other ranks was lost")

    def _say(self, text: str) -> None:
        # The next beat tries again; whoever waits for the store learns by itself that it is gone.
        try:
            self._channel().put(self._key, text)
        except StoreGone:
            pass
        except Exception:  # without a thread that beats, the others take this rank for dead
            _log.exception("the other ranks could not be told that this one lives")


@dataclass(slots=True)
class _Seen:
    value: str
    looked_at: float
    silent_s: float = 0.0


class Liveness:
    """What this rank knows of the others' beats. For any number of threads.

    Args:
        key_of: the key under which a rank beats.
        beat_s: seconds from one beat to the next, of every rank.
        dead_after_s: a rank that is silent for so long is dead.
    """

    def __init__(self, key_of: Callable[[int], str], *, beat_s: float, dead_after_s: float) -> None:
        self._key_of = key_of
        self._beat_s = beat_s
        self._dead_after_s = dead_after_s
        self._lock = own_lock()
        self._seen: dict[int, _Seen] = {}

    def look(self, channel: Channel, ranks: Sequence[int]) -> dict[int, str]:
        """Those of `ranks` that will not answer, and why.

        Raises:
            StoreGone: see Channel.
        """
        values = channel.read_all([self._key_of(rank) for rank in ranks])
        if values is None:
            raise StoreGone("the store has lost what the ranks told it: it was started anew")
        now = time.monotonic()
        with self._lock:
            found = {
                rank: self._judge(rank, value, now)
                for rank, value in zip(ranks, values, strict=True)
            }
        return {rank: text for rank, text in found.items() if text is not None}

    def seen(self, rank: int) -> tuple[str, tuple[str, ...]]:
        """The last beat of a rank that `look` has seen, and the attempts that were under way there."""
        with self._lock:
            seen = self._seen.get(rank)
        beat, *attempts = [""] if seen is None else seen.value.split(" ")
        return beat, tuple(attempts)

    def _judge(self, rank: int, value: str, now: float) -> str | None:
        if value == BYE:
            return "it has closed its TorchStore"
        seen = self._seen.get(rank)
        if seen is None or seen.value != value:
            self._seen[rank] = _Seen(value, now)
            return None
        seen.silent_s += min(now - seen.looked_at, 1.5 * self._beat_s)
        seen.looked_at = now
        if seen.silent_s < self._dead_after_s:
            return None
        return f"it has been silent for {seen.silent_s:.3g} s and is taken for dead"
