"""Published strategies as settings of this engine, so that one code base can compare them.

`Options.preset(name)` applies one. What a preset cannot imitate is said beside it; docs/presets.md says more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ckpt_core.errors import ConfigError
from ckpt_core.types import DirectIO, Mode


@dataclass(frozen=True, slots=True)
class Preset:
    """One strategy.

    Attributes:
        name: of the strategy.
        is_: what it is, in a line.
        cannot: what of the published one these settings do not imitate; empty when there is nothing.
        fields: settings that differ from the defaults of `Options`.
    """

    name: str
    is_: str
    cannot: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


_ALL = (
    Preset("default", "ckpt-core as it is."),
    Preset(
        "checkfreq",
        "CheckFreq (FAST '21): one checkpoint at a time, snapshot() first, then persist().",
        "serialization by torch.save: bytes go raw to their places in the file.",
        {
            "in_flight": 1,
            "writers": 1,
            "mode": Mode.AUTO,
            "pipelined": False,
            "direct_io": DirectIO.OFF,
            "checksum": False,
        },
    ),
    Preset(
        "gpm",
        "GPM (ASPLOS '22) as PCcheck 5.1 runs it: training stops until the mapped file is synced.",
        "kernels of the GPU that store through UVA: bytes go through the CPU.",
        {
            "in_flight": 1,
            "writers": 1,
            "mode": Mode.DIRECT,
            "blocking": True,
            "checksum": False,
        },
    ),
    Preset(
        "lightcheck",
        "LightCheck-D (ICCD '23) III-A: one checkpoint at a time, copied behind training into a mapped file.",
        "DDIO switched off; begin, stage, seal go layer by layer, but through chunks.",
        {"in_flight": 1, "writers": 1, "mode": Mode.DIRECT, "checksum": False},
    ),
    Preset(
        "pccheck",
        "PCcheck (ASPLOS '25) 3.1: N = 2 checkpoints at once, p = 3 threads for each, pipelined chunks.",
        "p threads for each: these 6 are shared. Its 2 m of DRAM depend on m: give staging_bytes.",
        {"in_flight": 2, "writers": 6, "mode": Mode.HOST, "checksum": False},
    ),
    Preset(
        "deepfreeze",
        "DeepFreeze (CCGRID '20) IV-A: a local copy behind training, in pieces, through the page cache.",
        "further levels of storage; copies inside back-propagation (begin, stage, seal make them).",
        {
            "in_flight": 1,
            "writers": 1,
            "mode": Mode.HOST,
            "direct_io": DirectIO.OFF,
            "checksum": False,
        },
    ),
)

PRESETS: Mapping[str, Preset] = MappingProxyType({preset.name: preset for preset in _ALL})


def preset_fields(name: object) -> dict[str, Any]:
    """The settings of one preset.

    Raises:
        ConfigError: no preset has this name.
    """
    # Text from a configuration file may be anything, a list among them.
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"preset={name!r} is unknown: choose one of {', '.join(PRESETS)}")
    return dict(PRESETS[name].fields)
