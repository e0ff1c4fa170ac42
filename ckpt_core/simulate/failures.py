"""When a job is stopped, and when it may go on: at random, or as a trace of a cluster says."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ckpt_core.errors import ConfigError
from ckpt_core.simulate.costs import Kind, check

COLUMNS = ("index", "time", "GPUs")
_NEVER = float("inf")


class Stops(StrEnum):
    """Which changes of a trace stop the job."""

    ANY = "any"
    """Every change: an elastic job is also restarted for machines that come (PCcheck 5.2.3)."""
    LOSS = "loss"
    """Only when GPUs go."""


@dataclass(frozen=True, slots=True)
class Outage:
    """The job stops at `at_s`, and loses what `kind` says; from `back_s` on it may recover.

    `node` is the number of the one that is lost, where somebody wants to know.
    """

    at_s: float
    back_s: float
    kind: Kind = Kind.NODE
    node: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """GPUs that were there over time.

    Attributes:
        times_s: of each observation, ascending, the first one 0.
        gpus: at each of them.
    """

    times_s: tuple[float, ...]
    gpus: tuple[int, ...]

    @property
    def duration_s(self) -> float:
        """From the first observation to the last."""
        return self.times_s[-1]

    @property
    def changes(self) -> tuple[int, ...]:
        """Differences between neighbours that are not 0."""
        return tuple(b - a for a, b in itertools.pairwise(self.gpus) if a != b)

    def outages(self, *, stops: Stops = Stops.ANY, gpus: int = 0) -> Iterator[Outage]:
        """What the trace does to a job that needs `gpus` and does not run with fewer.

        Machines that go are lost as nodes are; for those that come it is the process that ends.
        """
        if self.gpus[0] < gpus:
            yield Outage(0.0, self._back(0, gpus))
        for k, (before, now) in enumerate(itertools.pairwise(self.gpus), start=1):
            if now < before or (now > before and stops is Stops.ANY):
                kind = Kind.NODE if now < before else Kind.PROCESS
                yield Outage(self.times_s[k], self._back(k, gpus), kind)

    def _back(self, k: int, gpus: int) -> float:
        later = zip(self.times_s[k:], self.gpus[k:], strict=True)
        return next((time_s for time_s, there in later if there >= gpus), _NEVER)


def parse_trace(lines: Iterable[str], *, name: str = "trace") -> Trace:
    """A trace from CSV: a heading, then index, time in seconds, number of GPUs in each row.

    Raises:
        ConfigError: a row is no such row, time goes back, or there are fewer than two.
    """
    times: list[float] = []
    gpus: list[int] = []
    for number, row in enumerate(csv.reader(lines), start=1):
        if number == 1 and not _is_number(row[1] if len(row) > 1 else ""):
            continue
        if len(row) != len(COLUMNS) or not (_is_number(row[1]) and _is_count(row[2])):
            raise ConfigError(f"{name}, line {number}: expected {', '.join(COLUMNS)}, got {row}")
        times.append(float(row[1]))
        gpus.append(int(row[2]))
        if len(times) > 1 and times[-1] <= times[-2]:
            raise ConfigError(f"{name}, line {number}: time must go up, and {row[1]} does not")
    if len(times) < 2:
        raise ConfigError(f"{name} has {len(times)} rows; a trace has at least two")
    return Trace(tuple(time - times[0] for time in times), tuple(gpus))


def _is_count(text: str) -> bool:
    # int() refuses ² and thousands of digits.
    return text.strip().isdecimal() and _is_number(text)


def _is_number(text: str) -> bool:
    try:
        value = float(text)
    except ValueError:
        return False
    return abs(value) < _NEVER


def exponential(mtbf_s: float, *, seed: int) -> Iterator[Outage]:
    """Failures without memory, endless: of a job whose mean time between failures is `mtbf_s`.

    For n nodes that fail independently and each stop the job, the job's is that of one node over n:
    the minimum of exponential times is exponential, so no node needs a clock of its own.

    Raises:
        ConfigError: `mtbf_s` is not above zero.
    """
    check("mtbf_s", mtbf_s, above=0.0)
    return _exponential(mtbf_s, random.Random(seed))


def _exponential(mtbf_s: float, dice: random.Random) -> Iterator[Outage]:
    at_s = 0.0
    while True:
        at_s += dice.expovariate(1 / mtbf_s)
        yield Outage(at_s, at_s)


def of_kinds(
    outages: Iterable[Outage], shares: Mapping[Kind, float], *, seed: int
) -> Iterator[Outage]:
    """The same outages with kinds drawn at random, each as often as its share says."""
    # Not the dice of `exponential`: with and without shares a job meets failures at the same times.
    dice = random.Random(f"kinds {seed}")
    kinds, weights = list(shares), list(shares.values())
    for outage in outages:
        (kind,) = dice.choices(kinds, weights)
        yield dataclasses.replace(outage, kind=kind)


def of_nodes(outages: Iterable[Outage], nodes: int, *, seed: int) -> Iterator[Outage]:
    """The same outages; those that take a node take any of so many, drawn at random."""
    dice = random.Random(f"nodes {seed}")
    for outage in outages:
        is_node = outage.kind is Kind.NODE
        yield dataclasses.replace(outage, node=dice.randrange(nodes)) if is_node else outage
