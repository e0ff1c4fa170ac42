"""Who is measured: one class for each way to save a state, all behind one protocol.

A contender lives in a process of its own. Call order, all from that process's main thread:
`available` -> construct -> `save` and the handle's `barrier`, `wait_durable`, then `tidy`, any number
of times -> `load_into` -> `close`. To add one, write the class and name it in `REGISTRY`, or in `RANKED`
where several ranks of a job save together, or in `SHARING`.

Baselines run with the best settings their documentation gives, not with defaults that are known to
be slow; where defaults are what most people use, they are a contender of their own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ckpt_core.bench.contenders.base import Contender, Handle, Profile, State

if TYPE_CHECKING:
    from ckpt_core.bench.ranks.ways.base import Way

REGISTRY = {
    "ckpt_core": "ours:CkptCore",
    "ckpt_core_unchecked": "ours:CkptCoreUnchecked",
    "torch_save": "torch_save:TorchSave",
    "torch_save_fsync": "torch_save:TorchSaveFsync",
    "safetensors": "safetensors_file:Safetensors",
    "safetensors_fsync": "safetensors_file:SafetensorsFsync",
    "dcp_save": "dcp:DcpSave",
    "dcp_async_default": "dcp:DcpAsyncDefault",
    "dcp_async_reused": "dcp:DcpAsyncReused",
    "dcp_async_overlapped": "dcp:DcpAsyncOverlapped",
    "torchsnapshot": "torchsnapshot_take:TorchSnapshot",
    "torch_checkpointing": "torch_checkpointing_manager:TorchCheckpointing",
    "raw_disk": "raw_disk:RawDisk",
}
"""Name -> module and class. The first is the one that the others are compared with."""

RANKED = {
    "ckpt_core": "ours:Sharded",
    "ckpt_core_levels": "ours:Levelled",
    "sharded_blocking": "ours:ShardedBlocking",
    "single": "ours:Single",
    "replicated": "ours:Replicated",
    "torch_save_rank0": "peers:TorchSaveRank0",
    "dcp_save": "peers:RankedDcpSave",
    "dcp_async_reused": "peers:RankedDcpAsync",
}
"""Likewise for ranks that save a state that is equal on all of them; in `ckpt_core.bench.ranks.ways`."""

SHARING = {
    "ckpt_core_shared": "sharing:Shared",
    "ckpt_core_frozen": "sharing:Frozen",
    "moonclip": "moonclip_manager:Moonclip",
}
"""Likewise, of those that write only what has changed: for `still` alone, which they are made for."""

OURS = "ckpt_core"
NAMES = tuple(REGISTRY)


def contender_class(name: str) -> type[Contender]:
    """The class of a contender; its module is imported only now."""
    found: type[Contender] = _load(__name__, (REGISTRY | SHARING)[name])
    return found


def way_class(name: str) -> type[Way]:
    """The class of a way of ranks; its module is imported only now."""
    found: type[Way] = _load("ckpt_core.bench.ranks.ways", RANKED[name])
    return found


def _load(package: str, place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(f"{package}.{module}"), attribute)


__all__ = [
    "NAMES",
    "OURS",
    "RANKED",
    "REGISTRY",
    "SHARING",
    "Contender",
    "Handle",
    "Profile",
    "State",
    "contender_class",
    "way_class",
]
