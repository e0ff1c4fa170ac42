"""A state of which 99 % stays the same, saved by ways that write only what has changed, beside a whole save.

Then one of which all changes: what it costs to look for what does not.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_core.bench import cache
from ckpt_core.bench.contenders import OURS, SHARING
from ckpt_core.bench.crew import Crew
from ckpt_core.bench.results import Figure, Unit, per_gb
from ckpt_core.bench.serving import Answer
from ckpt_core.bench.views import One, View

WAYS = (OURS, *SHARING)
_LOOKING = (OURS, "ckpt_core_shared")
_ADAPTER, _ALL = "adapter.", ""
_WARMUPS = 9
"""A leaf must look the same in three saves, each of which may look at half of them; the next one gives those
that stay files of their own; then these are links."""

_CHECK_STEP = 1_000_000

DURABLE = Figure("still_durable", "99 % the same: save() to durable", Unit.SECONDS)
STALL = Figure("still_stall", "99 % the same: stall, call and barrier at once", Unit.SECONDS)
PROCESSOR = Figure("still_processor", "99 % the same: processor time", Unit.SECONDS_PER_GB)
WRITTEN = Figure("still_written", "99 % the same: bytes written / state bytes", Unit.TIMES)
RESTORE = Figure("still_restore", "99 % the same: restore, cached", Unit.BYTES_PER_S, True)
CHANGING = Figure("changing_durable", "All changes: save() to durable", Unit.SECONDS)
LOOKING = Figure("changing_processor", "All changes: processor time", Unit.SECONDS_PER_GB)

FIGURES: tuple[View, ...] = tuple(
    [One(figure) for figure in (DURABLE, STALL, PROCESSOR, WRITTEN, RESTORE, CHANGING, LOOKING)]
)


def measure_still(crew: Crew) -> None:
    """Both states, for all of `WAYS` that run."""
    state_bytes = _begin(crew, crew.names(), "still", _ADAPTER)
    for name in crew.turns("99 % the same"):
        answer = _save(crew, name, _ADAPTER)
        if answer is not None:
            crew.report.add(DURABLE, name, answer["durable_s"])
            crew.report.add(STALL, name, answer["call_s"] + answer["barrier_s"])
            crew.report.add(PROCESSOR, name, per_gb(answer["processor_s"], state_bytes))
            if answer["written_bytes"]:  # a filesystem in memory counts nothing
                crew.report.add(WRITTEN, name, answer["written_bytes"] / state_bytes)
    for name in crew.turns("99 % the same, restore"):
        cache.warm(crew.team(name).root)
        answer = crew.ask_one(name, "restore")
        if answer is not None:
            crew.report.add(RESTORE, name, state_bytes / answer["restore_s"])
    for name in crew.names():
        answer = crew.ask_one(name, "check", step=_CHECK_STEP, below=_ADAPTER)
        if answer is not None:
            crew.report.entrants[name].compare(answer["saved"], answer["restored"])
        crew.ask(name, "drop")
    _measure_changing(crew)


def _measure_changing(crew: Crew) -> None:
    names = [name for name in crew.names() if name in _LOOKING]
    state_bytes = _begin(crew, names, "changing", _ALL)
    for name in crew.turns("all changes"):
        answer = _save(crew, name, _ALL) if name in names else None
        if answer is not None:
            crew.report.add(CHANGING, name, answer["durable_s"])
            crew.report.add(LOOKING, name, per_gb(answer["processor_s"], state_bytes))
    for name in names:
        crew.ask(name, "drop")


def _begin(crew: Crew, names: Iterable[str], folder: str, below: str) -> int:
    """The same state for all, and saves outside the clock; its bytes."""
    settings, state_bytes = crew.run.settings, 0
    bounds = {"staging_bytes": settings.staging_bytes, "timeout_s": settings.timeout_s}
    for name in names:
        crew.notify(f"{folder}, warm-up: {name}")
        size = {"state_bytes": settings.state_bytes, "leaves": settings.leaves}
        built = crew.ask_one(name, "build", workload="still", **size)
        state_bytes = state_bytes if built is None else built["state_bytes"]
        crew.ask(name, "open", folder=folder, **bounds)
        for _ in range(_WARMUPS):
            _save(crew, name, below)
    return state_bytes


def _save(crew: Crew, name: str, below: str) -> Answer | None:
    answer = crew.ask_one(name, "save", below=below)
    tidied = crew.ask_one(name, "tidy")
    if tidied is not None:
        crew.report.entrants[name].settings = tidied["settings"]
    return answer
