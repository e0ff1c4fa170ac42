"""What a sampler's state holds, and the checks before any of it is taken for true."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckpt_core.data.order import Position
from ckpt_core.errors import ConfigError
from ckpt_core.units import plain_int

VERSION = 1
_NUMBERS = ("epoch", "consumed", "taken", "batches", "seed", "length", "world_size", "order")


@dataclass(frozen=True, slots=True)
class Saved:
    """The state of a sampler. It is the same on every rank.

    Attributes:
        position: what has been consumed.
        seed: of the run.
        shuffle: whether epochs are shuffled.
        length: samples of the dataset.
        world_size: ranks that saved it; for messages alone.
        order: digest of the order of the position's epoch.
    """

    position: Position
    seed: int
    shuffle: bool
    length: int
    world_size: int
    order: int

    def encode(self) -> dict[str, Any]:
        """Plain values, for `state_dict`."""
        place = self.position
        return {
            "version": VERSION,
            "epoch": place.epoch,
            "consumed": place.consumed,
            "taken": place.taken,
            "batches": place.batches,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "length": self.length,
            "world_size": self.world_size,
            "order": self.order,
        }

    @classmethod
    def decode(cls, state: object) -> Saved:
        """The reverse.

        Raises:
            ConfigError: it is not the state of a sampler, or one of a later release.
        """
        version = state.get("version") if isinstance(state, Mapping) else None
        if not isinstance(state, Mapping) or version != VERSION:
            raise ConfigError(
                f"this is no state of a ResumableSampler or ResumableLoader that this release knows"
                f" (version {version!r}, known is {VERSION}): pass what their state_dict() returned"
            )
        found = {name: _saved_count(name, state.get(name)) for name in _NUMBERS}
        if "shuffle" not in state or found["consumed"] > found["length"]:
            raise ConfigError(
                f"state of a sampler: {dict(state)!r} contradicts itself: it is damaged"
            )
        place = Position(*(found[name] for name in ("epoch", "consumed", "taken", "batches")))
        rest = (found[name] for name in ("length", "world_size", "order"))
        return cls(place, found["seed"], yes_or_no("shuffle", state["shuffle"]), *rest)


def whole(name: str, value: object) -> int:
    """A number as a plain int: a sampler's state has no other.

    Raises:
        ConfigError: it is none, such as a bool or a float.
    """
    number = plain_int(value)
    if number is None:
        raise ConfigError(f"{name}={value!r} is no whole number: give an int")
    return number


def yes_or_no(name: str, value: object) -> bool:
    """As a plain bool what equals one, and None, which a DataLoader takes for False.

    Raises:
        ConfigError: it is something else.
    """
    with suppress(ValueError, RuntimeError):  # of arrays and tensors, of which it cannot be said
        if value in (None, False, True):
            return bool(value)
    raise ConfigError(f"{name}={value!r} is neither True nor False")


def _saved_count(name: str, value: object) -> int:
    """Also of NumPy's numbers, and of True as a seed or an epoch: they were saved as they had been given."""
    is_flag = isinstance(value, bool) and name in ("seed", "epoch")
    number = int(value is True) if is_flag else plain_int(value)
    if number is None or (number < 0 and name != "seed"):
        raise ConfigError(f"state of a sampler: {name}={value!r} is no count: it is damaged")
    return number
