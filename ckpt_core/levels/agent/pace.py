"""How fast bytes go, and when something that failed is tried again."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from ckpt_core.errors import CkptError

BLOCK_BYTES = 1 << 20
"""Small enough that a block is still in the processor's cache when it is hashed and handed on."""
_MOST_BLOCK_BYTES = 8 << 20
"""Of memory that is only looked at: each block of it is a call or two of the system."""
_LEAST_BLOCK_BYTES = 64 << 10
_BLOCKS_PER_S = 10
_LOOK_AGAIN_S = 0.2


class Stopped(CkptError):
    """Whoever sends has been told to end. Never leaves the agent."""


class Pace:
    """Lets bytes through at a rate. For one thread at a time.

    The time that a block takes is over before the next one is let through, so there is no burst, and what was
    not used (the store was slower) is not made up for later.

    Attributes:
        bytes_per_s: the rate; None: no bound. Any thread may change it, also while something waits.
    """

    def __init__(
        self,
        bytes_per_s: int | None,
        *,
        stop: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        """A pace.

        Args:
            stop: set by whoever wants it to end.
            sleep: waits for so many seconds, or until `stop` is set.
        """
        self.bytes_per_s = bytes_per_s
        self._stop = stop or threading.Event()
        self._clock = clock
        self._sleep = sleep or self._stop.wait
        self._last_s, self._last_bytes = 0.0, 0

    @property
    def block_bytes(self) -> int:
        """Most bytes to send at a time, so that waiting is even."""
        if (rate := self.bytes_per_s) is None:
            return _MOST_BLOCK_BYTES
        return min(BLOCK_BYTES, max(_LEAST_BLOCK_BYTES, rate // _BLOCKS_PER_S))

    def let_through(self, nbytes: int) -> None:
        """Wait until so many bytes may be sent.

        Raises:
            Stopped: it is to end.
        """
        while (rate := self.bytes_per_s) is not None and not self._stop.is_set():
            left_s = self._last_s + self._last_bytes / rate - self._clock()
            if left_s <= 0:
                break
            self._sleep(min(left_s, _LOOK_AGAIN_S))  # the rate may be another one by then
        if self._stop.is_set():
            raise Stopped("told to end")
        self._last_s, self._last_bytes = self._clock(), nbytes


class Backoff:
    """How long to wait after each failure in a row: twice as long each time, up to a bound."""

    def __init__(self, *, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self.failures = 0

    def failed(self, *, hopeless: bool = False) -> float:
        """Seconds to wait now, never twice the same; the longest where somebody has to do something first."""
        self.failures += 1
        wait_s = min(self._first_s * 2.0 ** min(self.failures - 1, 30), self._most_s)
        return (self._most_s if hopeless else wait_s) * random.SystemRandom().uniform(0.5, 1.0)

    def succeeded(self) -> None:
        """Begin anew."""
        self.failures = 0
