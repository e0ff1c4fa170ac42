"""How long the training thread is inside the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stall:
    """Time that the training thread has spent inside the engine.

    Attributes:
        seconds: in all so far.
        ended_s: when it last came out, on the monotonic clock; 0 before the first time.
    """

    seconds: float = 0.0
    ended_s: float = 0.0
