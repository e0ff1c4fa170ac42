"""Programs that run on several real ranks with a gloo process group between them, for `crew.run_ranks`."""

from __future__ import annotations

import importlib
from datetime import timedelta

from tests.multirank.crew import Rank

_GRACE_S = 60


def in_a_group(who: Rank, program: str, folder: str) -> None:
    """Run `module:function(rank, world)`; called on each rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=who.rank,
        world_size=who.world_size,
        timeout=timedelta(seconds=_GRACE_S),
    )
    module, _, function = program.partition(":")
    getattr(importlib.import_module(module), function)(who.rank, who.world_size)
    dist.barrier()
    dist.destroy_process_group()
