"""Ways in which the ranks of one job save a state that is equal on all of them.

One object for each way and rank. Call order, on every rank alike, from its main thread: construct ->
`save` and the handle's `barrier`, `wait_durable`, then `tidy`, any number of times -> `load_into` -> `close`.

Source: DeepFreeze V-B compares VELOC-Single, VELOC-Sharded and VELOC-Opt, which `single`,
`sharded_blocking` and `ckpt_core` stand for; `replicated` is the same without its idea, the slices.
"""

from __future__ import annotations

import importlib

from ckpt_core.bench.ranks.ways.base import Place, Way

REGISTRY = {
    "ckpt_core": "ours:Sharded",
    "sharded_blocking": "ours:ShardedBlocking",
    "single": "ours:Single",
    "replicated": "ours:Replicated",
    "torch_save_rank0": "peers:TorchSaveRank0",
    "dcp_save": "peers:RankedDcpSave",
    "dcp_async_reused": "peers:RankedDcpAsync",
}
"""Name -> module and class. The first is the one that the others are compared with."""

NAMES = tuple(REGISTRY)


def way_class(name: str) -> type[Way]:
    """The class of a way; its module is imported only now."""
    module, _, attribute = REGISTRY[name].partition(":")
    found: type[Way] = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    return found


__all__ = ["NAMES", "REGISTRY", "Place", "Way", "way_class"]
