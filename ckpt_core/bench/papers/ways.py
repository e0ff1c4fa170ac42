"""The ways that are compared: a preset of the engine and what is changed in it. Pure: needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

IDEAL = "ideal"
"""Training without checkpoints; always runs, since the others are compared with it."""

TORCH = "torch_save_fsync"
PRESETS = ("checkfreq", "gpm", "lightcheck", "pccheck", "deepfreeze", "default")
NAMES = (*PRESETS, TORCH)
_TITLES = {
    "checkfreq": "CheckFreq",
    "gpm": "GPM",
    "lightcheck": "LightCheck",
    "pccheck": "PCcheck",
    "deepfreeze": "DeepFreeze",
    "default": "ckpt-core",
    TORCH: "torch.save + fsync",
    IDEAL: "no saves",
}
_BREAKS = re.compile(r"(, |: | / )")
_THREADS = 3
"""Writers of one checkpoint in PCcheck (its preset has 3 for each of 2)."""

_DRAM_STATES = 2.0
"""Staging memory of PCcheck in sizes of the state (section 5.2.1)."""

_LEAST_CHUNKS = 4
"""Of staging memory for PCcheck's 2 checkpoints: a front and another one for each; less is cut finer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to save.

    Attributes:
        line: what the points of a figure that belong together are called.
        contender: a preset, `TORCH` or `IDEAL`.
        at: where its point lies on the axis of the figure, for figures over something else than
            intervals or sizes.
        changes: fields of `Options` that win over the preset.
        staging_states: staging memory in sizes of a shard; None leaves the engine's default.
        chunks: into how many chunks a checkpoint is cut; 0 leaves the preset's chunks.
        in_memory: writes to the filesystem in memory instead of the disk.
        barrier_at_once: training waits for the snapshot right behind the save.
    """

    line: str
    contender: str
    at: float | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    staging_states: float | None = None
    chunks: int = 0
    in_memory: bool = False
    barrier_at_once: bool = False

    @property
    def name(self) -> str:
        """Tells it from all others of its part."""
        return self.line if self.at is None else f"{self.line} at {self.at:g}"

    @property
    def in_flight(self) -> int:
        """Checkpoints that may be under way, at most: presets have 1 or 2."""
        return int(self.changes.get("in_flight", 2))

    def to_json(self) -> dict[str, Any]:
        """For the process that does it."""
        return asdict(self)


def title(line: str) -> str:
    """What people call a line of a figure, or of a comparison: names of contenders become titles."""
    parts = _BREAKS.split(line)
    return "".join(_TITLES.get(part, part) for part in parts)


def all_contenders() -> tuple[Way, ...]:
    """Every preset as it is, and torch.save."""
    return tuple(of_contender(name) for name in NAMES)


def of_contender(name: str, *, line: str | None = None, in_memory: bool = False) -> Way:
    """A preset as its paper sets it up."""
    states = _DRAM_STATES if name == "pccheck" else None
    return Way(line=line or name, contender=name, staging_states=states, in_memory=in_memory)


def numbers_in_flight(numbers: Sequence[int]) -> tuple[Way, ...]:
    """PCcheck with N checkpoints under way, 3 writers for each."""
    return tuple(_pccheck(f"N = {n}", n, _THREADS) for n in numbers)


def numbers_of_writers(in_flight: Sequence[int], threads: Sequence[int]) -> tuple[Way, ...]:
    """PCcheck with N checkpoints under way and p writers for each."""
    return tuple(_pccheck(f"N = {n}", n, p, at=p) for n in in_flight for p in threads)


def sizes_of_memory(states: Sequence[float], chunks: Sequence[int]) -> tuple[Way, ...]:
    """PCcheck with less DRAM: not pipelined in the finest chunks, and pipelined in x of them.

    Points that have not enough chunks are left out: the engine would cut them finer.
    """
    finest = max(chunks)
    forms = [("not pipelined", finest, False), *((f"{x} chunks", x, True) for x in chunks)]
    return tuple(
        Way(
            line=line,
            contender="pccheck",
            at=size,
            changes={"pipelined": pipelined},
            staging_states=size,
            chunks=x,
        )
        for line, x, pipelined in forms
        for size in states
        if size * x >= _LEAST_CHUNKS
    )


def placed() -> tuple[Way, ...]:
    """LightCheck's table I: in memory, on disk, and the others on disk."""
    return (
        of_contender("lightcheck", line="lightcheck, memory", in_memory=True),
        of_contender("lightcheck", line="lightcheck, disk"),
        of_contender("checkfreq"),
        of_contender(TORCH),
    )


def layouts() -> tuple[Way, ...]:
    """LightCheck's figure 11: tensors apart from what describes them, and entry by entry."""
    return tuple(
        of_contender(name, line=f"{what}, {place}", in_memory=place == "memory")
        for place in ("memory", "disk")
        for what, name in (("separated", "lightcheck"), ("entry by entry", TORCH))
    )


def steps() -> tuple[Way, ...]:
    """CheckFreq's phases, one after the other put behind training; then ours."""
    return (
        Way(line="1 synchronous", contender="checkfreq", changes={"blocking": True}),
        Way(line="2 persist behind training", contender="checkfreq", barrier_at_once=True),
        Way(line="3 snapshot too (CheckFreq)", contender="checkfreq"),
        Way(line="4 pipelined, 2 in flight (ours)", contender="default"),
    )


def _pccheck(line: str, in_flight: int, threads: int, at: float | None = None) -> Way:
    return Way(
        line=line,
        contender="pccheck",
        at=at,
        changes={"in_flight": in_flight, "writers": in_flight * threads},
        staging_states=_DRAM_STATES,
    )
