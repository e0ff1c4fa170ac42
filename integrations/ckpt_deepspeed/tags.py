"""What the ranks agree on before a save: its tag, and whether it moves."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

_LINE = 512
"""Bytes; the names of most filesystems have 255 at most."""


class AgreedTag(str):
    """A tag that all ranks have, as their caller knows: they need not tell one another."""

    __slots__ = ()


def agreed(engine: Any, tag: Any, *, moves: bool) -> tuple[Any, bool]:
    """The tag of the first rank, unless DeepSpeed is to fail where they differ, and what the first rank
    says of `moves`. Called on every rank.

    DeepSpeed by itself would write a directory for each tag, none of which is whole.

    Args:
        moves: this rank saved elsewhere before. Others may remember it otherwise, where a save or a load
            was not the same for all; the ranks enter a collective by it.
    """
    fails = engine.checkpoint_tag_validation_enabled() and engine.checkpoint_tag_validation_fail()
    compared = str(tag) if fails and tag is not None else tag
    if isinstance(tag, AgreedTag) or not dist.is_initialized() or dist.get_world_size() == 1:
        return compared, moves
    mine = f"global_step{engine.global_steps}" if tag is None else str(tag)
    told, moves = _of_rank_0(mine, moves, engine.device)
    if fails:
        return compared, moves
    if told != mine and engine.checkpoint_tag_validation_enabled():
        warnings.warn(
            f"rank {dist.get_rank()} passed the tag {mine!r} and rank 0 {told!r}: all ranks save to "
            f"{told!r}. Pass the same on all; checkpoint.tag_validation=Fail refuses it, Ignore is silent",
            stacklevel=3,
        )
    return AgreedTag(told), moves


def _of_rank_0(text: str, moves: bool, device: Any) -> tuple[str, bool]:
    """What rank 0 passes. Called on every rank.

    By one collective: `broadcast_object_list` takes two, the first for the length.
    """
    mine = text.encode("utf-8", "surrogatepass")
    line = torch.zeros(_LINE, dtype=torch.uint8)
    if mine and len(mine) < _LINE and not mine.endswith(b"\0"):
        line[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    line[-1] = moves
    line = line.to(device)
    dist.broadcast(line, src=0)
    *name, moved = line.tolist()
    told = bytes(name).rstrip(b"\0")
    if told:
        return told.decode("utf-8", "surrogatepass"), bool(moved)
    long = [text]
    dist.broadcast_object_list(long, src=0)
    return long[0], bool(moved)
