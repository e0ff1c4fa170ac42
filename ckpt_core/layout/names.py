"""Names that the format fixes: itself, its version and its files."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckpt_core.errors import ConfigError
from ckpt_core.types import parse_step_dir

FORMAT_NAME = "ckpt-core"
FORMAT_VERSION = 3
"""The newest version. Steps of one rank stay at version 1, which every release reads, those of several
at version 2; version 3 is for directories of files."""

SHARD_VERSION = "1"
"""What a shard's header says of itself; version 2 changed the manifests alone."""

MANIFEST_NAME = "manifest.json"

RUN_NAME = "run.json"
"""At a level: which run it belongs to."""

MAX_RANKS = 100_000
"""Ranks have five digits in file names."""

MAX_FILES = 100
"""Most shard files of one rank."""

MAX_NAMED_FILES = 10_000
"""Most files of one rank in a directory of files."""

MAX_PART_BYTES = 200
"""Longest name between two slashes: filesystems have 255, and repair puts some of its own around it."""

MAX_PATH_BYTES = 1000

_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")
_MANIFESTS = re.compile(r"manifest\.json|rank-[^/]*\.json")
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


def is_directory_name(name: object) -> bool:
    """Whether a directory of files may be called so: one plain name, not hidden, and none of a step.

    Nor that of what a filesystem has for itself, and lets nobody read, where a root is the whole of a disk.
    """
    if not isinstance(name, str) or name == "lost+found":
        return False
    return _is_part(name) and parse_step_dir(name) is None


def is_file_name(name: object) -> bool:
    """Whether a file in a directory of files may be called so: a relative path of plain names.

    None of them is hidden, and the whole is no name of a manifest.
    """
    if not isinstance(name, str) or _MANIFESTS.fullmatch(name) is not None:
        return False
    return all(map(_is_part, name.split("/"))) and len(name.encode()) <= MAX_PATH_BYTES


def parents_of(names: Iterable[str]) -> set[str]:
    """Every directory that these files lie in, "" aside."""
    found: set[str] = set()
    for name in names:
        parts = name.split("/")
        found |= {"/".join(parts[:count]) for count in range(1, len(parts))}
    return found


def _is_part(name: str) -> bool:
    if not name or name[0] == "." or name != name.strip() or _CONTROLS.search(name) or "/" in name:
        return False
    try:
        return len(name.encode()) <= MAX_PART_BYTES
    except UnicodeEncodeError:
        return False


def _checked_rank(rank: int) -> int:
    if not 0 <= rank < MAX_RANKS:
        raise ConfigError(f"rank {rank} is out of range: ranks are 0 .. {MAX_RANKS - 1}")
    return rank
