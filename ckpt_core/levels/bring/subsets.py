"""Which ranks of a step a root needs, and the manifest of a step that holds those alone. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from ckpt_core.layout import Manifest, RankEntry, RankManifest
from ckpt_core.restore import StepLeaves, StepManifest


def lacks(manifest: Manifest, ranks: Collection[int], world_size: int) -> bool:
    """Whether a level on the disk of one node holds too little of a step for the root of `ranks`.

    Another number of ranks may do with any part; whether it does is seen when it is read.

    Args:
        ranks: (): what all ranks wrote is wanted.
    """
    there = {row.rank for row in manifest.ranks}
    if manifest.directory is not None or len(there) == manifest.world_size:
        return False
    return not ranks or (manifest.world_size == world_size and not there.issuperset(ranks))


def chosen_rows(
    manifest: Manifest,
    ranks: Collection[int],
    world_size: int,
    read: Callable[[Collection[RankEntry]], list[RankManifest]],
    *,
    place: Path,
) -> list[RankEntry]:
    """The rank manifests that the root of `ranks` needs: theirs, if these are enough; else all.

    Theirs are, when as many ranks restore the step as saved it, and saved it in roots as they are now.

    Args:
        world_size: how many ranks restore it.
        read: reads rank manifests.
        place: named in errors.

    Raises:
        CorruptCheckpoint: ranks contradict each other about a leaf.
    """
    rows = list(manifest.ranks)
    if manifest.world_size != world_size or len(ranks) == world_size:
        return rows
    mine = [row for row in rows if row.rank in ranks]
    if not mine or len(mine) == len(rows):
        return rows
    found = read(mine)
    return mine if _is_enough(part_of(manifest, found), found, place) else rows


def part_of(manifest: Manifest, ranks: Sequence[RankManifest]) -> Manifest:
    """The manifest of a step of which only the files of some ranks are there."""
    numbers = {rank.rank for rank in ranks}
    rows = tuple([row for row in manifest.ranks if row.rank in numbers])
    size = sum(leaf.nbytes for rank in ranks for leaf in rank.leaves)
    size += sum(entry.slice.nbytes for rank in ranks for entry in rank.slices)
    return dataclasses.replace(manifest, ranks=rows, state_bytes=size)


def _is_enough(manifest: Manifest, ranks: Sequence[RankManifest], place: Path) -> bool:
    """Whether these ranks hold whole what they share without boxes, as a root of their own does."""
    leaves = StepLeaves(StepManifest(place, manifest, tuple(ranks)))
    for rank in ranks:
        for name in _leaf_names(rank.skeleton):
            if name in leaves.private[rank.rank]:
                continue
            leaf = leaves.shared.get(name)
            if leaf is None:
                return False
            in_boxes = any(one.part is not None and one.part.block for one in leaf.places)
            if not in_boxes and leaves.gap(leaf) is not None:
                return False
    return True


def _leaf_names(skeleton: Any) -> Iterator[str]:
    """Every leaf that a skeleton names, and perhaps texts that only look like one."""
    waiting = [skeleton]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if node.get("!") == "tensor" and isinstance(node.get("leaf"), str):
                yield node["leaf"]
            waiting.extend(node.values())
        elif isinstance(node, list | tuple):
            waiting.extend(node)
