"""What the suite `ranks` tells of each way, by the number of ranks; with what it planned and simulated."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from rich.table import Table

from ckpt_core.bench.ranks import messages, planning
from ckpt_core.bench.results import Family, Report, Unit
from ckpt_core.bench.tables import text_table
from ckpt_core.bench.views import Axis, Over, Own, View


def _family(key: str, title: str, unit: Unit) -> Family:
    return Family(f"{key}_{{}}_ranks", title, unit, of="ranks")


SHARE = _family("share", "Largest share of a rank", Unit.TIMES)
"""Files of the rank that writes most, over the replicated bytes."""

WRITTEN = _family("written", "Bytes written by the busiest rank", Unit.BYTES)
"""Storage traffic of the rank that writes most, seen from outside."""

DURABLE = _family("durable", "Save to complete", Unit.SECONDS)
"""From the common start until every rank knows that the step is complete."""

COMMIT = _family("commit", "Last bytes durable to committed everywhere", Unit.SECONDS)
"""What is left of that after the last rank had its bytes on disk."""

BLOCKED = _family("blocked", "Blocking time: save, then wait until staged", Unit.SECONDS)
"""Of the slowest rank's training, if it does nothing else meanwhile."""


def slowdown(every: int) -> Family:
    """Time of a training step with a save every so many steps over one without."""
    title = f"Training slowdown, a save every {every} steps"
    return _family(f"slowdown_every_{every}", title, Unit.TIMES)


def processor(every: int) -> Family:
    """What training with saves works longer than without, on all ranks, for each GB of the state."""
    title = f"Processor time of saves in training, one every {every} steps"
    return _family(f"train_processor_every_{every}", title, Unit.SECONDS_PER_GB)


def stall(every: int) -> Family:
    """What one save takes from training, on the rank that waits longest."""
    title = f"Stall in training, a save every {every} steps"
    return _family(f"train_stall_every_{every}", title, Unit.SECONDS)


_over = partial(Over, axis=Axis("world_sizes", "ranks", "ranks"))


def figures(report: Report) -> Iterator[View]:
    """All of a report; ratios are to the median of ours at the same number of ranks."""
    yield _over(title="Largest share of a rank / replicated bytes", make=SHARE)
    title = "Bytes written by the busiest rank, seen from outside"
    yield _over(title=title, make=WRITTEN, drawn="")
    yield _over(title="Save to complete on all ranks", make=DURABLE)
    yield _over(title="Last bytes durable to committed everywhere", make=COMMIT, drawn="")
    title = "Blocking time: save, then wait until staged"
    yield _over(title=f"{title}, slowest rank", make=BLOCKED, drawn=title)
    for every in report.settings["intervals"]:
        title = f"Training step with a save every {every} steps, over none"
        yield _over(title=title, make=slowdown(every))
        title = f"Stall of a save in training, every {every} steps, slowest rank"
        yield _over(title=title, make=stall(every), drawn="")
        title = f"Processor time of saves in training, every {every} steps, all ranks"
        yield _over(title=title, make=processor(every), drawn="")
    yield Own(_rank_bytes)
    yield Own(planning.tables)
    yield Own(messages.tables, messages.areas)


def _rank_bytes(report: Report) -> Iterator[Table]:
    rows = []
    for ranks, ways in report.more.get("rank_bytes", {}).items():
        for name in report.entrants:
            sizes = "  ".join(f"{size / 1e6:.2f}" for size in ways.get(name, []))
            rows.append((ranks, report.title(name), sizes))
    if rows:
        title = "Files of the newest step by rank, MB"
        yield text_table(title, ("ranks", "way", "rank 0, 1, ..."), rows)
