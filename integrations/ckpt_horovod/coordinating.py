"""How the ranks of a Horovod job agree on commits: a store whose address Horovod's own broadcast tells."""

from __future__ import annotations

from typing import Any, Literal

import horovod.torch as hvd

from ckpt_core import ConfigError, StoreOptions, TorchStore


def coordination(
    *,
    roots: Literal["shared", "node"] = "shared",
    process_set: Any = None,
    options: StoreOptions | None = None,
) -> TorchStore:
    """Give the result to the rank's `Checkpointer`. Also right for a job of one process.

    Called on every rank of the process set, on the training thread, after `hvd.init()` and while no
    all-reduce is under way: it broadcasts. Returns once all ranks have come.

    Args:
        roots: "shared": all ranks write to one root; "node": those of each machine to one of theirs.
        process_set: whose ranks save together; None for all.
        options: see StoreOptions; the same on every rank.

    Raises:
        ConfigError: an argument is wrong, Horovod is not initialised, or this rank is not in the set.
        CoordinationTimeout, CommitError: as for TorchStore.
    """
    if roots not in ("shared", "node"):
        raise ConfigError(f"roots={roots!r} is unknown: use 'shared' or 'node'")
    if not hvd.is_initialized():
        raise ConfigError("Horovod is not initialised: call hvd.init() first")
    ranks = process_set or hvd.global_process_set
    refuse_outside(ranks)
    members = ranks.ranks or range(hvd.size())

    def exchange(text: str | None) -> str:
        name = "ckpt_horovod.address"
        told: str = hvd.broadcast_object(text, root_rank=min(members), name=name, process_set=ranks)
        return told

    return TorchStore.from_exchange(
        exchange,
        rank=ranks.rank(),
        world_size=ranks.size(),
        # Ranks of one machine have the same cross rank: that is what tells machines apart.
        node=hvd.cross_rank() if roots == "node" else None,
        options=options,
    )


def refuse_outside(ranks: Any) -> None:
    """ConfigError where this rank is not in the process set `ranks`."""
    if not ranks.included():
        raise ConfigError(
            f"process_set={ranks}: rank {hvd.rank()} is not in it, so it has nothing to save there; "
            f"give its optimizer checkpointer=None"
        )
