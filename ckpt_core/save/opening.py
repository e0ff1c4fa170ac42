"""The ranks of a job open their roots together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ckpt_core.coordination import Coordination, Json
from ckpt_core.errors import CkptError, CommitError, ConfigError
from ckpt_core.options import Level, Options
from ckpt_core.store import GuestStore, StepStore, check_layout
from ckpt_core.system.files import Files
from ckpt_core.system.kept_mappings import KeptMappings
from ckpt_core.types import RankInfo

_SEEN_WITHIN_S = 90.0
"""Longer than clients of NFS believe, as they are mounted, that what they did not find is not there."""

_NOT_OPEN = {"failed": "open its root", "so": "No rank opened one"}


def make_store(
    root: Path, options: Options, info: RankInfo, *, files: Files, kept: KeptMappings
) -> StepStore | GuestStore:
    """The store of a root, for a rank that leads or for one that does not."""
    if not info.leads:
        return GuestStore(root, files=files, rank=info.rank, kept=kept)
    return StepStore(
        root,
        files=files,
        keep_last=options.keep_last,
        keep_every=options.keep_every,
        spare_slots=options.in_flight * len(info.members),
        shared=len(info.members) > 1,
        rank=info.rank,
        kept=kept,
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
    given = [level.for_all() for level in levels]

    def begin() -> list[Json]:
        if not isinstance(store, StepStore):
            return [None, given]
        check_layout(store.root)
        store.open()
        return [store.owner() if coordination.info.world_size > 1 else None, given]

    opened = look_together(begin, coordination, "open", timeout_s, **_NOT_OPEN)
    _check_alike([levels_of for _, levels_of in opened])

    def find_leader() -> None:
        leader = coordination.info.members[0]
        # Without an owner in the lock file (a full disk) there is nothing to compare.
        if isinstance(store, GuestStore) and opened[leader][0]:
            # Half: the others hear why not before they have waited too long for this rank.
            until_s = min(timeout_s / 2, _SEEN_WITHIN_S)
            store.find_leader(opened[leader][0], leader=leader, timeout_s=until_s)

    if coordination.info.world_size > 1:
        look_together(find_leader, coordination, "joined", timeout_s, **_NOT_OPEN)


def _check_alike(levels: Sequence[Json]) -> None:
    for rank, given in enumerate(levels):
        if given != levels[0]:
            raise ConfigError(
                f"rank {rank} has the levels {given}, and rank 0 has {levels[0]}: give all ranks the same "
                f"(look at CKPT_CORE_LEVELS on each node). No rank opened its root",
                rank=rank,
            )


def look_together(
    look: Callable[[], Json],
    coordination: Coordination,
    topic: str,
    timeout_s: float,
    *,
    failed: str,
    so: str,
) -> list[Json]:
    """What `look` gives on each rank, on all of them; where it fails on one, all raise. Called on every rank.

    Args:
        failed, so: what another rank could not do, and what follows from it.

    Raises:
        CkptError: what `look` raised on this rank.
        CommitError: what it raised on another one, an interrupt too.
        CoordinationTimeout: a rank did not come.
    """
    mine: Json = None
    error: CkptError | None = None
    call = coordination.call_id()
    try:
        mine = look()
    except CkptError as exc:
        error = exc
    except BaseException as exc:
        coordination.leave(
            call, [f"{type(exc).__name__}: {exc}".removesuffix(": "), None], [None] * 2
        )
        raise
    text = None if error is None else f"{type(error).__name__}: {error}"
    told = coordination.gather(f"{topic}/{call}", [text, mine], timeout_s)
    if error is not None:
        raise error
    failures = {rank: CkptError(said, rank=rank) for rank, (said, _) in enumerate(told) if said}
    if failures:
        rank = min(failures)
        raise CommitError(
            f"rank {rank} could not {failed}: {failures[rank]}. {so}",
            failures=dict(failures),
            rank=rank,
        )
    return [one for _, one in told]
