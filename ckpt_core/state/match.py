"""The walk of `bind`: skeleton and live state side by side, noting homes, loads and differences."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ckpt_core.state.arrays import as_tensor
from ckpt_core.state.build import check_view
from ckpt_core.state.distributed import Placer, Unplaced, is_distributed
from ckpt_core.state.leaf import dtype_name, dtypes
from ckpt_core.state.nodes import PLAIN, Array, Map, Node, Obj, Record, Ref, Seq
from ckpt_core.state.objects import needs_load, parameters_of
from ckpt_core.state.skeleton import Skeleton
from ckpt_core.state.special import is_uninitialized
from ckpt_core.types import Block, LeafSpec

_SEQUENCES = (list, tuple)
_LIKE_PARAMETER = frozenset(
    "exp_avg exp_avg_sq exp_inf max_exp_avg_sq momentum_buffer square_avg acc_delta sum ax"
    " grad_avg".split()
)
"""Names under which torch's optimizers keep tensors of the shape of their parameter."""


@dataclass(frozen=True, slots=True)
class Home:
    """A live tensor that must hold what an occurrence shows.

    Attributes:
        number: of the occurrence.
        tensor: plain memory; of a DTensor the local part.
        whole: the DTensor that `tensor` is the local part of.
        block: the box of the occurrence that `tensor` takes; None for all of it.
    """

    number: Ref
    tensor: Tensor
    whole: Tensor | None = None
    block: Block | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """An object whose `load_state_dict` must be called with the tree of `node`."""

    node: Node
    live: Any
    path: str


class Matcher:
    """One walk; `homes`, `loads` and `problems` are its results."""

    def __init__(self, skeleton: Skeleton, specs: Mapping[str, LeafSpec], *, trusted: bool) -> None:
        self.homes: list[Home] = []
        self.loads: list[Load] = []
        self.problems: list[str] = []
        self._skeleton = skeleton
        self._specs = specs
        self._keys = skeleton.builder({}, trusted=trusted)
        self._fill = True
        self._placer = Placer()

    def check_refs(self) -> None:
        """Raise CorruptCheckpoint when an occurrence does not fit the leaves that are listed."""
        refs = self._skeleton.refs
        for name in refs.leaf:
            if name not in self._specs:
                raise self._skeleton.corrupt(f"the leaf {name!r} is not listed")
        for number, view in refs.views.items():
            spec = self._specs[refs.leaf[number]]
            size = math.prod(self._skeleton.check_spec(spec)) * dtypes()[spec.dtype].itemsize
            check_view(view, size, spec.name, self._skeleton.path)

    def match(self, node: Node, live: Any, path: str) -> None:
        """Compare one place of the tree."""
        if isinstance(live, Tensor):
            self._tensor(node, live, path)
        elif callable(getattr(live, "state_dict", None)) and not isinstance(live, type):
            self._object(node, live, path)
        elif _is_array(live):
            self._array(node, live, path)
        elif isinstance(live, Mapping):
            self._mapping(node, live, path)
        elif dataclasses.is_dataclass(live) and not isinstance(live, type):
            self._fields(node, [field.name for field in dataclasses.fields(live)], live, path)
        elif isinstance(live, tuple) and hasattr(live, "_fields"):
            self._fields(node, list(live._fields), live, path)
        elif isinstance(live, _SEQUENCES):
            self._sequence(node, live, path)
        # Anything else is a plain value: it takes whatever was saved, in the tree that is returned.

    def _problem(self, path: str, text: str) -> None:
        self.problems.append(f"{path or 'the state itself'}: {text}")

    def _differ(self, node: Node, live: Any, path: str) -> None:
        self._problem(path, f"{_shown(node)} in the checkpoint, {type(live).__name__} here")

    # -- containers ----------------------------------------------------------------------------

    def _mapping(self, node: Node, live: Mapping[Any, Any], path: str) -> None:
        node = node.state if isinstance(node, Obj) else node
        if not isinstance(node, Map):
            self._differ(node, live, path)
            return
        saved = dict(zip(self._keys.keys(node.keys), node.values, strict=True))
        self._pairs(saved, live, path)

    def _pairs(self, saved: Mapping[Any, Node], live: Mapping[Any, Any], path: str) -> None:
        prefix = f"{path}." if path else ""
        for key, value in saved.items():
            if key in live:
                self.match(value, live[key], f"{prefix}{key}")
            else:
                self._problem(f"{prefix}{key}", "unexpected: in the checkpoint, not here")
        for key in live:
            if key not in saved:
                self._problem(f"{prefix}{key}", "missing: here, not in the checkpoint")

    def _fields(self, node: Node, names: Sequence[str], live: Any, path: str) -> None:
        if not isinstance(node, Record):
            self._differ(node, live, path)
            return
        saved = dict(zip(node.fields, node.values, strict=True))
        self._pairs(saved, {name: getattr(live, name) for name in names}, path)

    def _sequence(self, node: Node, live: Sequence[Any], path: str) -> None:
        if _is_plain(node) and all(_is_plain_live(item) for item in live):
            return
        if not isinstance(node, Seq) or node.kind not in ("list", "tuple", "Size"):
            self._differ(node, live, path)
            return
        self._pairs(dict(enumerate(node.items)), dict(enumerate(live)), path)

    # -- tensors -------------------------------------------------------------------------------

    def _tensor(self, node: Node, live: Tensor, path: str) -> None:
        if not isinstance(node, Ref):
            self._differ(node, live, path)
            return
        if is_distributed(type(live)):
            if self._same(node, live, path):
                # What load_state_dict copies from must be distributed like what it copies to.
                self._distributed(node, live if self._fill else torch.empty_like(live), path)
            return
        if is_uninitialized(live):
            return  # The module's own load_state_dict gives it its shape.
        if type(live) not in (Tensor, torch.nn.Parameter) or live.is_meta or live.is_nested:
            self._problem(path, "the live tensor is a subclass or has no memory: cannot be filled")
            return
        if self._same(node, live, path) and self._fill:
            # A copy into an alias of a sparse tensor would give the alias new parts, not the tensor.
            plain = live.layout is torch.strided and not live.is_quantized
            self.homes.append(Home(node, live.detach() if plain else live))

    def _distributed(self, number: Ref, live: Tensor, path: str) -> None:
        """A home that is the local part of a DTensor."""
        try:
            local, placement = self._placer.place(live)
        except Unplaced as exc:
            self._problem(path, str(exc))
            return
        if local.is_meta:
            self._problem(path, "the live tensor has no memory: call to_empty() first")
            return
        block = None if placement.block.sizes == placement.shape else placement.block
        self.homes.append(Home(number, local, live.detach(), block))

    def _same(self, number: Ref, live: Tensor, path: str) -> bool:
        dtype, shape = self.signature(number)
        here = dtype_name(live.dtype)
        if shape != tuple(live.shape):
            self._problem(path, f"shape {list(shape)} in the checkpoint, {list(live.shape)} here")
        elif dtype != here:
            self._problem(path, f"dtype {dtype} in the checkpoint, {here} here")
        elif self._form(number) != _live_form(live):
            form = self._form(number)
            self._problem(path, f"{form} tensor in the checkpoint, {_live_form(live)} here")
        else:
            return True
        return False

    def signature(self, number: Ref) -> tuple[str, tuple[int, ...]]:
        """dtype and shape of the tensor that an occurrence shows."""
        refs = self._skeleton.refs
        spec = self._specs[refs.leaf[number]]
        composite = refs.composites.get(number)
        if composite is not None:
            dtype = composite.meta.get("dtype", spec.dtype)
            return dtype, tuple(composite.meta.get("shape", spec.shape))
        view = refs.views.get(number)
        return (spec.dtype, tuple(spec.shape)) if view is None else (view.dtype, view.shape)

    def _form(self, number: Ref) -> str:
        """What must agree besides dtype and shape: layout, and what a copy cannot change."""
        refs = self._skeleton.refs
        composite = refs.composites.get(number)
        if composite is None or composite.kind == "bits":
            return "strided"
        if composite.kind == "coo":
            return "sparse_coo"
        if composite.kind == "quantized":
            return "quantized per channel" if "axis" in composite.meta else "quantized"
        return f"{composite.meta['layout']} {list(self._specs[refs.leaf[number]].shape)}"

    def _array(self, node: Node, live: Any, path: str) -> None:
        if not isinstance(node, Array):
            if isinstance(node, Ref | Map | Record | Obj | Seq):
                self._differ(node, live, path)
            return
        tensor = as_tensor(live) if live.flags.writeable else None
        if tensor is None or not live.size:
            return  # Delivered in the tree that is returned, as plain values are.
        if self._same(node.ref, tensor, path) and self._fill:
            if tensor.data_ptr() == live.ctypes.data:
                self.homes.append(Home(node.ref, tensor))
            else:
                self._problem(path, "the live array has strides that torch cannot fill")

    # -- objects -------------------------------------------------------------------------------

    def _object(self, node: Node, live: Any, path: str) -> None:
        state = node.state if isinstance(node, Obj) else node
        if not callable(getattr(live, "load_state_dict", None)):
            self._problem(path, f"{type(live).__name__} has no load_state_dict: cannot be restored")
        elif not isinstance(node, Obj) and not isinstance(node, Map):
            self._differ(node, live, path)
        elif isinstance(live, torch.nn.Module):
            self._module(state, live, path)
        else:
            if isinstance(live, Optimizer):
                self._optimizer(state, live, path)
            self.loads.append(Load(state, live, path))

    def _module(self, state: Node, live: torch.nn.Module, path: str) -> None:
        custom = needs_load(live)
        before, self._fill = self._fill, self._fill and not custom
        try:
            self.match(state, live.state_dict(), path)
        finally:
            self._fill = before
        if custom:
            self.loads.append(Load(state, live, path))

    def _optimizer(self, state: Node, live: Optimizer, path: str) -> None:
        saved = _fields_of(state)
        groups, states = saved.get("param_groups"), saved.get("state")
        if not isinstance(groups, Seq) or not isinstance(states, Map):
            return  # Its own form; its load_state_dict judges it.
        sizes = [_group_size(group) for group in groups.items]
        here = [len(group["params"]) for group in live.param_groups]
        if sizes != here:
            text = f"parameter groups of {sizes} tensors in the checkpoint, {here} here"
            self._problem(f"{path}.param_groups" if path else "param_groups", text)
            return
        live_states = live.state_dict().get("state", {})
        parameters = parameters_of(live)
        for key, rows in zip(states.keys, states.values, strict=True):
            if not isinstance(rows, Map) or type(key) is not int:
                continue
            mine = live_states.get(key, {})
            where = f"{path}.state.{key}" if path else f"state.{key}"
            for name, row in _fields_of(rows).items():
                if isinstance(row, Ref):
                    pair = (mine.get(name), parameters.get(key))
                    self._slot(row, pair, f"{where}.{name}", like=name in _LIKE_PARAMETER)

    def _slot(self, number: Ref, pair: tuple[Any, Tensor | None], path: str, *, like: bool) -> None:
        """One tensor of an optimizer: filled in place if it is there already, else allocated.

        Args:
            pair: the live tensor, if any, and the parameter that it belongs to.
            like: it must have the parameter's shape.
        """
        live, parameter = pair
        dtype, shape = self.signature(number)
        mirror = parameter if like else None
        model = live if isinstance(live, Tensor) else mirror
        if model is not None and shape != tuple(model.shape):
            self._problem(path, f"shape {list(shape)} in the checkpoint, {list(model.shape)} here")
        elif (
            type(live) is Tensor
            and self._fill
            and dtype_name(live.dtype) == dtype
            and self._form(number) == _live_form(live) == "strided"
        ):
            self.homes.append(Home(number, live.detach()))
        elif not isinstance(live, Tensor) or is_distributed(type(live)):
            self._distributed_slot(number, model if model is not None else parameter, live, path)

    def _distributed_slot(self, number: Ref, model: Tensor | None, live: Any, path: str) -> None:
        """A slot that is a DTensor, or becomes one because its parameter is and has its shape."""
        dtype, shape = self.signature(number)
        if model is None or not is_distributed(type(model)) or shape != tuple(model.shape):
            return
        if model is live and self._fill and dtype_name(model.dtype) == dtype:
            self._distributed(number, model, path)
        elif shape:  # A number, such as how many steps were taken, is never distributed.
            fresh = torch.empty_like(model.detach(), dtype=dtypes()[dtype])
            self._distributed(number, fresh, path)


def _fields_of(node: Node) -> dict[Any, Node]:
    """A Map's values by those of its keys that are text or numbers."""
    if not isinstance(node, Map):
        return {}
    rows = zip(node.keys, node.values, strict=True)
    return {key: value for key, value in rows if type(key) in PLAIN}


def _group_size(group: Node) -> int:
    params = _fields_of(group).get("params")
    return len(params.items) if isinstance(params, Seq) else -1


def _is_array(live: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(live, numpy.ndarray)


def _children(node: Node) -> Iterable[Node]:
    if isinstance(node, Seq):
        return node.items
    if isinstance(node, Map | Record):
        return node.values
    return ()


def _is_plain(node: Node) -> bool:
    """Whether nothing below the node has a home of its own."""
    return not isinstance(node, Ref | Array | Obj) and all(map(_is_plain, _children(node)))


def _is_plain_live(live: Any) -> bool:
    if isinstance(live, Tensor) or _is_array(live) or callable(getattr(live, "state_dict", None)):
        return False
    if isinstance(live, Mapping):
        return all(map(_is_plain_live, live.values()))
    return not isinstance(live, _SEQUENCES) or all(map(_is_plain_live, live))


def _shown(node: Node) -> str:
    if isinstance(node, Ref):
        return "tensor"
    if isinstance(node, Obj | Record):
        return node.type_name
    if isinstance(node, Map | Seq):
        return node.kind
    return "numpy array" if isinstance(node, Array) else type(node).__name__


def _live_form(live: Tensor) -> str:
    if live.is_quantized:
        per_channel = live.qscheme() not in (torch.per_tensor_affine, torch.per_tensor_symmetric)
        return "quantized per channel" if per_channel else "quantized"
    name = str(live.layout).removeprefix("torch.")
    if name in ("strided", "sparse_coo"):
        return name
    return f"{name} {list(live.values().shape)}"
