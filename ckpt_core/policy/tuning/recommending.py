"""What a search says to its user: settings ready to paste, and how sure they are. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_core.policy.tuning.search import Found
from ckpt_core.policy.tuning.space import Candidate
from ckpt_core.units import ALIGN_BYTES

_PREFIX = "CKPT_CORE_"
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def as_values(candidate: Candidate) -> dict[str, int | str]:
    """Fields of `Options`, by name."""
    return dataclasses.asdict(candidate)


def as_options(candidate: Candidate) -> str:
    """An expression to paste: `Options(in_flight=2, ..., chunk_bytes="8MiB", ..., direct_io="auto")`."""
    parts = [f"{name}={_literal(name, value)}" for name, value in as_values(candidate).items()]
    return f"Options({', '.join(parts)})"


def as_environment(candidate: Candidate) -> list[str]:
    """Lines for `Options.from_env()`: `CKPT_CORE_IN_FLIGHT=2`."""
    return [
        f"{_PREFIX}{name.upper()}={_text(name, value)}"
        for name, value in as_values(candidate).items()
    ]


def size_value(size: int) -> str:
    """A size that parses back to itself, short where it is round: `8MiB`, `4100096`."""
    for unit, name in _UNITS:
        if size % unit == 0 and size >= unit and (unit > ALIGN_BYTES or size < 2**20):
            return f"{size // unit}{name}"
    return str(size)


def _literal(name: str, value: int | str) -> str:
    text = _text(name, value)
    if not text.isdigit():
        return f'"{text}"'
    return f"{value:_}" if name.endswith("_bytes") else text


def _text(name: str, value: int | str) -> str:
    return size_value(int(value)) if name.endswith("_bytes") else str(value)


@dataclass(frozen=True, slots=True)
class Sureness:
    """How clearly the recommended candidate was the fastest, from the finals alone.

    Attributes:
        median_s, least_s, most_s: seconds for each checkpoint, over the rounds.
        spread: (most - least) / median.
        rival: the next one, None if there was no other finalist.
        ahead: by what part the rival's median is above; below zero where a cheaper one was preferred.
        wins: rounds in which the recommended one was faster than the rival.
        rounds: of the finals.
        gain: how many times as fast as the start it is, by medians.
    """

    median_s: float
    least_s: float
    most_s: float
    spread: float
    rival: Candidate | None
    ahead: float
    wins: int
    rounds: int
    gain: float

    @property
    def clear(self) -> bool:
        """Whether it won against its rival in at least four rounds of five."""
        return self.rival is None or self.wins * 5 >= self.rounds * 4


def sureness_of(found: Found) -> Sureness:
    """From the finals of a search."""
    mine = found.finals[found.best]
    median = statistics.median(mine)
    medians = {c: statistics.median(values) for c, values in found.finals.items()}
    rival = min((c for c in medians if c != found.best), key=medians.__getitem__, default=None)
    theirs: Sequence[float] = found.finals[rival] if rival is not None else ()
    return Sureness(
        median_s=median,
        least_s=min(mine),
        most_s=max(mine),
        spread=(max(mine) - min(mine)) / median if median else 0.0,
        rival=rival,
        ahead=medians[rival] / median - 1 if rival is not None and median else 0.0,
        wins=sum(one < other for one, other in zip(mine, theirs, strict=False)),
        rounds=len(mine),
        gain=medians[found.start] / median if median else 1.0,
    )
