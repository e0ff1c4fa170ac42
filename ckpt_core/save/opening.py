"""The ranks of a job open their roots together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckpt_core.coordination import Coordination, Json
from ckpt_core.errors import CkptError, CommitError, ConfigError
from ckpt_core.options import Level, Options
from ckpt_core.store import GuestStore, StepStore
from ckpt_core.system.files import Files
from ckpt_core.types import RankInfo

_SEEN_WITHIN_S = 10.0
_NOT_OPEN = {"failed": "open its root", "so": "No rank opened one"}


def make_store(
    root: Path, options: Options, info: RankInfo, *, files: Files
) -> StepStore | GuestStore:
    """The store of a root, for a rank that leads or for one that does not."""
    if not info.leads:
        return GuestStore(root, files=files, rank=info.rank)
    return StepStore(
        root,
        files=files,
        keep_last=options.keep_last,
        keep_every=options.keep_every,
        spare_slots=options.in_flight * len(info.members),
        shared=len(info.members) > 1,
    )


def open_together(
    store: StepStore | GuestStore,
    coordination: Coordination,
    *,
    levels: Sequence[Level],
    timeout_s: float,
) -> None:
    """Open the root on every rank, or on none: leaders first, and the others look for what they did.

    Called on every rank when the Checkpointer is made.

    Args:
        levels: beyond the root, which all ranks must give alike.

    Raises:
        CkptError: what went wrong on this rank.
        ConfigError: the ranks have different levels.
        CommitError: what went wrong on another one.
        CoordinationTimeout: a rank did not come.
    """
    info = coordination.info
    error: CkptError | None = None
    owner = None
    try:
        if isinstance(store, StepStore):
            store.open()
            owner = store.owner()
    except CkptError as exc:
        error = exc
    mine = [level.for_all() for level in levels]
    opened = coordination.gather("open", [error_text(error), owner, mine], timeout_s)
    raise_first(error, [text for text, *_ in opened], **_NOT_OPEN)
    _check_alike([given for *_, given in opened])
    if info.world_size == 1:
        return
    if isinstance(store, GuestStore):
        leader = info.members[0]
        try:
            # Without an owner in the lock file (a full disk) there is nothing to compare.
            if opened[leader][1]:
                store.find_leader(opened[leader][1], leader=leader, timeout_s=_SEEN_WITHIN_S)
        except CkptError as exc:
            error = exc
    raise_first(error, coordination.gather("joined", error_text(error), timeout_s), **_NOT_OPEN)


def _check_alike(levels: Sequence[Json]) -> None:
    for rank, given in enumerate(levels):
        if given != levels[0]:
            raise ConfigError(
                f"rank {rank} has the levels {given}, and rank 0 has {levels[0]}: give all ranks the same "
                f"(look at CKPT_CORE_LEVELS on each node). No rank opened its root",
                rank=rank,
            )


def error_text(error: CkptError | None) -> str | None:
    """What a rank tells the others of its error."""
    return None if error is None else f"{type(error).__name__}: {error}"


def raise_first(
    mine: CkptError | None, texts: Sequence[str | None], *, failed: str, so: str
) -> None:
    """Raise this rank's error, or the first of another one, if there is any.

    Args:
        texts: what each rank told, in their order.
        failed, so: what the other rank could not do, and what follows from it.
    """
    if mine is not None:
        raise mine
    failures = {rank: CkptError(text, rank=rank) for rank, text in enumerate(texts) if text}
    if failures:
        rank = min(failures)
        raise CommitError(
            f"rank {rank} could not {failed}: {failures[rank]}. {so}",
            failures=dict(failures),
            rank=rank,
        )
