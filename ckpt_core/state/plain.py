"""What the walk of `bind` asks of single nodes and of single live values."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ckpt_core.state.generators import is_generator
from ckpt_core.state.kinds import KINDS
from ckpt_core.state.nodes import PLAIN, Array, Map, Node, Obj, Record, Ref, Seq
from ckpt_core.state.records import type_name
from ckpt_core.state.rng import RngState, numpy_kind

SEQUENCES = (list, tuple)


def fields_of(node: Node) -> dict[Any, Node]:
    """A Map's values by those of its keys that are text or numbers."""
    if not isinstance(node, Map):
        return {}
    rows = zip(node.keys, node.values, strict=True)
    return {key: value for key, value in rows if type(key) in PLAIN}


def group_size(group: Node) -> int:
    """How many parameters a group of an optimizer names; -1 if it is no such group."""
    params = fields_of(group).get("params")
    return len(params.items) if isinstance(params, Seq) else -1


def is_array(live: Any) -> bool:
    """Whether it is a numpy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(live, numpy.ndarray)


def _children(node: Node) -> Iterable[Node]:
    if isinstance(node, Seq):
        return node.items
    if isinstance(node, Obj):
        return (node.state,)
    if isinstance(node, Map | Record):
        return node.values
    return ()


def is_plain(node: Node) -> bool:
    """Whether nothing below the node has a home of its own; what is in sets and deques has none."""
    if isinstance(node, Seq) and not KINDS[node.kind].homes:
        return True
    return not isinstance(node, Ref | Array | Obj) and all(map(is_plain, _children(node)))


def is_generators(node: Node) -> bool:
    """Whether it is an `RngState`."""
    return isinstance(node, Obj) and node.type_name == type_name(RngState)


def refused(node: Node, live: Any) -> str | None:
    """Why an object of ours or of torch's will not load what was saved of one of its kind; None: it will."""
    if isinstance(live, RngState):
        return _numpy_differs(node)
    empty = isinstance(node, Map) and not node.keys
    if empty and isinstance(live, torch.amp.GradScaler) and live.is_enabled():
        return "saved by a scaler that was off, and is on here: make it with enabled=False"
    return None


def _numpy_differs(node: Node) -> str | None:
    """Why NumPy's global generator cannot take what an `RngState` has saved of it; None: it can."""
    saved, here = fields_of(node).get("numpy"), numpy_kind()
    items = saved.items if isinstance(saved, Seq) else [fields_of(saved).get("bit_generator")]
    kind = next(iter(items), None)
    if kind is None or here in (None, kind):
        return None
    return f"NumPy's {str(kind)[:40]} in the checkpoint, {here} here"


def holds_generators(node: Node) -> bool:
    """Whether there is an `RngState` in it."""
    return is_generators(node) or any(map(holds_generators, _children(node)))


def has_state(live: Any) -> bool:
    """Whether it gives its state itself, be it that something that it wraps does so for it."""
    return callable(getattr(live, "state_dict", None)) and not isinstance(live, type)


def is_filled(live: Any) -> bool:
    """Whether a live value takes what was saved in place, as a whole."""
    return isinstance(live, Tensor) or is_array(live) or has_state(live) or is_generator(live)


def is_plain_live(live: Any) -> bool:
    """Whether nothing in a live value is filled in place."""
    if is_filled(live):
        return False
    if isinstance(live, Mapping):
        return all(map(is_plain_live, live.values()))
    if isinstance(live, SEQUENCES):
        return all(map(is_plain_live, live))
    if dataclasses.is_dataclass(live) and not isinstance(live, type):
        values = (getattr(live, field.name, None) for field in dataclasses.fields(live))
        return all(map(is_plain_live, values))
    return True


def shown(node: Node) -> str:
    """What a node is, for messages."""
    if isinstance(node, Ref):
        return "tensor"
    if isinstance(node, Obj | Record):
        return node.type_name
    if isinstance(node, Map | Seq):
        return node.kind
    return "numpy array" if isinstance(node, Array) else type(node).__name__


def live_form(live: Tensor) -> str:
    """The layout of a live tensor, and what a copy cannot change; compared with that of a node."""
    if live.is_quantized:
        per_channel = live.qscheme() not in (torch.per_tensor_affine, torch.per_tensor_symmetric)
        return "quantized per channel" if per_channel else "quantized"
    name = str(live.layout).removeprefix("torch.")
    if name in ("strided", "sparse_coo"):
        return name
    return f"{name} {list(live.values().shape)}"
