"""Fill a planned torch zip file, and say what `torch.save` gives of the same tree."""

from __future__ import annotations

import argparse
import collections
import enum
import io
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from ckpt_core.torch_zip import ZipPlan, plan_zip

HOLE = b"\xee"


def raw(tensor: Tensor) -> bytes:
    """Row-major bytes."""
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes()


def filled(plan: ZipPlan) -> bytes:
    """The finished file; bytes that neither a frame nor a tensor gave are `HOLE`."""
    layout = plan.layout
    image = bytearray(HOLE * layout.file_bytes)
    for offset, data in layout.frames:
        image[offset : offset + len(data)] = data
    for extent, tensor in zip(layout.extents, plan.tensors, strict=True):
        image[extent.offset : extent.offset + extent.nbytes] = raw(tensor)
    assert len(image) == layout.file_bytes
    return bytes(image)


def write(plan: ZipPlan, path: Path) -> None:
    """The finished file in pieces and out of order, as writers do it; a tensor is read last."""
    with path.open("wb") as file:
        file.truncate(plan.layout.file_bytes)
        for offset, data in reversed(plan.layout.frames):
            os.pwrite(file.fileno(), data, offset)
        for extent, tensor in zip(plan.layout.extents, plan.tensors, strict=True):
            os.pwrite(file.fileno(), raw(tensor), extent.offset)


def saved(tree: Any) -> bytes:
    """What `torch.save` writes to a file-like object."""
    file = io.BytesIO()
    torch.save(tree, file)
    return file.getvalue()


def planned(tree: Any) -> bytes:
    """What our encoder makes of the tree."""
    return filled(plan_zip(tree))


def loaded(data: bytes, **how: Any) -> Any:
    return torch.load(io.BytesIO(data), **{"weights_only": False, **how})


class Cloner:
    """Detached clones of the dense tensors of a tree of dicts, lists and tuples: one clone for each
    view, shared by the tensors that are that view."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._views: dict[Any, Tensor] = {}

    def __call__(self, part: Any) -> Any:
        if id(part) not in self._objects:
            self._objects[id(part)] = self._clone(part)
        return self._objects[id(part)]

    def _clone(self, part: Any) -> Any:
        if isinstance(part, Parameter):
            return Parameter(self._tensor(part), part.requires_grad)
        if isinstance(part, Tensor):
            return self._tensor(part).requires_grad_(part.requires_grad and part.is_leaf)
        if type(part) in (dict, collections.OrderedDict):
            return type(part)((key, self(value)) for key, value in part.items())
        if type(part) in (list, tuple):
            return type(part)(self(value) for value in part)
        return part

    def _tensor(self, tensor: Tensor) -> Tensor:
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.nbytes and key in self._views:
            return self._views[key].detach()
        clone = tensor.detach().clone()
        self._views[key] = clone
        return clone


def assert_alike(ours: Any, theirs: Any) -> None:
    """The same values, types, memory layouts and flags all through two trees."""
    assert type(ours) is type(theirs)
    if isinstance(ours, Tensor):
        assert_alike_tensors(ours, theirs)
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            assert_alike(ours[key], theirs[key])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_alike(one, other)
    elif isinstance(ours, np.ndarray):
        assert ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()
    elif isinstance(ours, argparse.Namespace):
        assert_alike(vars(ours), vars(theirs))
    else:
        assert ours == theirs


def assert_alike_tensors(ours: Tensor, theirs: Tensor) -> None:
    assert ours.layout == theirs.layout and ours.is_nested == theirs.is_nested
    assert (ours.dtype, ours.device) == (theirs.dtype, theirs.device)
    assert (ours.requires_grad, ours.is_leaf) == (theirs.requires_grad, theirs.is_leaf)
    if ours.is_nested:
        return
    assert ours.shape == theirs.shape
    if ours.layout is not torch.strided or ours.is_quantized or ours.is_meta:
        return
    assert ours.stride() == theirs.stride()
    assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
    assert raw(ours.detach()) == raw(theirs.detach())


def ties(tree: Any) -> list[list[str]]:
    """Which tensors of a tree of dicts and lists share memory."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors_of(tree, ""):
        if tensor.nbytes:
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return sorted(groups.values())


def tensors_of(part: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(part, Tensor):
        yield name, part
    elif isinstance(part, dict):
        for key, value in part.items():
            yield from tensors_of(value, f"{name}.{key}")
    elif isinstance(part, list | tuple):
        for index, value in enumerate(part):
            yield from tensors_of(value, f"{name}.{index}")


# -- trees -------------------------------------------------------------------------------------


class Phase(enum.Enum):
    WARMUP = 1


class Flagged(Tensor):
    """A subclass without code of its own."""


def zero_1() -> Any:
    """Weights as views of one flat buffer, partitions as slices of a leaf that requires gradients."""
    flat = torch.randn(64).to(torch.bfloat16)
    partition = torch.randn(40, requires_grad=True)
    return {
        "module": {"w": flat[:32].view(4, 8), "b": flat[32:40], "tied": flat[:32].view(4, 8)},
        "single_partition_of_fp32_groups": [partition[:33]],
        "base_optimizer_state": [{"exp_avg": torch.rand(33), "step": torch.tensor(3.0)}],
    }


def zero_3() -> Any:
    return {
        "module": collections.OrderedDict(w=torch.empty(0), b=torch.empty(0, dtype=torch.half)),
        "buffer_names": ["running"],
        "running": torch.arange(5),
        "shapes": [{"w": torch.Size([4, 8])}],
    }


def dtypes() -> Any:
    values = torch.tensor([0.0, 1.0, 2.0, -3.0])
    wide = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
    small = [torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64]
    rare = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
    complexes = [torch.complex64, torch.complex128]
    return {str(kind): values.abs().to(kind) for kind in [*wide, *small, *rare, *complexes]}


def special_values() -> Any:
    return {"float": torch.tensor([float("nan"), float("inf"), -0.0]), "scalar": torch.tensor(7)}


def strides() -> Any:
    base = torch.randn(4, 6, 8)
    return [
        base,
        base.permute(2, 0, 1),
        base[:, ::2],
        base[:, ::2].permute(2, 1, 0),
        base[1],
        base[:, 1:2, ::3].permute(1, 2, 0),
        base[:1].expand(3, 6, 8),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(7)[3:4].as_strided((1, 1), (5, 9)),
        torch.randn(3, 0, 2).permute(2, 1, 0),
        torch.tensor(2.5).expand(3, 4),
    ]


def gradients() -> Any:
    leaf = torch.randn(3, requires_grad=True)
    weight = Parameter(torch.randn(2, 2))
    return {
        "leaf": leaf,
        "inner": leaf * 2,
        "slice": leaf[1:],
        "weight": weight,
        "again": weight,
        "data": weight.data,
        "frozen": Parameter(torch.ones(2), requires_grad=False),
    }


def ties_of_all_kinds() -> Any:
    x = torch.randn(6, 4)
    return {"x": x, "same": x, "alias": x[:], "part": x[1:3], "turned": x.t(), "flat": x.view(-1)}


def plain() -> Any:
    return {
        "epoch": 3,
        "loss": 0.5,
        "name": "run",
        "none": None,
        "flags": [True, False],
        "t": (1, 2),
    }


def objects() -> Any:
    return {
        "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.95), init=torch.ones(2), dtype=torch.half),
        "ds_config": {"zero_optimization": {"stage": 1}, "fp16": {"enabled": False}},
        "phase": Phase.WARMUP,
        "size": torch.Size([2, 3]),
        "array": np.arange(6.0).reshape(2, 3),
        "python_rng": random.Random(0).getstate(),
        "numpy_rng": np.random.RandomState(0).get_state(),
        "torch_rng": torch.get_rng_state(),
        "device": torch.device("cpu"),
    }


def _per_channel() -> Tensor:
    scales, zeros = torch.tensor([0.1, 0.2]), torch.zeros(2, dtype=torch.long)
    return torch.quantize_per_channel(torch.ones(2, 3), scales, zeros, 0, torch.qint8)


NOT_DENSE: dict[str, Callable[[], Any]] = {
    "coo": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "per_tensor": lambda: torch.quantize_per_tensor(torch.randn(5), 0.1, 0, torch.qint8),
    "per_channel": _per_channel,
    "meta": lambda: torch.empty(3, 4, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
    "storage": lambda: torch.arange(5).untyped_storage(),
}
"""What has no strides, or no bytes."""


TREES: dict[str, Callable[[], Any]] = {
    make.__name__: make
    for make in (
        zero_1,
        zero_3,
        dtypes,
        special_values,
        strides,
        gradients,
        ties_of_all_kinds,
        plain,
        objects,
    )
}
"""Trees that `Cloner` understands all through."""
