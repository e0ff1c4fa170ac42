"""The ranks of one run agree that a step is persisted everywhere before it is published.

    every rank:  persist its own shard -> agree(...) -> settle(...)   (in the background)
    leaders:     agree returned -> write the manifest -> publish -> settle(...)

One process needs no agreement: `NoCoordination` is that null object, and the engine asks it as it
asks any other. `TorchStore` is for several; it is loaded at first use, and loads torch when one is made.
Its protocol is docs/protocol.md. Inside, from the outside in:

    torch_store  how ranks are named and find the store (bootstrap, meeting, options)
    session      one rank: its attempts under way, its end
    attempt      one rank in one attempt: who writes which key when; outcome is how it ended, gathering its
                 sibling for `gather`
    heartbeat    who lives
    channel      the store's verbs, with deadlines; client: connections that may block, hang or break

Source: PCcheck (ASPLOS '25) section 4.1, checkpointing in distributed training.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckpt_core.coordination.agreement import (
    Aside,
    Ballot,
    Coordination,
    Json,
    NoCoordination,
    Parts,
    Reference,
    checked_coordination,
)

if TYPE_CHECKING:
    from ckpt_core.coordination.options import StoreOptions, own_address
    from ckpt_core.coordination.torch_store import TorchStore

_LAZY = {
    "StoreOptions": "ckpt_core.coordination.options",
    "TorchStore": "ckpt_core.coordination.torch_store",
    "own_address": "ckpt_core.coordination.options",
}

__all__ = [
    "Aside",
    "Ballot",
    "Coordination",
    "Json",
    "NoCoordination",
    "Parts",
    "Reference",
    "StoreOptions",
    "TorchStore",
    "checked_coordination",
    "own_address",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
