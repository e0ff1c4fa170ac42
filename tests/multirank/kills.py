"""Jobs of which one rank dies at a file operation of a save, many side by side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import places
from tests.crash.warm import Warm
from tests.multirank.crew import all_well

SIGKILL = 9
RANKS = 3
AT_ONCE = 6
"""Jobs side by side: where a rank has died, the others wait until it is taken for dead."""
_NEVER = 1_000_000

Killed = tuple[dict[str, Any], list[dict[str, Any]]]
"""The arguments of a job, and what became of its ranks."""


def killed(
    warm: Warm, call: str, place: Path, *, nodes: list[str] | None = None, **how: Any
) -> Iterator[list[Killed]]:
    """Run `call` with `how` and a root, in which the victim dies at operation `n`, for AT_ONCE of all n.

    What ranks return has the number of their `operations`. With `CKPT_PLACES=all` there are more batches.
    """

    def jobs(numbers: list[int]) -> list[Killed]:
        several = [{**how, "root": str(place / str(n)), "n": n} for n in numbers]
        outcomes = warm.call(
            "tests.multirank.crew:run_several",
            call=call,
            world_size=RANKS,
            several=several,
            nodes=nodes,
        )
        return list(zip(several, outcomes, strict=True))

    ((_, whole),) = jobs([_NEVER])
    count = all_well(whole)[how["victim"]]["operations"]
    numbers = places.some(range(count), AT_ONCE, of=f"{call} {nodes} {how}")
    for first in range(0, len(numbers), AT_ONCE):
        yield jobs(numbers[first : first + AT_ONCE])


def died(outcomes: list[dict[str, Any]], victim: int) -> bool:
    """Whether it was killed; a rank does not always come to the same number of operations."""
    return bool(outcomes[victim]["signal"] == SIGKILL)
