"""What is measured of each way, for each interval. The stall is that of the other suites."""

from __future__ import annotations

from ckpt_core.bench.results import Figure, Make, Unit
from ckpt_horovod_tools.bench.ways import BASE


def iteration(interval: int) -> Figure:
    """Time of one iteration, on the slower rank; without saves too, measured in the same minutes."""
    title = f"Iteration, a save every {interval}"
    return Figure(f"iteration_every_{interval}", title, Unit.SECONDS)


def overhead(interval: int, base: str) -> Figure:
    """What an iteration takes more than one of `base`, as a part of that."""
    over = "" if base == BASE else "_no_spin"
    title = f"Overhead over {base}, a save every {interval} iterations"
    return Figure(f"overhead{over}_every_{interval}", title, Unit.PERCENT)


def overhead_over(base: str) -> Make:
    """`overhead` over one of the two bases."""
    return lambda interval: overhead(interval, base)


def written(rank: int) -> Figure:
    """What storage sees a rank write for one save, over the size of the whole state."""
    title = f"Bytes that rank {rank} writes for a save / state bytes"
    return Figure(f"written_by_rank_{rank}", title, Unit.TIMES)
