"""Which of many places a test strikes at: in each run another part of them.

The head of a run tells its number; `CKPT_PLACES=number` tries the same places again, and
`CKPT_PLACES=all` tries every one, which takes several times as long;
`CKPT_PLACES=1/10` to `10/10` do that in parts.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

VARIABLE = "CKPT_PLACES"

T = TypeVar("T")


def run_number() -> str:
    """The number of this run, or "all"; drawn once, and inherited by every process that the run starts."""
    return os.environ.setdefault(VARIABLE, str(random.SystemRandom().randrange(1_000_000)))


def header() -> str:
    """For the head of a run."""
    number = run_number()
    return f"{VARIABLE}={number} (the same places again; {VARIABLE}=all for every one)"


def some(places: Sequence[T], most: int, *, of: str) -> list[T]:
    """At most so many of these, evenly apart, in their order.

    Args:
        of: what is struck; different ones are struck at different places in one run.
    """
    stride = -(-len(places) // most)
    if run_number() == "all" or stride <= 1:
        return list(places)
    if "/" in run_number():
        part, parts = map(int, run_number().split("/"))
        return list(places[part - 1 :: parts])
    return list(places[random.Random(f"{run_number()} {of}").randrange(stride) :: stride])
