"""The order of a run of the suite `ranks`: one team after the other, then planning, then messages."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from ckpt_core.bench.machine import check_room, describe, work_folder
from ckpt_core.bench.ranks import messages, planning
from ckpt_core.bench.ranks.saving import TeamRun, enter_all
from ckpt_core.bench.ranks.settings import RankMeasure, RankSettings
from ckpt_core.bench.ranks.ways import NAMES
from ckpt_core.bench.results import Report
from ckpt_core.bench.settings import plain

_PROCESS_BYTES = 400 * 2**20
_MEMORY_STATES = 6
"""Of each rank, in sizes of the state: itself, two of staging memory of `replicated`, one each of the
other ways, and dirty pages."""

_DISK_STATES = 4
"""Of each rank: the roots of `replicated`, whose files are recycled; the other ways share theirs."""


def run(settings: RankSettings, *, notify: Callable[[str], None] = lambda message: None) -> Report:
    """Measure everything that `settings` asks for; what is written is removed again.

    Args:
        settings: the run.
        notify: told what happens next, for a progress line.

    Raises:
        ConfigError: there is no room for the run.
        CkptError: planning or the real commits failed.
    """
    report = Report("ranks", plain(settings), describe(settings.root))
    if {RankMeasure.SAVE, RankMeasure.TRAIN} & set(settings.measures):
        _teams(settings, report, notify)
    if RankMeasure.PLAN in settings.measures:
        notify("planning")
        report.more["planning"] = planning.measure(settings.plan_leaves, settings.plan_ranks)
    if RankMeasure.MESSAGES in settings.measures:
        report.more["messages"] = messages.run(settings, notify)
    return report


def _teams(settings: RankSettings, report: Report, notify: Callable[[str], None]) -> None:
    most = max(settings.world_sizes)
    enter_all(report, tuple(name for name in NAMES if name in settings.contenders))
    state_bytes = max(settings.state_bytes, settings.model.state_bytes)
    check_room(
        settings.root,
        disk_bytes=state_bytes * _DISK_STATES * (most + len(NAMES)),
        memory_bytes=most * (state_bytes * _MEMORY_STATES + _PROCESS_BYTES),
    )
    with work_folder(settings.root) as root:
        for ranks in settings.world_sizes:
            folder = root / f"{ranks}-ranks"
            folder.mkdir()
            with TeamRun(settings, folder, ranks, notify) as team:
                team.measure(report)
            shutil.rmtree(folder, ignore_errors=True)
