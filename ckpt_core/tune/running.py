"""The order of a run: a first look, the search, the interval, its check."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_core.errors import ConfigError
from ckpt_core.policy import tuning
from ckpt_core.system.interrupts import holding
from ckpt_core.system.machine import describe
from ckpt_core.system.memory_limit import free_memory
from ckpt_core.tune.checking import find_interval
from ckpt_core.tune.direct import usable_axes
from ckpt_core.tune.driver import Driver, Turn
from ckpt_core.tune.facts import Facts, defaults, look
from ckpt_core.tune.program import Program
from ckpt_core.tune.report import TuneReport
from ckpt_core.tune.settings import TuneSettings
from ckpt_core.units import size_text

Notify = Callable[[str], None]

_REMOVALS, _PAUSE_S = 50, 0.1


def tune(settings: TuneSettings, *, notify: Notify = lambda message: None) -> TuneReport:
    """Find the settings and the interval; what is written is removed again, whatever happens.

    Args:
        settings: the run.
        notify: told what happens next, for a progress line.

    Raises:
        ConfigError: a limit leaves nothing to choose, or the program does not do what it must.
        CkptError: a save failed.
    """
    with holding() as held:
        folder = Path(tempfile.mkdtemp(prefix="ckpt-core-tune-", dir=settings.root))
        try:
            with held.allowed():
                axes, notes = usable_axes(settings.axes, folder)
                settings = dataclasses.replace(settings, axes=axes)
                with contextlib.closing(_driver(settings, folder, notify)) as driver:
                    return _Run(settings, driver, notify, notes).report()
        finally:
            _remove(folder)


def _remove(folder: Path) -> None:
    """All of it, also what a program that was just ended has made meanwhile."""
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(_PAUSE_S)


def _driver(settings: TuneSettings, folder: Path, notify: Notify) -> Driver:
    if settings.command:
        return Program(folder, settings)
    assert settings.model_bytes is not None
    free = free_memory()
    if settings.model_bytes > free:
        raise ConfigError(
            f"model_bytes={size_text(settings.model_bytes)} does not fit into the free memory, "
            f"{size_text(free)}"
        )
    notify("making a state")
    # Only this form needs torch.
    from ckpt_core.tune.stand_in import Training

    return Training(folder, settings)


@dataclass
class _Run:
    """One run of the tuner, and what it has measured so far."""

    settings: TuneSettings
    driver: Driver
    notify: Notify
    notes: tuple[str, ...]
    timings: dict[tuning.Candidate, list[tuning.Timing]] = field(default_factory=dict)
    turns: int = 0

    def __post_init__(self) -> None:
        self._began_s = time.monotonic()

    def report(self) -> TuneReport:
        """Do it all."""
        settings = self.settings
        self.notify("a first look")
        facts = look(settings, self.driver)
        space = tuning.space_of(facts.limits, settings.axes)
        find = tuning.exhaustive if settings.exhaustive else tuning.search
        found = find(
            space,
            self._measure,
            start=space.nearest(defaults(facts.limits)),
            plan=tuning.Plan(rounds=settings.rounds, seed=settings.seed),
            enough=self._out_of_time,
        )
        load = self._load(facts, found)
        first = load.least_interval(settings.max_overhead).steps
        checks = self._checks(facts, found.best, first)
        return TuneReport(
            machine=describe(settings.root),
            limits=facts.limits,
            max_overhead=settings.max_overhead,
            candidates=len(space.candidates()),
            found=found,
            timings=self.timings,
            load=load,
            storage_every=tuning.Load(load.each_s, load.iteration_s)
            .least_interval(settings.max_overhead)
            .steps,
            every=_chosen(checks, first, settings.max_overhead),
            checks=checks,
            exhaustive=settings.exhaustive,
            seconds=time.monotonic() - self._began_s,
            problems=_problems(settings, load, checks, first),
            notes=(*self.notes, *facts.notes, *self._early(found)),
        )

    def _measure(self, candidate: tuning.Candidate) -> float:
        """One turn: seconds for each checkpoint, saving as often as there are iterations."""
        self.turns += 1
        self.notify(f"turn {self.turns}: {tuning.as_options(candidate)}")
        # Warm-up: files are made, and as many saves are under way as may be.
        warmups = candidate.in_flight + 1
        trace = self.driver.run(Turn(candidate, every=1, saves=warmups + self.settings.saves))
        timing = tuning.timing_of(trace, warmups=warmups)
        assert timing is not None, "a turn that is over has as many saves as it needs"
        self.timings.setdefault(candidate, []).append(timing)
        return timing.each_s

    def _out_of_time(self) -> bool:
        minutes = self.settings.minutes
        return minutes is not None and time.monotonic() - self._began_s > 60 * minutes

    def _early(self, found: tuning.Found) -> list[str]:
        if found.complete:
            return []
        return [f"the search was ended after {self.settings.minutes:g} minutes; not all was tried"]

    def _load(self, facts: Facts, found: tuning.Found) -> tuning.Load:
        """What the best one costs; the length of an iteration from between the saves, if need be."""
        iteration_s = facts.iteration_s
        if not iteration_s:
            seen = [t.clean_s for timings in self.timings.values() for t in timings if t.clean_s]
            if not seen:
                raise ConfigError(
                    "a save was under way beside every iteration of the program, so it is not known how "
                    "long one takes by itself: give --iteration-s, or let it save less often"
                )
            iteration_s = statistics.median(seen)
        each_s = statistics.median(found.finals[found.best])
        return tuning.Load(each_s, iteration_s, tuning.typical_loss_s(self.timings[found.best]))

    def _checks(
        self, facts: Facts, best: tuning.Candidate, first: int
    ) -> tuple[tuning.Checked, ...]:
        settings = self.settings
        possible = self.driver.chooses_interval and facts.tells_iterations
        if not possible or not settings.checks:
            return ()
        return find_interval(
            self.driver,
            best,
            first,
            max_overhead=settings.max_overhead,
            rounds=settings.checks,
            notify=self.notify,
        )


def _chosen(checks: tuple[tuning.Checked, ...], first: int, bound: float) -> int:
    """The interval to recommend: as checked, or as computed where nothing was."""
    if not checks:
        return first
    kept = tuning.kept_interval(checks, max_overhead=bound)
    return (kept or tuning.nearest_overhead(checks)).every


def _problems(
    settings: TuneSettings, load: tuning.Load, checks: tuple[tuning.Checked, ...], first: int
) -> tuple[str, ...]:
    """Limits that cannot be met, with the nearest that can."""
    bound, most = settings.max_overhead, settings.max_interval
    every = _chosen(checks, first, bound)
    problems = []
    if checks and tuning.kept_interval(checks, max_overhead=bound) is None:
        nearest = tuning.nearest_overhead(checks)
        problems.append(
            f"max_overhead={bound:g} was not met: the nearest was interval {nearest.every}, which cost "
            f"{nearest.overhead:.1%}; rounds differed by {nearest.spread:.1%}"
        )
    if most is not None and every > most:
        known = {checked.every: checked.overhead for checked in checks}
        cost = known.get(most, load.overhead_at(most))
        problems.append(
            f"max_interval={most} cannot be met within max_overhead={bound:g}: the smallest interval is "
            f"{every}; at {most} saves would cost about {cost:.1%}"
        )
    return tuple(problems)
