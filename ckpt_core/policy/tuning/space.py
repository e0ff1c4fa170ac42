"""Which settings may be tried: the axes, and what the user's limits leave of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ckpt_core.errors import ConfigError
from ckpt_core.types import DirectIO
from ckpt_core.units import ALIGN_BYTES, align_up

AXES = ("in_flight", "writers", "chunk_bytes", "staging_bytes", "direct_io")

_MIB = 2**20
_IN_FLIGHT = (1, 2, 3, 4)
_WRITERS = (1, 2, 4, 8, 16)
_CHUNKS = tuple(size * _MIB for size in (1, 2, 4, 8, 16, 32, 64))
_STAGING_PARTS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0)
# Not "on": it does the same as "auto", or fails.
_DIRECT = (DirectIO.AUTO.value, DirectIO.OFF.value)
_DIRECT_PRICES = {DirectIO.AUTO.value: 0, DirectIO.ON.value: 1, DirectIO.OFF.value: 2}


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """Settings that are tried together: five fields of `Options`, sizes in bytes, `direct_io` by its text."""

    in_flight: int
    writers: int
    chunk_bytes: int
    staging_bytes: int
    direct_io: str = DirectIO.AUTO.value

    @property
    def price(self) -> tuple[int, ...]:
        """What it takes from the user, for a choice between equally fast ones: the lower the better.

        Memory first; then places in flight, since each takes storage and lengthens what a failure
        loses (PCcheck, equation 4); then direct writes, which leave in the page cache what others use.
        """
        direct = _DIRECT_PRICES[self.direct_io]
        return (self.staging_bytes, self.in_flight, direct, self.writers, self.chunk_bytes)


@dataclass(frozen=True, slots=True)
class Limits:
    """What checkpoints may take.

    Attributes:
        rank_bytes: what one rank stores of a step: m where there is one rank.
        step_bytes: what all ranks of one root store of a step.
        memory_bytes: most staging memory of one rank.
        storage_bytes: most storage of the root.
        keep_last: committed steps that are kept.
    """

    rank_bytes: int
    step_bytes: int
    memory_bytes: int
    storage_bytes: int
    keep_last: int

    def storage_of(self, in_flight: int) -> int:
        """Storage that a root comes to: PCcheck's (N + 1) m, with `keep_last` steps instead of one."""
        return (in_flight + self.keep_last + 1) * self.step_bytes


@dataclass(frozen=True, slots=True)
class Axes:
    """Values to try, ascending, `direct_io` by its price; the user's own, or what `default_axes` gives."""

    in_flight: tuple[int, ...] = ()
    writers: tuple[int, ...] = ()
    chunk_bytes: tuple[int, ...] = ()
    staging_bytes: tuple[int, ...] = ()
    direct_io: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Space:
    """The candidates within the limits; at least one. Made by `space_of`."""

    axes: Axes
    limits: Limits

    def holds(self, candidate: Candidate) -> bool:
        """Whether it keeps the limits and differs in effect from every other candidate.

        The pool needs two chunks for each save in flight, else it cuts chunks smaller than asked for;
        more memory than all saves in flight together need is never used.
        """
        limits, needed = self.limits, 2 * candidate.in_flight * candidate.chunk_bytes
        room = candidate.in_flight * limits.rank_bytes
        of_use = [size for size in self.axes.staging_bytes if needed <= size < room]
        rest = [size for size in self.axes.staging_bytes if size >= max(room, needed)]
        return (
            candidate.staging_bytes in (*of_use, *rest[:1])
            and candidate.staging_bytes <= limits.memory_bytes
            and limits.storage_of(candidate.in_flight) <= limits.storage_bytes
        )

    def candidates(self) -> list[Candidate]:
        """All of them, ascending."""
        values = [getattr(self.axes, axis) for axis in AXES]
        return [
            c for c in itertools.starmap(Candidate, itertools.product(*values)) if self.holds(c)
        ]

    def line(self, origin: Candidate, axis: str) -> list[Candidate]:
        """The candidates that differ from `origin` in one axis, `origin` among them, ascending.

        Where a value needs more or less staging memory than `origin` has, it comes with the nearest
        size that does: limits that join two axes must not end a search along one of them.
        """
        moved = (self.fitting(origin, axis, value) for value in getattr(self.axes, axis))
        return [candidate for candidate in moved if candidate is not None]

    def beside(self, origin: Candidate, axis: str) -> list[Candidate]:
        """`origin` and its neighbours along one axis."""
        line = self.line(origin, axis)
        values = [getattr(candidate, axis) for candidate in line]
        at = values.index(getattr(origin, axis))
        return line[max(at - 1, 0) : at + 2]

    def fitting(self, origin: Candidate, axis: str, value: int | str) -> Candidate | None:
        """`origin` with another value on one axis, and the nearest staging memory that goes with it."""
        changed: dict[str, Any] = {axis: value}
        moved = dataclasses.replace(origin, **changed)
        if axis == "staging_bytes":
            return moved if self.holds(moved) else None
        sizes = sorted(self.axes.staging_bytes, key=lambda size: abs(size - origin.staging_bytes))
        tried = (dataclasses.replace(moved, staging_bytes=size) for size in sizes)
        return next(filter(self.holds, tried), None)

    def nearest(self, wished: Candidate) -> Candidate:
        """The candidate next to `wished`, which need not be in the space."""

        def distance(candidate: Candidate) -> tuple[int, ...]:
            return tuple(
                abs(_rank(self.axes, axis, candidate) - _rank(self.axes, axis, wished))
                for axis in AXES
            )

        return min(self.candidates(), key=lambda c: (sum(distance(c)), distance(c), c))


def _rank(axes: Axes, axis: str, candidate: Candidate) -> int:
    """Place of the candidate's value among those of its axis."""
    value = _order(getattr(candidate, axis))
    return sum(_order(other) < value for other in getattr(axes, axis))


def _order(value: int | str) -> int:
    return _DIRECT_PRICES[value] if isinstance(value, str) else value


def default_axes(limits: Limits) -> Axes:
    """What is worth trying for a state of that size. PCcheck 5.4: N up to 4, few writers, m/2 .. 2 m."""
    size = align_up(limits.rank_bytes, ALIGN_BYTES)
    chunks = [chunk for chunk in _CHUNKS if 2 * chunk <= size] or [
        align_up(max(size // 2, 1), ALIGN_BYTES)
    ]
    # Whole MiB, where that changes little, are easier to read.
    unit = _MIB if size >= 64 * _MIB else ALIGN_BYTES
    staging = {align_up(int(size * part), unit) for part in _STAGING_PARTS}
    within = {size for size in staging if size <= limits.memory_bytes}
    if within != staging and limits.memory_bytes > 0:
        within.add(limits.memory_bytes)
    return Axes(_IN_FLIGHT, _WRITERS, tuple(chunks), tuple(sorted(within)), _DIRECT)


def space_of(limits: Limits, wished: Axes | None = None) -> Space:
    """The space within the limits, with the user's own values where they are given.

    Raises:
        ConfigError: nothing is left; names the limit, and the nearest that would do.
    """
    wished = wished or Axes()
    given = {axis: tuple(sorted(set(getattr(wished, axis)), key=_order)) for axis in AXES}
    # As the engine rounds them: two sizes that come to the same are one.
    given["chunk_bytes"] = tuple(sorted({align_up(c, ALIGN_BYTES) for c in given["chunk_bytes"]}))
    defaults = default_axes(limits)
    axes = Axes(**{axis: given[axis] or getattr(defaults, axis) for axis in AXES})
    space = Space(axes, limits)
    if not space.candidates():
        _explain(space)
    return space


def _explain(space: Space) -> None:
    """Raise for the limit that leaves no candidate."""
    limits, axes = space.limits, space.axes
    least_n = min(axes.in_flight)
    storage = limits.storage_of(least_n)
    if storage > limits.storage_bytes:
        text = (
            f"{least_n} in flight + {limits.keep_last} kept + 1, of {_mb(limits.step_bytes)} each"
        )
        nearest = f"give at least {_mb(storage)}"
        if limits.keep_last > 1:
            alone = (least_n + 2) * limits.step_bytes
            nearest += f", or keep fewer steps (with --keep-last 1: {_mb(alone)})"
        raise ConfigError(
            f"max_storage={_mb(limits.storage_bytes)} is too small: {text} take {_mb(storage)}; {nearest}"
        )
    memory = 2 * least_n * min(axes.chunk_bytes)
    least = max(memory, min(axes.staging_bytes, default=0))
    if least > limits.memory_bytes:
        raise ConfigError(
            f"max_memory={_mb(limits.memory_bytes)} is too small: {least_n} in flight with chunks of "
            f"{_mb(min(axes.chunk_bytes))} need {_mb(least)} of staging memory; give at least that, or "
            f"smaller sizes with --chunk-bytes and --staging-bytes"
        )
    raise ConfigError(
        f"no choice of the given values fits: staging_bytes={_list(axes.staging_bytes)} must hold two "
        f"chunks ({_list(axes.chunk_bytes)}) for each of {least_n} in flight: at least {_mb(memory)}"
    )


def _list(sizes: Iterable[int]) -> str:
    return ", ".join(_mb(size) for size in sizes)


def _mb(size: int) -> str:
    """A size as it can be given again on the command line; never less than it is."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "KB")):
        if size >= unit:
            return f"{-(-size * 100 // unit) / 100:g}{name}"
    return f"{size}B"


Measure = Callable[[Candidate], float]
"""One turn of a candidate: seconds for each checkpoint, the lower the better."""
