"""What a Checkpointer shows to a policy that measures."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_core.coordination import Coordination, Json
from ckpt_core.observe import EventLog
from ckpt_core.save.further import LevelGauge, NoLevels
from ckpt_core.save.journal import Stall
from ckpt_core.save.pipeline import Pipeline
from ckpt_core.save.plain import PlainSaves
from ckpt_core.types import Mode


@dataclass(frozen=True, slots=True)
class Gauges:
    """Read by `ckpt_core.policy.Auto`, on the training thread.

    Attributes:
        root: where steps are saved.
        events: what the engine tells.
        stall: time that training has lost to the engine.
    """

    root: Path
    events: EventLog
    stall: Stall
    _coordination: Coordination
    _pipeline: Pipeline
    _saves: PlainSaves
    _levels: NoLevels

    @property
    def in_flight(self) -> int:
        """Checkpoints that may be under way at once."""
        return self._pipeline.options.in_flight

    @property
    def rank(self) -> int:
        """Number of this process among those that save together."""
        return self._coordination.info.rank

    @property
    def world_size(self) -> int:
        """How many processes save together."""
        return self._coordination.info.world_size

    @property
    def mode(self) -> str:
        """How leaves were staged last: "host", "device" or "direct"; before the first save, what is set."""
        return str(self._saves.mode_used)

    @property
    def every(self) -> dict[str, int]:
        """Of which steps each further level takes the multiples, by its URL."""
        return {level.url: level.every for level in self._pipeline.options.further}

    def modes(self, state_bytes: int) -> tuple[str, ...]:
        """The ways of staging that could be used for so much state; none where there is no choice.

        Source: CheckFreq (FAST '21) section 4.2: on the device if its memory has room, else on the host.
        """
        devices = self._pipeline.devices
        if Mode(self._pipeline.options.mode) is not Mode.AUTO or not devices.in_use():
            return ()
        if not devices.has_room(state_bytes):
            return ()
        return (str(Mode.DEVICE), str(Mode.HOST))

    def prefer(self, mode: str) -> None:
        """Stage in this way from the next save on; the mode that `Options` name goes before."""
        if Mode(self._pipeline.options.mode) is Mode.AUTO:
            self._saves.prefer(Mode(mode))

    def levels(self) -> tuple[LevelGauge, ...]:
        """How far each further level is, in their order."""
        return self._levels.gauges()

    def headroom_bytes(self) -> int | None:
        """Free memory of the current device; None without one."""
        devices = self._pipeline.devices
        return devices.free_bytes() if devices.in_use() else None

    def machine(self) -> dict[str, Any]:
        """What measured numbers belong to, besides the model: machine, ranks, settings."""
        options, devices = self._pipeline.options, self._pipeline.devices
        return {
            "host": platform.node(),
            "cpus": os.cpu_count(),
            "device": devices.name() if devices.in_use() else None,
            "ranks": self.world_size,
            "in_flight": options.in_flight,
            "writers": options.writers,
            "chunk_bytes": options.chunk_size,
            "staging_bytes": options.staging_bytes,
            "mode": str(options.mode),
            "direct_io": str(options.direct_io),
            "pipelined": options.pipelined,
            "blocking": options.blocking,
        }

    def of_first_rank(self, topic: str, value: Json) -> Json:
        """The value that the first rank gives; all ranks call it the same number of times for a topic.

        Raises:
            CoordinationTimeout: a rank did not call it within `timeout`, or is dead.
            CommitError: the ranks cannot reach each other.
        """
        if self.world_size == 1:
            return value
        timeout_s = self._pipeline.options.timeout_s
        return self._coordination.gather(topic, value, timeout_s)[0]
