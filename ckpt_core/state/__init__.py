"""State trees <-> leaves (name, tensor) and a skeleton of everything that is not a tensor.

Call order:
    save (training thread)   flatten(state) -> leaves go to the stager, `skeleton.to_text()` into
                             the manifest, later and from any thread
    load                     Skeleton.from_json(...).allocate(specs) -> fill -> .unflatten(tensors)
    restore                  bind(skeleton, specs, live) -> fill what is `.doubtful`, `.check()`
                             -> fill `.destinations` -> `.finish()`

Idea: each piece of memory is one leaf, however many tensors show it, so nothing is written twice
and sharing survives; the skeleton is JSON, so reading a checkpoint runs no code.
Of a DTensor or FlatPart each rank sees its local part: the leaf is that, and `FlatState.placements` says
which box or run of the whole it is; the skeleton knows only the whole, so it does not matter who restores it.

Source: DeepFreeze (CCGrid '20) section IV-A c.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckpt_core.state.kinds import KINDS, Kind
from ckpt_core.state.nodes import Map, Seq

if TYPE_CHECKING:
    from ckpt_core.state.binding import Binding, bind
    from ckpt_core.state.distributed import FlatPart, local_of
    from ckpt_core.state.flat import FlatState
    from ckpt_core.state.flattening import flatten
    from ckpt_core.state.leaf import Leaf
    from ckpt_core.state.memo import SpecMemo
    from ckpt_core.state.memory import (
        FEW_ELEMENTS,
        GIL_RELEASE_BYTES,
        all_as_known,
        as_known,
        as_words,
        blocks,
        is_freed,
        lies_at,
        memory_at,
        memory_of,
        one_thread_limit,
        refuse_freed,
    )
    from ckpt_core.state.rng import RngState
    from ckpt_core.state.selection import Selection
    from ckpt_core.state.skeleton import Skeleton

# These import torch: whoever only looks at a skeleton starts without it.
_LAZY = {
    name: f"ckpt_core.state.{module}"
    for module, names in {
        "binding": "Binding bind",
        "selection": "Selection",
        "distributed": "FlatPart local_of",
        "flat": "FlatState",
        "flattening": "flatten",
        "leaf": "Leaf",
        "memory": "FEW_ELEMENTS GIL_RELEASE_BYTES all_as_known as_known as_words blocks is_freed lies_at "
        "memory_at memory_of one_thread_limit refuse_freed",
        "memo": "SpecMemo",
        "rng": "RngState",
        "skeleton": "Skeleton",
    }.items()
    for name in names.split()
}

__all__ = [
    "FEW_ELEMENTS",
    "GIL_RELEASE_BYTES",
    "KINDS",
    "Binding",
    "FlatPart",
    "FlatState",
    "Kind",
    "Leaf",
    "Map",
    "RngState",
    "Selection",
    "Seq",
    "Skeleton",
    "SpecMemo",
    "all_as_known",
    "as_known",
    "as_words",
    "bind",
    "blocks",
    "flatten",
    "is_freed",
    "lies_at",
    "local_of",
    "memory_at",
    "memory_of",
    "one_thread_limit",
    "refuse_freed",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
