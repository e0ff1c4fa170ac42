"""Plain values that travel between layers: modes, names of steps, specs of leaves, ranks."""

from __future__ import annotations

import operator
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import repeat
from typing import TypeVar

from ckpt_core.errors import ConfigError

RAISED_TO_CALLER = "this rank did not save, and has told its caller: "
"""Begins what the others hear of an error that this rank has raised: their callers need not be told."""

_T = TypeVar("_T")

_STEP_DIR = re.compile(r"step-(\d{12,18})\Z")


class Mode(StrEnum):
    """How a snapshot leaves the way of training (LightCheck's strategies C, G and D)."""

    AUTO = "auto"
    HOST = "host"
    DEVICE = "device"
    DIRECT = "direct"


class DirectIO(StrEnum):
    """Whether shard files are written past the page cache."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class OnError(StrEnum):
    """What the next save does about a failure in the background."""

    RAISE = "raise"
    WARN = "warn"


def check_step(step: object) -> int:
    """`step` as an int in 0 .. 10**18-1.

    Raises:
        ConfigError: it is not an integer, or out of range.
    """
    try:
        number = int(operator.index(step))  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as exc:
        raise _no_step(step) from exc
    if isinstance(step, bool):
        raise _no_step(step)
    if not 0 <= number < 10**18:
        raise ConfigError(f"step={number} is out of range: steps are 0 .. 10**18-1")
    return number


def _no_step(step: object) -> ConfigError:
    return ConfigError(f"step={step!r} is not an integer: pass the optimizer step, counted from 0")


def step_dir_name(step: int) -> str:
    """Name of the directory of a committed step, such as `step-000000000120`."""
    return f"step-{step:012d}"


def parse_step_dir(name: str) -> int | None:
    """The step of a directory name, or None when it is not one that `step_dir_name` gives."""
    match = _STEP_DIR.match(name)
    if match is None or step_dir_name(int(match[1])) != name:
        return None
    return int(match[1])


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """What a leaf is, without its bytes.

    Attributes:
        name: unique in its checkpoint; the dotted path of its first place in the state tree.
        dtype: torch's name without the prefix, such as "float32" or "float8_e4m3fn".
        shape: logical shape; the bytes lie in row-major order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A box of a leaf: along dimension d, elements `offsets[d]` to `offsets[d] + sizes[d]`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """A rank's part of a leaf that several ranks store together.

    Attributes:
        begin: first byte, counted in the row-major bytes of `block`, or of the whole leaf.
        nbytes: how many bytes from there.
        block: the box of the leaf that the bytes lie in; None for the whole leaf.
    """

    begin: int
    nbytes: int
    block: Block | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the local part of a distributed tensor lies in the whole.

    Attributes:
        shape: of the whole tensor.
        block: the box that this rank holds; of the shape of the local tensor.
        replica: which of `replicas` ranks that hold this very box this rank is.
        replicas: how many they are.
        kind: mesh and placements as text, the same on every rank.
        begin: which row-major element of the block the local part begins with, if it is a run of them; None:
            it is the block.
        ranks: of the mesh that the tensor is on, with all that it is a part of; None: it is on none.
    """

    shape: tuple[int, ...]
    block: Block
    replica: int
    replicas: int
    kind: str
    begin: int | None = None
    ranks: int | None = None

    @property
    def is_divided(self) -> bool:
        """Whether other ranks hold other parts; the same on every rank, also where one holds all elements."""
        return self.replicas != self.ranks


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a save of named files goes, when it does not become a step.

    Attributes:
        directory: its name in the root.
        pointer: the file in the root that names it then; None: no file does.
        order: counts such saves of this process, in the order in which they began.
        replaces: names, with wildcards, of files that go with an earlier directory of that name, where all
            others are kept; None: all go.
    """

    directory: str
    pointer: str | None = None
    order: int = 0
    replaces: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Which of how many processes save together.

    Attributes:
        rank: of this process.
        world_size: number of processes.
        group: ranks that write to the same root as this one, ascending; the first one leads: it alone
            locks, repairs, publishes and retires there. None: all ranks.
        neighbours: how many of them run on this machine, this one included, and share its memory.
    """

    rank: int = 0
    world_size: int = 1
    group: tuple[int, ...] | None = None
    neighbours: int = 1

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that share this rank's root."""
        return tuple(range(self.world_size)) if self.group is None else self.group

    @property
    def leads(self) -> bool:
        """Whether this rank leads those that share its root."""
        return self.members[0] == self.rank


def build_many(cls: type[_T], *columns: Iterable[object]) -> list[_T]:
    """One `cls` (a slots dataclass) for each row of the columns, in the order of its fields.

    Sets the slots directly: a state is planned on the training thread, and ten thousand calls of a
    frozen dataclass's `__init__` would cost more than everything else that is done for it.
    """
    first = list(columns[0])
    made = list(map(object.__new__, repeat(cls, len(first))))
    slots = [getattr(cls, name) for name in cls.__dict__["__slots__"]]
    for slot, column in zip(slots, (first, *columns[1:]), strict=True):
        deque(map(slot.__set__, made, column), maxlen=0)
    return made
