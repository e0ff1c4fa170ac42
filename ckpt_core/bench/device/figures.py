"""The figures of the suite `device`, what they are held to, and how they are shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.device.settings import ALL_LEAVES, LARGE, Leaves
from ckpt_core.bench.results import Figure, Report, Unit
from ckpt_core.bench.tables import cell, scaled, text_table, unit_name
from ckpt_core.bench.views import One, Own, Several, View

NONE, RAW, PIECES, WITHIN = "none", "raw_leaves", "raw_pieces", "raw_within_device"
FROM_HOST, PLAIN = "raw_from_host", "plain_reads"
REFERENCES = {
    NONE: ("no saves", "no save at all"),
    RAW: ("raw copies, by leaf", "one copy for each leaf into page-locked memory; no engine"),
    PIECES: ("raw copies of 1 GiB", "as many bytes in pieces of up to 1 GiB"),
    WITHIN: ("raw copies on the device", "all leaves to other memory of the device"),
    FROM_HOST: ("raw copies from the host", "one copy for each leaf out of page-locked memory"),
    PLAIN: (
        "plain reads of the files",
        "the files of the step, read by 8 threads to one buffer each",
    ),
}
"""Name -> title, and settings in words."""

BESIDE = {OURS: (NONE, RAW, PIECES, FROM_HOST, PLAIN), "ckpt_core_device": (WITHIN,)}
"""Way -> references that are measured in its turns."""


@dataclass(frozen=True, slots=True)
class Group:
    """A figure for leaves of each size; `drawn` as bars."""

    key: str
    title: str
    unit: Unit
    higher_is_better: bool = False
    drawn: bool = True

    def of(self, leaves: Leaves) -> Figure:
        """The one for these."""
        title = f"{self.title}, {leaves.title}"
        return Figure(f"{self.key}_{leaves.key}", title, self.unit, self.higher_is_better)

    def view(self) -> View:
        """A column for each size."""
        columns = [(leaves.title, self.of(leaves)) for leaves in ALL_LEAVES]
        drawn = [figure for _, figure in columns] if self.drawn else []
        return Several(self.title, columns, drawn=drawn)


STAGED = Group("staged", "Save to staged", Unit.BYTES_PER_S, True)
SHARE = Group("share", "Save to staged, of the raw copy's rate", Unit.PERCENT, True, False)
CALL = Group("call", "save() on training's thread", Unit.SECONDS)
BARRIER = Group("barrier", "save() until wait_staged() returns", Unit.SECONDS, drawn=False)
PASSED = Group("passed", "save() until training's stream goes on", Unit.SECONDS)
GROUPS = (STAGED, SHARE, CALL, BARRIER, PASSED)
FIRST = Figure("first_save", "First save(), nothing prepared", Unit.SECONDS)
PREPARE = Figure("prepare", "prepare()", Unit.SECONDS)
PREPARED = Figure("first_prepared", "First save() behind prepare()", Unit.SECONDS)
_FIRST = [("first, nothing prepared", FIRST), ("prepare()", PREPARE), ("first behind it", PREPARED)]
READ = {
    key: Figure(f"read_{key}", f"A read of training's own, {key}", Unit.MICROSECONDS)
    for key in ("p50", "p99", "max")
}
STEP = Figure("train_step", "Training step without saves", Unit.SECONDS)
LONGER = Figure("train_longer", "Training with saves, all steps, longer by", Unit.PERCENT)
INTERVAL = Figure("interval_longer", "Training from save to save, longer by", Unit.PERCENT)
LONGEST = Figure("longest_step", "Longest step over the mean one without saves", Unit.TIMES)
TRAIN_CALL = Figure("train_call", "save() in training: the call", Unit.SECONDS)
TRAIN_STALL = Figure("train_stall", "save() in training: call and wait of the host", Unit.SECONDS)
DURABLE = Figure("durable", "save() to durable, no training beside it", Unit.SECONDS)
RESTORE = Figure("restore", "Restore onto the device, cached", Unit.BYTES_PER_S, True)
RESTORE_SHARE = Figure(
    "restore_share", "Restore, of plain reads or 0.8 of the raw copy", Unit.PERCENT, True
)
OF_TRAINING = (STEP, LONGER, INTERVAL, LONGEST, TRAIN_CALL, TRAIN_STALL, DURABLE)

_TARGETS = (
    *zip(map(SHARE.of, ALL_LEAVES), (0.9, 0.85, 0.7), strict=True),
    (CALL.of(LARGE), 0.005),
    (CALL.of(ALL_LEAVES[-1]), 0.030),
    (LONGER, 0.01),
    (RESTORE_SHARE, 1.0),
)


def _targets(report: Report) -> Iterator[Table]:
    rows = []
    for figure, target in _TARGETS:
        stats = report.stats(figure).get(OURS)
        if stats is not None:
            good = stats.median >= target if figure.higher_is_better else stats.median <= target
            bound = f"{'>=' if figure.higher_is_better else '<='} {scaled(figure, target):g}"
            verdict = "holds" if good else "MISSED"
            title = f"{figure.title}, {unit_name(figure)}"
            rows.append([title, bound, cell(report, figure, OURS), verdict])
    if rows:
        heads = ["figure", "target", "median (min-max)", "verdict"]
        yield text_table(f"Targets, {report.title(OURS)}", heads, rows, left=(heads[0], heads[3]))


def _views() -> Iterator[View]:
    yield Own(_targets)
    for group in GROUPS:
        yield group.view()
    yield Several("save() of a new process", _FIRST)
    yield Several("A read of training's own, .item()", list(READ.items()), drawn=[READ["p99"]])
    drawn = (LONGER, LONGEST, TRAIN_CALL, DURABLE, RESTORE)
    for figure in (*OF_TRAINING, RESTORE, RESTORE_SHARE):
        yield One(figure, drawn=figure in drawn)


VIEWS = tuple(_views())


def about(report: Report) -> str:
    """On what, and where the files were."""
    settings = report.settings
    line = (
        f"{settings['on']}; state {settings['state_bytes'] / 1e6:.0f} MB, {settings['rounds']} rounds; "
        f"files on {report.machine.filesystem}; ratio = median / median of {report.title(OURS)}"
    )
    host = settings["on"] == "host memory only"
    return f"{line}\nhost memory only: figures mean nothing for a device" if host else line
