"""What a sampler's state holds, and the checks before any of it is taken for true."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_core.data.order import Position
from ckpt_core.errors import ConfigError

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
        for name in _NUMBERS:
            value = state.get(name)
            if type(value) is not int or (value < 0 and name != "seed"):
                raise ConfigError(
                    f"state of a sampler: {name}={value!r} is no count: it is damaged"
                )
        if type(state.get("shuffle")) is not bool or state["consumed"] > state["length"]:
            raise ConfigError(
                f"state of a sampler: {dict(state)!r} contradicts itself: it is damaged"
            )
        place = (state[name] for name in ("epoch", "consumed", "taken", "batches"))
        rest = (state[name] for name in ("seed", "shuffle", "length", "world_size", "order"))
        return cls(Position(*place), *rest)
