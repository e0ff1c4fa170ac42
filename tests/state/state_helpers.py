"""What the state tests share: a round trip through bytes and JSON text, and exact comparison."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import torch

from ckpt_core.state import FlatState, Skeleton, bind, flatten

LIMIT = 16 * 1024


def leaf_bytes(tensor: torch.Tensor) -> bytes:
    if tensor.dtype is torch.complex32:  # Its own copies warn once, where strides are odd.
        tensor = tensor.view(torch.int32)
    raw = tensor.contiguous()
    if raw.numel() == 0:
        return b""
    flat = raw.as_strided((raw.numel(),), (1,))  # Contiguous, but where sizes are 1 strides lie.
    return bytes(flat.view(torch.uint8).numpy())


def fill(target: torch.Tensor, data: bytes) -> None:
    if not data:
        return
    source = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(target.dtype)
    target.copy_(source.reshape(target.shape))


def saved(state: Any, **options: Any) -> tuple[Skeleton, dict[str, Any], dict[str, bytes]]:
    flat = flatten(state, eager_leaf_bytes=LIMIT, **options)
    return stored(flat)


def stored(flat: FlatState) -> tuple[Skeleton, dict[str, Any], dict[str, bytes]]:
    for leaf in flat.leaves:
        name = leaf.spec.name
        assert name.encode() and "\0" not in name and not name.startswith("__pad__")
        assert tuple(leaf.tensor.shape) == leaf.spec.shape and not leaf.tensor.requires_grad
    assert len({leaf.spec.name for leaf in flat.leaves}) == len(flat.leaves)
    text = json.dumps(flat.skeleton.to_json(), allow_nan=False, ensure_ascii=False)
    skeleton = Skeleton.from_json(json.loads(text.encode()), path="here")
    assert skeleton.to_json() == flat.skeleton.to_json()
    specs = {leaf.spec.name: leaf.spec for leaf in flat.leaves}
    return skeleton, specs, {leaf.spec.name: leaf_bytes(leaf.tensor) for leaf in flat.leaves}


def through(state: Any, *, trusted: bool = False) -> Any:
    skeleton, specs, data = saved(state)
    tensors = skeleton.allocate(specs)
    for name, tensor in tensors.items():
        fill(tensor, data[name])
    return skeleton.unflatten(tensors, trusted=trusted)


def restore(state: Any, live: Any, *, trusted: bool = False) -> Any:
    """Save `state`, fill `live` from it as `restore` does; the tree that is returned."""
    skeleton, specs, data = saved(state)
    binding = bind(skeleton, specs, live, trusted=trusted)
    assert binding.destinations.keys() == data.keys()
    for name in binding.doubtful:
        fill(binding.destinations[name], data[name])
    binding.check()
    for name, target in binding.destinations.items():
        fill(target, data[name])
    return binding.finish()


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        if left.dtype is not right.dtype or left.shape != right.shape:
            return False
        if left.is_conj() != right.is_conj() or left.is_neg() != right.is_neg():
            return False
        return raw_bytes(left) == raw_bytes(right)
    if isinstance(left, np.ndarray):
        return bool(left.dtype == right.dtype and left.tobytes() == right.tobytes())
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            same(a, b) and same(left[a], right[b]) for a, b in zip(left, right, strict=True)
        )
    if hasattr(left, "weight"):
        return same(left.name, right.name) and same(left.weight, right.weight)
    if hasattr(left, "maxlen"):
        return left.maxlen == right.maxlen and same(list(left), list(right))
    if isinstance(left, int):
        return bool(left == right)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if type(left).__name__ == "Decimal" and left.is_nan():
        return True
    return (bool(left == right) and repr(left) == repr(right)) or _same_set(left, right)


def _same_set(left: Any, right: Any) -> bool:
    return isinstance(left, set | frozenset) and bool(left == right)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    size = tensor.itemsize
    tensor = tensor.resolve_conj().resolve_neg()
    if math.prod(tensor.shape) == 0:
        return b""
    if size == 1:
        tensor = tensor.view(torch.uint8)
    return leaf_bytes(tensor)
