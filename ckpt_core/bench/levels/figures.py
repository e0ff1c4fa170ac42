"""What the suite `levels` tells of each way, and the median of pairs with its interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ckpt_core.bench.results import Figure, Unit
from ckpt_core.bench.views import One, Several, View

CALL = Figure("call", "save() in training beside the agent, the call alone", Unit.SECONDS)
STEP = Figure("step", "Training step with saves, on one processor", Unit.SECONDS)
SLOWER = Figure(
    "slower",
    "Processor time of training beside the agent that sends, over the same while it is held: each pair",
    Unit.PERCENT,
)
SLOWER_MEDIAN = Figure(
    "slower_median", "The same: the median, in the interval that holds it with 95 %", Unit.PERCENT
)
CLOCK = Figure(
    "slower_clock",
    "Time of training on a processor of its own beside agents that send, over the same while they are held: "
    "each pair",
    Unit.PERCENT,
)
CLOCK_MEDIAN = Figure(
    "slower_clock_median",
    "The same: the median, in the interval that holds it with 95 %",
    Unit.PERCENT,
)
CAP = Figure("cap", "Bytes each second over the bound", Unit.TIMES)
UPLOAD = Figure("upload", "Step to the store", Unit.BYTES_PER_S, True)
UPLOAD_CPU = Figure("upload_cpu", "Processor time of sending", Unit.SECONDS_PER_GB)
BACK = Figure(
    "back", "Step out of the store: into live tensors of a fresh root", Unit.BYTES_PER_S, True
)
LOADED = Figure(
    "loaded", "The same: straight into fresh tensors, by `ckpt_core.load`", Unit.BYTES_PER_S, True
)
MEMORY_SAVE = Figure("memory_save", "Save to a root in memory", Unit.BYTES_PER_S, True)
MEMORY_RESTORE = Figure("memory_restore", "Restore from it", Unit.BYTES_PER_S, True)
KEPT_CALL = Figure("peers_call", "save() of nodes that keep copies, the call alone", Unit.SECONDS)
KEPT_COMMITTED = Figure("peers_committed", "The same, until it is committed", Unit.SECONDS)
KEPT_ARRIVED = Figure("peers_arrived", "The same, until another node has a copy", Unit.SECONDS)
KEPT_SENT = Figure("peers_sent", "Bytes that a node sends for one save", Unit.BYTES)
PARITY_MADE = Figure("parity_made", "Save, until its group has the parity", Unit.SECONDS)
LOST_BACK = Figure(
    "lost_back", "A node lost with its disk: restore on all, until tensors are back", Unit.SECONDS
)
KEPT_RATE = Figure(
    "kept_rate",
    "Bytes of a node's state over the time from its commit until others keep it",
    Unit.BYTES_PER_S,
    True,
)
BACK_RATE = Figure(
    "back_rate",
    "Bytes of a lost node's state over the time until it is back",
    Unit.BYTES_PER_S,
    True,
)
CODE = Figure(
    "parity_code",
    "Arithmetic of parity alone, bytes of data, one processor",
    Unit.BYTES_PER_S,
    True,
)
VIEWS: tuple[View, ...] = (
    One(CALL),
    One(STEP),
    One(SLOWER, columns=False),
    One(SLOWER_MEDIAN, columns=False),
    One(CLOCK, columns=False),
    One(CLOCK_MEDIAN, columns=False),
    One(CAP, columns=False),
    One(UPLOAD, drawn=True),
    One(UPLOAD_CPU, drawn=True),
    One(BACK, drawn=True),
    One(LOADED),
    One(KEPT_CALL),
    One(KEPT_COMMITTED),
    One(KEPT_ARRIVED, drawn=True),
    One(KEPT_SENT, columns=False),
    One(PARITY_MADE, columns=False),
    One(KEPT_RATE, columns=False),
    One(LOST_BACK, columns=False),
    One(BACK_RATE, columns=False),
    One(CODE, columns=False),
    Several("Memory", (("save", MEMORY_SAVE), ("restore", MEMORY_RESTORE))),
)


def median_within(values: Sequence[float]) -> tuple[float, ...]:
    """Of the median: a lower bound, itself, an upper one; 95 %, by order, if there are six. () of ()."""
    if not values:
        return ()
    ordered, count = sorted(values), len(values)
    below, index = 0.5**count, 0
    while below + math.comb(count, index + 1) * 0.5**count <= 0.025:
        index += 1
        below += math.comb(count, index) * 0.5**count
    return ordered[index], statistics.median(ordered), ordered[-1 - index]
