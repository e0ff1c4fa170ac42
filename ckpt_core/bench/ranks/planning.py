"""Time and memory of the plan that says which rank stores what, for more ranks than this machine could run.

Runs in a process of its own, without torch: `python -m ckpt_core.bench.ranks.planning LEAVES RANKS...` prints
one JSON list. Every plan is made as a rank makes it: `share_leaves`, then `structure_hash`.
"""

from __future__ import annotations

import json
import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from statistics import median
from typing import Any

from rich.table import Table

from ckpt_core.bench.remote import run_module
from ckpt_core.bench.results import Report
from ckpt_core.bench.tables import Column, rows_table
from ckpt_core.layout import share_leaves, structure_hash

_WIDTH = 4096
_ITEM_BYTES = 4
_SAMPLES = 9

Row = tuple[str, str, tuple[int, ...], str]


@dataclass(frozen=True, slots=True)
class Planned:
    """What planning cost for one structure and one number of ranks.

    Attributes:
        structure: "transformer" (matrices and vectors) or "small" (vectors of 1 KiB).
        state_bytes: of the whole state.
        rank_s: seconds of one rank's plan: median of those that were made.
        slowest_s: the slowest of them.
        hash_s: how much of `rank_s` is the hash.
        made: how many ranks' plans were made; all ranks', one after the other, if it equals `ranks`.
        all_s: seconds of all of them together.
        peak_bytes: most memory that Python held for one rank's plan, the plan included.
        largest_share: bytes of the rank that stores most, over an even share.
    """

    structure: str
    leaves: int
    ranks: int
    state_bytes: int
    rank_s: float
    slowest_s: float
    hash_s: float
    made: int
    all_s: float
    peak_bytes: int
    largest_share: float


def measure(leaves: int, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Plan in a new process; rows of `Planned`.

    Raises:
        CkptError: the process failed.
    """
    found: list[dict[str, Any]] = run_module(__name__, [leaves, *ranks], what="planning")
    return found


_COLUMNS = (
    Column("structure", "structure"),
    Column("leaves", "leaves", "{:,}"),
    Column("ranks", "ranks", "{:,}"),
    Column("one rank, ms", "rank_s", "{:.1f}", 1e3),
    Column("slowest, ms", "slowest_s", "{:.1f}", 1e3),
    Column("plans made", "made", "{:,}"),
    Column("all of them, s", "all_s", "{:.2f}"),
    Column("peak memory, MB", "peak_bytes", "{:.2f}", 1e-6),
    Column("largest / even share", "largest_share", "{:.4f}"),
)


def tables(report: Report) -> Iterator[Table]:
    """What `measure` found."""
    if "planning" in report.more:
        title = "Planning: share_leaves and structure_hash of one rank"
        yield rows_table(title, _COLUMNS, report.more["planning"])


def transformer(leaves: int) -> list[Row]:
    """Layers of a large language model: 12 tensors each, four of them matrices."""
    w = _WIDTH
    shapes = [(3 * w, w), (3 * w,), (w, w), (w,), (4 * w, w), (4 * w,), (w, 4 * w), (w,)]
    shapes += [(w,)] * 4
    return [
        (f"layers.{index}.weight", "float32", shape, "")
        for index, shape in enumerate(islice(cycle(shapes), leaves))
    ]


def small(leaves: int) -> list[Row]:
    """Vectors of 1 KiB."""
    return [(f"layers.{index}.bias", "float32", (256,), "") for index in range(leaves)]


def planned(name: str, rows: Sequence[Row], ranks: int, members: Sequence[int]) -> Planned:
    """Make the plans of these members and say what they cost."""
    sizes = [(_nbytes(shape), _ITEM_BYTES) for _, _, shape, _ in rows]
    seconds, hash_s, stored = [], [], []
    for member in members:
        began = time.perf_counter()
        shares = share_leaves(sizes, members=ranks, member=member)
        shared = time.perf_counter()
        structure_hash(rows, members=ranks)
        ended = time.perf_counter()
        seconds.append(ended - began)
        hash_s.append(ended - shared)
        stored.append(sum([part[1] for part in shares if part is not None]))
    total = sum([size for size, _ in sizes])
    if len(members) == ranks:
        assert sum(stored) == total, "the shares of all ranks are the state"
    return Planned(
        name,
        len(rows),
        ranks,
        total,
        rank_s=median(seconds),
        slowest_s=max(seconds),
        hash_s=median(hash_s),
        made=len(members),
        all_s=sum(seconds),
        peak_bytes=_peak_bytes(sizes, rows, ranks),
        largest_share=max(stored) / (total / ranks),
    )


def _peak_bytes(sizes: Sequence[tuple[int, int]], rows: Sequence[Row], ranks: int) -> int:
    # Apart from the clock: tracing makes everything slower.
    tracemalloc.start()
    try:
        shares = share_leaves(sizes, members=ranks, member=0)
        structure_hash(rows, members=ranks)
        del shares
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _nbytes(shape: tuple[int, ...]) -> int:
    count = _ITEM_BYTES
    for size in shape:
        count *= size
    return count


def _sample(ranks: int) -> list[int]:
    return sorted({number * (ranks - 1) // (_SAMPLES - 1) for number in range(_SAMPLES)})


def main(arguments: list[str]) -> None:
    """Entry of the process: all plans of the first number of ranks, samples of the others."""
    leaves, *ranks = [int(argument) for argument in arguments]
    found = []
    for make in (transformer, small):
        rows = make(leaves)
        for number in ranks:
            every = make is transformer and number == ranks[0]
            members = list(range(number)) if every else _sample(number)
            found.append(asdict(planned(make.__name__, rows, number, members)))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
