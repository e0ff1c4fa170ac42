"""What is known before the search: how much is saved, how long an iteration takes, what may be used."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from ckpt_core.errors import ConfigError
from ckpt_core.options import Options
from ckpt_core.policy import tuning
from ckpt_core.system.files import Files
from ckpt_core.system.memory_limit import free_memory
from ckpt_core.tune.driver import NEVER, Driver, Turn
from ckpt_core.tune.program import Program
from ckpt_core.tune.settings import EVERY_MARK, TuneSettings
from ckpt_core.types import DirectIO

_FIRST_SAVES = 3
_SMALL = 2**20
BASE_ITERATIONS = 10
SKIPPED = 2
"""First iterations, which are slower for reasons of their own."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Found by a first look.

    Attributes:
        limits: what may be used.
        iteration_s: one iteration without saves; 0: not known yet.
        tells_iterations: they can be seen, and so an interval can be tried out.
        notes: what else to know.
    """

    limits: tuning.Limits
    iteration_s: float
    tells_iterations: bool
    notes: tuple[str, ...] = ()


def look(settings: TuneSettings, driver: Driver) -> Facts:
    """One short turn with saves, and one without where the driver can.

    Raises:
        ConfigError: the program tells nothing, or its iterations cannot be told apart.
    """
    if not isinstance(driver, Program):
        assert settings.model_bytes is not None
        limits = _limits(settings, settings.model_bytes, settings.model_bytes, settings.keep_last)
        return Facts(limits, mean_iteration_s(driver, _smallest(limits)), tells_iterations=True)
    trace = driver.run(Turn(None, every=1, saves=_FIRST_SAVES))
    events, notes = driver.last, []
    keep_last = events.options.get("keep_last")
    if keep_last is None:
        keep_last = settings.keep_last
        notes.append(f"the program keeps all steps; storage is counted for keep_last={keep_last}")
    sizes = events.nbytes.values()
    limits = _limits(settings, max(sizes), sum(sizes), keep_last)
    iteration_s = settings.iteration_s or 0.0
    if not trace.iterations and not iteration_s:
        raise ConfigError(
            "the iterations of the program cannot be told apart, since its optimizer does not step, "
            "and it does not call wait_staged(), the same number of times in each: give --iteration-s"
        )
    if not iteration_s and driver.chooses_interval:
        iteration_s = mean_iteration_s(driver, None)
    if not driver.chooses_interval:
        notes.append(f"the interval was not tried out: {EVERY_MARK} in the command would allow it")
    return Facts(limits, iteration_s, bool(trace.iterations), tuple(notes))


def defaults(limits: tuning.Limits) -> tuning.Candidate:
    """What the engine takes without being told, within the limits on memory."""
    options = Options()
    staging = min(2 * limits.rank_bytes, limits.memory_bytes)
    direct_io = DirectIO(options.direct_io).value
    return tuning.Candidate(
        options.in_flight, options.writers, options.chunk_size, staging, direct_io
    )


def mean_iteration_s(driver: Driver, candidate: tuning.Candidate | None) -> float:
    """One iteration of training without saves."""
    turn = Turn(candidate, every=NEVER, iterations=BASE_ITERATIONS + SKIPPED)
    return mean_of(driver.run(turn), SKIPPED)


def mean_of(trace: tuning.Trace, skipped: int) -> float:
    """Mean iteration after the first `skipped`.

    Raises:
        ConfigError: there is none.
    """
    lengths = [end - begin for begin, end in trace.iterations[skipped:]]
    if not lengths:
        raise ConfigError("the program told of no iteration without saves: give --iteration-s")
    return statistics.fmean(lengths)


def _smallest(limits: tuning.Limits) -> tuning.Candidate:
    """Staging memory that is never used need not be large."""
    return tuning.Candidate(1, 1, _SMALL, max(limits.rank_bytes // 8, 4 * _SMALL))


def _limits(
    settings: TuneSettings, rank_bytes: int, step_bytes: int, keep_last: int
) -> tuning.Limits:
    """What the user allows, as far as it is there."""
    free = Files().free_bytes(settings.root)
    storage = settings.max_storage_bytes
    memory = settings.max_memory_bytes
    available = free_memory()
    return tuning.Limits(
        rank_bytes=rank_bytes,
        step_bytes=step_bytes,
        memory_bytes=available // 4 if memory is None else min(memory, available),
        storage_bytes=free * 9 // 10 if storage is None else min(storage, free),
        keep_last=keep_last,
    )
