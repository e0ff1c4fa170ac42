"""The order of a run: which workload is built when, who has a turn, what is noted.

Contenders take turns in rounds of random order, so that a disk whose speed drifts, or a neighbour
that wakes up, hits all of them. Only one process works at a time; the others wait for a message.
After each turn the disk is left clean (old steps removed, dirty pages written), outside the clock.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

from ckpt_core.bench import cache, proc, results
from ckpt_core.bench.crew import Crew
from ckpt_core.bench.machine import describe, work_folder
from ckpt_core.bench.results import Report
from ckpt_core.bench.settings import SMALL_LEAF_BYTES, Measure, Settings, plain

_CHECK_STEP = 1_000_000
_COLD_SHARE = 0.9
"""A restore counts as cold when at least this part of the state came from storage."""


def run(settings: Settings, *, notify: Callable[[str], None] = lambda message: None) -> Report:
    """Measure everything that `settings` asks for; what is written is removed again.

    Args:
        settings: the run.
        notify: told what happens next, for a progress line.

    Raises:
        ConfigError: there is no room for the run.
    """
    report = Report("core", plain(settings), describe(settings.root))
    with work_folder(settings.root) as root, Crew(settings, root, report, notify) as crew:
        if {Measure.SAVE, Measure.RESTORE} & set(settings.measures):
            _large(crew)
        if Measure.LEAVES in settings.measures:
            _small_leaves(crew)
        if Measure.TRAIN in settings.measures:
            _train(crew)
    return report


def _large(crew: Crew) -> None:
    """Persist, stall, memory, amplification, restore: one large state."""
    settings = crew.settings
    size = {"state_bytes": settings.state_bytes, "leaves": settings.leaves}
    state_bytes: dict[str, int] = {}
    for name in crew.names():
        crew.notify(f"warm-up: {name}")
        built = crew.ask(name, "build", workload="large", **size)
        if built is not None:
            state_bytes[name] = built["state_bytes"]
            _warm_up(crew, name)
    if Measure.SAVE in settings.measures:
        for name in crew.turns("save"):
            _save_turn(crew, name, state_bytes[name])
    if Measure.RESTORE in settings.measures:
        for name in crew.turns("restore"):
            _restore_turn(crew, name, state_bytes[name])
        for name in crew.names(reference=False):
            _check(crew, name)
    for name in crew.names():
        crew.ask(name, "close")


def _warm_up(crew: Crew, name: str) -> None:
    """Open the contender and save untimed; its memory is measured meanwhile, from before it opens."""
    pid = crew.pid(name)
    before = proc.memory_bytes(pid)
    with proc.PeakMemory(pid) as memory:
        _open_and_save(crew, name, "large")
    alive = name in crew.names(reference=False)
    if alive and Measure.SAVE in crew.settings.measures:
        # A contender that stages nothing may end below its start by a few pages.
        crew.report.add(results.MEMORY, name, max(1, memory.peak_bytes - before))


def _open_and_save(crew: Crew, name: str, folder: str) -> None:
    settings = crew.settings
    crew.ask(
        name,
        "open",
        folder=folder,
        staging_bytes=settings.staging_bytes,
        timeout_s=settings.timeout_s,
    )
    for _ in range(settings.warmups):
        crew.ask(name, "save")
    _tidy(crew, name)


def _tidy(crew: Crew, name: str) -> None:
    answer = crew.ask(name, "tidy")
    if answer is not None:
        crew.report.entrants[name].settings = answer["settings"]


def _save_turn(crew: Crew, name: str, state_bytes: int) -> None:
    report = crew.report
    pid = crew.pid(name)
    before = proc.io_bytes(pid)
    answer = crew.ask(name, "save")
    if answer is None:
        return
    written = proc.io_bytes(pid).since(before).written
    report.add(results.PERSIST, name, state_bytes / answer["persist_s"])
    if not report.entrants[name].reference:
        report.add(results.STALL, name, answer["call_s"] + answer["barrier_s"])
        report.add(results.STALL_CALL, name, answer["call_s"])
        report.add(results.STALL_BARRIER, name, answer["barrier_s"])
        if written:  # a filesystem in memory counts nothing
            report.add(results.AMPLIFICATION, name, written / state_bytes)
    _tidy(crew, name)


def _restore_turn(crew: Crew, name: str, state_bytes: int) -> None:
    report, folder = crew.report, crew.folder(name)
    if not report.entrants[name].reference:
        cache.warm(folder)
        answer = crew.ask(name, "restore")
        if answer is not None:
            report.add(results.RESTORE_WARM, name, state_bytes / answer["restore_s"])
    cache.drop(folder)
    before = proc.io_bytes(crew.pid(name)) if name in crew.names() else None
    answer = crew.ask(name, "restore")
    if answer is None or before is None:
        return
    fetched = proc.io_bytes(crew.pid(name)).since(before).read
    if fetched >= _COLD_SHARE * state_bytes:
        report.add(results.RESTORE_COLD, name, state_bytes / answer["restore_s"])
    else:
        note = "cold restore not measured: the page cache could not be dropped"
        if note not in report.entrants[name].notes:
            report.entrants[name].notes.append(note)


def _check(crew: Crew, name: str) -> None:
    answer = crew.ask(name, "check", step=_CHECK_STEP)
    if answer is not None:
        entrant = crew.report.entrants[name]
        entrant.restored = answer["saved"] == answer["restored"]
        entrant.digest = answer["restored"]


def _small_leaves(crew: Crew) -> None:
    """Stall of a state of many small tensors, where bytes cost nothing and leaves do."""
    crew.next_workload()
    size = {"leaves": crew.settings.small_leaves, "leaf_bytes": SMALL_LEAF_BYTES}
    for name in crew.names(reference=False):
        crew.notify(f"small leaves, warm-up: {name}")
        if crew.ask(name, "build", workload="small_leaves", **size) is not None:
            _open_and_save(crew, name, "small-leaves")
    for name in crew.turns("small leaves", reference=False):
        answer = crew.ask(name, "save")
        if answer is not None:
            crew.report.add(results.LEAVES_STALL, name, answer["call_s"] + answer["barrier_s"])
            _tidy(crew, name)
    for name in crew.names(reference=False):
        crew.ask(name, "close")


def _train(crew: Crew) -> None:
    """Training with saves at each interval over training without, in the same turn."""
    crew.next_workload()
    size = dataclasses.asdict(crew.settings.model)
    for name in crew.names(reference=False):
        crew.notify(f"training, warm-up: {name}")
        if crew.ask(name, "build", workload="training", **size) is not None:
            _open_and_save(crew, name, "training")
    for name in crew.turns("training", reference=False):
        _train_turn(crew, name)
    for name in crew.names(reference=False):
        crew.ask(name, "close")


def _train_turn(crew: Crew, name: str) -> None:
    settings, report = crew.settings, crew.report
    windows: dict[int, dict[str, Any]] = {}
    base_s: list[float] = []
    # Without saves first and last: a drift of the machine within the turn hits both sides alike.
    for every in (0, *crew.shuffled(list(settings.intervals)), 0):
        unit = max(1, every)
        steps = max(2, unit * -(-settings.train_steps // unit))
        answer = crew.ask(name, "train", every=every, steps=steps)
        if answer is None:
            return
        if every:
            windows[every] = answer
        else:
            base_s.append(answer["step_s"])
        _tidy(crew, name)
    report.add(results.TRAIN_BASE, name, statistics.mean(base_s))
    for every, window in windows.items():
        report.add(results.slowdown(every), name, window["step_s"] / statistics.mean(base_s))
        for stall_s in window["stalls_s"]:
            report.add(results.train_stall(every), name, stall_s)
