"""Names that the format fixes: itself, its version and its files."""

from __future__ import annotations

import re

from ckpt_core.errors import ConfigError

FORMAT_NAME = "ckpt-core"
FORMAT_VERSION = 2
"""The newest version. Steps of one rank stay at version 1, which every release reads."""

SHARD_VERSION = "1"
"""What a shard's header says of itself; version 2 changed the manifests alone."""

MANIFEST_NAME = "manifest.json"

MAX_RANKS = 100_000
"""Ranks have five digits in file names."""

MAX_FILES = 100
"""Most shard files of one rank."""

_SHARD = re.compile(r"shard-([0-9]{5})-(0|[1-9][0-9]?)\.safetensors\Z")


def rank_manifest_name(rank: int) -> str:
    """File name of a rank's manifest, such as `rank-00000.json`.

    Raises:
        ConfigError: the rank has more than five digits or is negative.
    """
    return f"rank-{_checked_rank(rank):05d}.json"


def shard_name(rank: int, index: int) -> str:
    """File name of a rank's shard file, such as `shard-00000-0.safetensors`.

    Raises:
        ConfigError: rank or index is out of range.
    """
    if not 0 <= index < MAX_FILES:
        raise ConfigError(f"shard index {index} is out of range: it is 0 .. {MAX_FILES - 1}")
    return f"shard-{_checked_rank(rank):05d}-{index}.safetensors"


def parse_shard_name(name: str) -> tuple[int, int] | None:
    """`(rank, index)` of a shard file's name; None when it is none that `shard_name` gives."""
    match = _SHARD.match(name)
    return None if match is None else (int(match[1]), int(match[2]))


def _checked_rank(rank: int) -> int:
    if not 0 <= rank < MAX_RANKS:
        raise ConfigError(f"rank {rank} is out of range: ranks are 0 .. {MAX_RANKS - 1}")
    return rank
