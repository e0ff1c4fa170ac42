"""Whether the places of a root and its levels fit together: told when the Checkpointer is made."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from ckpt_core.errors import ConfigError
from ckpt_core.levels.far.opening import check_extra
from ckpt_core.options import Level, scheme_of


def check_places(root: Path, levels: Sequence[Level]) -> None:
    """Be sure that no level lies in another, and that there is a client for each. Opens no connection.

    Raises:
        ConfigError: names the level.
    """
    urls = [str(root), *(level.url for level in levels)]
    for before, url in itertools.combinations(urls, 2):
        if overlap(before, url):
            what = f"the root {before}" if before == urls[0] else f"the level {before}"
            raise ConfigError(
                f"levels: {url} is {what}, or lies inside it or above it: each has a place of its own"
            )
    for level in levels:
        if level.scheme is not None:
            check_extra(level.url)


def overlap(one: str, other: str) -> bool:
    """Whether two places are the same, or one lies in the other."""
    if scheme_of(one) != scheme_of(other):
        return False
    first, second = _parts(one), _parts(other)
    shared = min(len(first), len(second))
    return first[:shared] == second[:shared]


def same_disk(root: Path, levels: Sequence[Level]) -> list[str]:
    """What is to be said of levels on the disk of the place before them."""
    urls = [str(root), *(level.url for level in levels)]
    return [
        f"the level {url} is on the same filesystem as {before}: what loses the one loses the other. Give it "
        f"a directory on another disk, or a place in an object store or at another node"
        for before, url in itertools.pairwise(urls)
        if scheme_of(before) is None and scheme_of(url) is None and _device(before) == _device(url)
    ]


def _parts(url: str) -> list[str]:
    return (os.path.realpath(url) if scheme_of(url) is None else url).rstrip("/").split("/")


def _device(path: str) -> int | None:
    for place in (Path(path), *Path(path).parents):
        try:
            return place.stat().st_dev
        except OSError:
            continue
    return None
