"""The ways to train under Horovod that are compared, and what is measured of each. Pure values.

The stall is that of the other suites.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.results import Family, Figure, Setup, Unit

INSTALL = "docs/horovod.md#installing says how to build it"

IN_STEP = "ckpt_core_in_step"
CHECKFREQ = "checkfreq_style"
MONOLITHIC = "monolithic_copy"
TORCH_SAVE = "torch_save_rank0"
NO_SPIN = "no_checkpoint_no_spin"
BASE = "no_checkpoint"


@dataclass(frozen=True, slots=True)
class Way(Setup):
    """One of them; `layerwise` is the argument of `ckpt_horovod.DistributedOptimizer` where that saves."""

    layerwise: str = ""


WAYS = {
    OURS: Way(
        "ckpt-core", "yes", "layer-wise, enqueued at the end of the iteration (the default)", "lazy"
    ),
    IN_STEP: Way(
        "ckpt-core, inside step()", "yes", "layer-wise, enqueued inside step()", "in_step"
    ),
    CHECKFREQ: Way(
        "like CheckFreq", "yes", "save() after the step, wait_staged() before the next one"
    ),
    MONOLITHIC: Way(
        "one copy after the step", "yes", "save() and wait_staged() at once after the step"
    ),
    TORCH_SAVE: Way(
        "torch.save on rank 0 + fsync",
        "yes",
        "torch.save of rank 0 to one file, fsync of it and its directory",
    ),
    NO_SPIN: Way(
        "no saves, no spinning",
        "",
        "all-reduces are awaited by poll and sleep, as by all ways that save",
    ),
    BASE: Way("no saves", "", "hvd.DistributedOptimizer as it is, which spins while it waits"),
}
"""In the order of the report."""

NAMES = tuple(WAYS)
BASES = (BASE, NO_SPIN)
SAVING = tuple([name for name in NAMES if name not in BASES])

ITERATION = Family("iteration_every_{}", "Iteration, a save every {}", Unit.SECONDS)
"""Time of one iteration, on the slower rank; without saves too, measured in the same minutes."""

WRITTEN = Family(
    "written_by_rank_{}", "Bytes that rank {} writes for a save / state bytes", Unit.TIMES
)
"""What storage sees a rank write for one save, over the size of the whole state."""


def overhead(interval: int, base: str) -> Figure:
    """What an iteration takes more than one of `base`, as a part of that."""
    over = "" if base == BASE else "_no_spin"
    title = f"Overhead over {WAYS[base].title}, a save every {interval} iterations"
    return Figure(f"overhead{over}_every_{interval}", title, Unit.PERCENT)
