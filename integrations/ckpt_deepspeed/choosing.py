"""Which tag is loaded: the one that is asked for, or the newest whole one. Every byte is compared first."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ckpt_core import CkptError, CorruptCheckpoint, committed_directories, verify

MANIFEST = "manifest.json"


def choose(load_dir: str, tag: str | None, latest: str | None) -> str | None:
    """The tag to load; all ranks call it and get the same answer.

    Args:
        tag: what the caller asks for; None: the newest.
        latest: what the file `latest` says; None without one.

    Returns:
        A tag that is whole; or, unchecked, one that was not saved by this engine; None if there is none.

    Raises:
        CorruptCheckpoint: the tag that was asked for is damaged, or all are.
    """
    wanted = tag if tag is not None else latest
    if wanted is None:
        wanted = next(iter(_tags(load_dir)), None)
        if wanted is not None:
            _warn(
                f"{load_dir} has no file 'latest': loading {wanted!r}, its newest tag that is whole"
            )
    if wanted is None or not _is_ours(load_dir, wanted):
        return wanted
    problem = _problem(load_dir, wanted)
    if problem is None:
        return wanted
    others = [name for name in _tags(load_dir) if name != wanted]
    whole = next((name for name in others if _problem(load_dir, name) is None), None)
    if tag is not None:
        hint = "no other tag is whole" if whole is None else f"the newest whole tag is {whole!r}"
        raise CorruptCheckpoint(
            f"tag {wanted!r} in {load_dir} is damaged: {problem}. It was not loaded; {hint}",
            path=Path(load_dir) / wanted,
        )
    if whole is None:
        raise CorruptCheckpoint(
            f"tag {wanted!r} in {load_dir} is damaged: {problem}. No other tag is whole; nothing was loaded",
            path=Path(load_dir) / wanted,
        )
    _warn(f"tag {wanted!r} in {load_dir} is damaged ({problem}): loading {whole!r} instead")
    return whole


def _tags(load_dir: str) -> tuple[str, ...]:
    """Names, newest first, of tags that have all their files; no byte has been compared."""
    found: tuple[str, ...] = _shared(lambda: committed_directories(load_dir))
    return found


def _is_ours(load_dir: str, tag: str) -> bool:
    return bool(_shared(lambda: (Path(load_dir) / tag / MANIFEST).is_file()))


def _problem(load_dir: str, tag: str) -> str | None:
    """What is wrong with a tag; the ranks share its files among them."""
    rank, ranks = _rank_and_ranks()
    report = verify(Path(load_dir) / tag, share=(rank, ranks))
    mine = None
    if not report.ok:
        bad = [f"{bad.file}: bytes of chunk {bad.index} differ" for bad in report.bad_chunks]
        mine = [*report.problems, *bad][0]
    everyone: list[Any] = [None] * ranks
    if ranks > 1:
        dist.all_gather_object(everyone, mine)
    else:
        everyone = [mine]
    return next((text for text in everyone if text is not None), None)


def _shared(look: Callable[[], Any]) -> Any:
    """What the first rank finds, on all: another one might, a moment later, find something else.

    Raises:
        CkptError: what it raised there, on all as well.
    """
    rank, ranks = _rank_and_ranks()
    told: list[Any] = [None]
    if rank == 0:
        try:
            told = [look()]
        except CkptError as exc:
            told = [exc]
    if ranks > 1:
        dist.broadcast_object_list(told, src=0)
    if isinstance(told[0], CkptError):
        raise told[0]
    return told[0]


def _rank_and_ranks() -> tuple[int, int]:
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _warn(text: str) -> None:
    if _rank_and_ranks()[0] == 0:
        warnings.warn(text, stacklevel=5)
