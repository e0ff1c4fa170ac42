"""The walk of `bind`: skeleton and live state side by side, noting homes, loads and differences."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ckpt_core.state.arrays import as_tensor
from ckpt_core.state.build import check_view
from ckpt_core.state.distributed import FlatPart, Placer, Unplaced, is_distributed
from ckpt_core.state.generators import is_generator
from ckpt_core.state.homes import Home
from ckpt_core.state.kinds import KINDS
from ckpt_core.state.leaf import dtype_name, dtypes
from ckpt_core.state.memory import is_gone, why_gone
from ckpt_core.state.nodes import Array, Map, Node, Obj, Opaque, Record, Ref, Seq
from ckpt_core.state.objects import is_extra, kept_shape, needs_load, parameters_of, takes, to_fill
from ckpt_core.state.pickled import Literal, Unlike, pair_up
from ckpt_core.state.plain import (
    SEQUENCES,
    fields_of,
    group_size,
    has_state,
    is_array,
    is_plain,
    is_plain_live,
    live_form,
    refused,
    shown,
)
from ckpt_core.state.selection import Difference, Selection
from ckpt_core.state.skeleton import Skeleton
from ckpt_core.state.special import is_uninitialized
from ckpt_core.types import LeafSpec, Placement


@dataclass(frozen=True, slots=True)
class Load:
    """An object whose `load_state_dict` must be called with the tree of `node`.

    `partial`: the tree lacks entries of a module, which stay as they are.
    """

    node: Node
    live: Any
    path: str
    partial: bool = False


class Matcher:
    """One walk; `homes`, `loads` and `problems` are its results.

    `literals` are live tensors, arrays, generators and objects, each with the one that was pickled in its
    place;
    `loaded` are live tensors that a `load_state_dict` will fill, for what they share with others.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        specs: Mapping[str, LeafSpec],
        *,
        trusted: bool,
        selection: Selection | None = None,
    ) -> None:
        self.homes: list[Home] = []
        self.loaded: list[Home] = []
        self.literals: list[Literal] = []
        self.loads: list[Load] = []
        self.problems: list[Difference] = []
        self._skeleton, self._refs = skeleton, skeleton.refs
        self._specs = specs
        self._keys = skeleton.builder({}, trusted=trusted)
        self._selection = selection
        self._unit: str | None = None
        self._fill = True
        self._placer = Placer()

    def check_refs(self) -> None:
        """Raise CorruptCheckpoint when an occurrence does not fit the leaves that are listed."""
        refs = self._refs
        names = self._skeleton.leaf_names()
        for name in names:
            if name not in self._specs:
                raise self._skeleton.corrupt(f"the leaf {name!r} is not listed")
        for number, view in refs.views.items():
            if refs.leaf[number] not in names:
                continue
            spec = self._specs[refs.leaf[number]]
            size = math.prod(self._skeleton.check_spec(spec)) * dtypes()[spec.dtype].itemsize
            check_view(view, size, spec.name, self._skeleton.path)

    def match(self, node: Node, live: Any, path: str) -> None:
        """Compare one place of the tree."""
        if isinstance(live, Tensor):
            self._tensor(node, live, path)
        elif isinstance(live, FlatPart):
            self._flat_part(node, live, path)
        elif has_state(live):
            self._object(node, live, path)
        elif is_array(live):
            self._array(node, live, path)
        elif is_plain(node) and is_plain_live(live):
            return  # Any placeholder does: it takes what was saved, in the tree that is returned.
        elif isinstance(node, Opaque) and not is_plain_live(live):
            self.literals += self._pickled(node, live, path)
        elif is_generator(live):
            self._differ(node, live, path)
        elif isinstance(live, Mapping):
            self._mapping(node, live, path)
        elif dataclasses.is_dataclass(live) and not isinstance(live, type):
            self._fields(node, [field.name for field in dataclasses.fields(live)], live, path)
        elif isinstance(live, tuple) and hasattr(live, "_fields"):
            self._fields(node, list(live._fields), live, path)
        elif isinstance(live, SEQUENCES):
            self._sequence(node, live, path)

    def _problem(self, path: str, text: str, *, unit: str | None = None) -> None:
        unit = self._unit if unit is None else unit
        self.problems.append(Difference(path, text, path if unit is None else unit))

    def _differ(self, node: Node, live: Any, path: str) -> None:
        self._problem(path, f"{shown(node)} in the checkpoint, {type(live).__name__} here")

    # -- containers ----------------------------------------------------------------------------

    def _mapping(self, node: Node, live: Mapping[Any, Any], path: str) -> None:
        node = node.state if isinstance(node, Obj) else node
        if not isinstance(node, Map):
            self._differ(node, live, path)
            return
        self._pairs(self._by_key(node), live, path)

    def _by_key(self, node: Map) -> dict[Any, Node]:
        return dict(zip(self._keys.keys(node.keys), node.values, strict=True))

    def _pairs(self, saved: Mapping[Any, Node], live: Mapping[Any, Any], path: str) -> None:
        prefix = f"{path}." if path else ""
        for key, value in saved.items():
            if not self._takes(f"{prefix}{key}"):
                continue
            if key in live:
                self.match(value, live[key], f"{prefix}{key}")
            else:
                self._problem(f"{prefix}{key}", "unexpected: in the checkpoint, not here")
        for key in live:
            if key not in saved and self._takes(f"{prefix}{key}"):
                self._problem(f"{prefix}{key}", "missing: here, not in the checkpoint")

    def _takes(self, path: str) -> bool:
        return self._selection is None or self._selection.takes(path)

    def _fields(self, node: Node, names: Sequence[str], live: Any, path: str) -> None:
        if not isinstance(node, Record):
            self._differ(node, live, path)
            return
        saved = dict(zip(node.fields, node.values, strict=True))
        here = {name: getattr(live, name) for name in names if hasattr(live, name)}
        self._pairs(saved, here, path)

    def _sequence(self, node: Node, live: Sequence[Any], path: str) -> None:
        if not isinstance(node, Seq) or not KINDS[node.kind].homes:
            self._differ(node, live, path)
            return
        self._pairs(dict(enumerate(node.items)), dict(enumerate(live)), path)

    def _pickled(self, node: Opaque, live: Any, path: str) -> list[Literal]:
        """What is filled in place of a container that was pickled for the sake of its type."""
        try:
            return list(pair_up(self._keys.tree(node), live, path))
        except Unlike as exc:
            self._problem(*exc.args, unit=path)
            return []

    # -- tensors -------------------------------------------------------------------------------

    def _tensor(self, node: Node, live: Tensor, path: str) -> None:
        if not isinstance(node, Ref):
            self._differ(node, live, path)
            return
        if is_distributed(type(live)):
            if self._same(node, live, path):
                # What load_state_dict copies from must be distributed like what it copies to.
                into = live if self._fill else torch.empty_like(live)
                self._distributed(node, into, path, is_live=self._fill)
            return
        if is_uninitialized(live) and not live.is_meta:
            return  # The module's own load_state_dict gives it its shape.
        if type(live) not in (Tensor, torch.nn.Parameter) or live.is_meta or live.is_nested:
            what = "has no memory: call to_empty() first" if live.is_meta else "is no plain one"
            self._problem(path, f"the live tensor {what}")
            return
        if self._same(node, live, path):
            # A copy into an alias of a sparse tensor would give the alias new parts, not the tensor.
            plain = live.layout is torch.strided and not live.is_quantized
            if problem := why_gone(live):
                self._problem(path, problem)
                return
            found = self.homes if self._fill else self.loaded
            found.append(Home(node, live.detach() if plain else live, path))

    def _distributed(self, number: Ref, live: Tensor, path: str, *, is_live: bool = True) -> None:
        if placed := self._placed(live, path):
            whole = live.detach()
            self.homes.append(Home.of_part(number, placed, path, whole=whole, is_live=is_live))

    def _flat_part(self, node: Node, live: FlatPart, path: str) -> None:
        if not isinstance(node, Ref):
            self._differ(node, live, path)
        elif self._same(node, live.tensor, path, tuple(live.shape)) and (
            placed := self._placed(live, path)
        ):
            self.homes.append(Home.of_part(node, placed, path))

    def _placed(self, live: Tensor | FlatPart, path: str) -> tuple[Tensor, Placement] | None:
        try:
            local, placement = self._placer.place(live)
        except Unplaced as exc:
            self._problem(path, str(exc))
            return None
        if is_gone(local):
            self._problem(path, "the live tensor has no memory: call to_empty() first")
            return None
        return local, placement

    def _same(
        self, number: Ref, live: Tensor, path: str, whole: tuple[int, ...] | None = None
    ) -> bool:
        dtype, shape = self._refs.signature(number, self._specs)
        here = dtype_name(live.dtype)
        expected = tuple(live.shape) if whole is None else whole
        if shape != expected:
            self._problem(path, f"shape {list(shape)} in the checkpoint, {list(expected)} here")
        elif dtype != here:
            self._problem(path, f"dtype {dtype} in the checkpoint, {here} here")
        elif self._refs.form(number, self._specs) != live_form(live):
            form = self._refs.form(number, self._specs)
            self._problem(path, f"{form} tensor in the checkpoint, {live_form(live)} here")
        else:
            return True
        return False

    def _array(self, node: Node, live: Any, path: str) -> None:
        if not isinstance(node, Array):
            if isinstance(node, Ref | Map | Record | Obj | Seq):
                self._differ(node, live, path)
            return
        if not live.flags.writeable:
            return  # Delivered in the tree that is returned, as plain values are.
        tensor = as_tensor(live)
        if tensor is None:
            dtype, _ = self._refs.signature(node.ref, self._specs)
            self._problem(path, f"dtype {dtype} in the checkpoint, {live.dtype} here")
        elif self._same(node.ref, tensor, path) and self._fill and live.size:
            alias = tensor.data_ptr() == live.ctypes.data
            self.homes.append(Home(node.ref, tensor, path, array=None if alias else live))

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
            if self._selection is not None:
                self._selection.check_whole(path, live)
            if isinstance(live, Optimizer):
                self._unit = path
                self._optimizer(state, live, path)
                self._unit = None
            if text := refused(state, live):
                self._problem(path, text)
            self.loads.append(Load(state, live, path))

    def _module(self, state: Node, live: torch.nn.Module, path: str) -> None:
        here = live.state_dict()
        custom = needs_load(live, here)
        before, self._fill = self._fill, self._fill and not custom
        found: tuple[list[Any], ...] = (self.homes, self.loaded, self.problems)
        counts = list(map(len, found))
        try:
            self._module_values(state, here if custom else to_fill(live, here), path)
        finally:
            self._fill = before
        if self.problems[counts[2] :] and takes(live, here, lambda: self._stand_ins(state)):
            custom = True
            for noted, count in zip(found, counts, strict=True):
                del noted[count:]
        if custom:
            partial = self._selection is not None and not self._selection.is_whole(path)
            self.loads.append(Load(state, live, path, partial))

    def _module_values(self, state: Node, here: Any, path: str) -> None:
        """Compare all but extra state, which has any form that the module takes."""
        if not isinstance(state, Map) or not isinstance(here, Mapping):
            self.match(state, here, path)
            return
        saved = self._by_key(state)
        if not self._fill:  # Else there is none, and what is called so is a tensor to fill.
            extra = set(filter(is_extra, here.keys() & saved.keys()))
            saved, here = (
                {key: value for key, value in side.items() if key not in extra}
                for side in (saved, here)
            )
        self._pairs(saved, here, path)

    def _stand_ins(self, state: Node) -> Any:
        """What `load_state_dict` would be given, of the right names and shapes, before bytes are read."""
        made = {}
        for name in self._skeleton.leaf_names():
            spec = self._specs[name]
            shape, dtype = self._skeleton.check_spec(spec), dtypes()[spec.dtype]
            made[name] = torch.zeros((), dtype=dtype, device="cpu").expand(shape)  # No memory.
        return self._skeleton.builder(made, trusted=False, rehearsal=True).tree(state)

    def _optimizer(self, state: Node, live: Optimizer, path: str) -> None:
        saved = fields_of(state)
        groups, states = saved.get("param_groups"), saved.get("state")
        if not isinstance(groups, Seq) or not isinstance(states, Map):
            return  # Its own form; its load_state_dict judges it.
        sizes = [group_size(group) for group in groups.items]
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
            mine = now if isinstance(now := live_states.get(key), Mapping) else {}
            where = f"{path}.state.{key}" if path else f"state.{key}"
            for name, row in fields_of(rows).items():
                if isinstance(row, Ref):
                    owner = parameters.get(key)
                    pair = mine.get(name), kept_shape(live, name, owner)
                    self._slot(row, pair, f"{where}.{name}", parameter=owner)

    def _slot(
        self, number: Ref, pair: tuple[Any, Any], path: str, *, parameter: Tensor | None
    ) -> None:
        """One tensor of an optimizer: filled in place if it is there already, else allocated.

        Args:
            pair: the live tensor, if any, and the shape that it must have, if that is known.
            parameter: that it belongs to.
        """
        (live, wanted), (dtype, shape) = pair, self._refs.signature(number, self._specs)
        if wanted is not None and shape != wanted:
            self._problem(path, f"shape {list(shape)} in the checkpoint, {list(wanted)} here")
        elif parameter is not None and parameter.is_meta and not is_distributed(type(parameter)):
            self._problem(path, "its parameter has no memory here: call to_empty() first")
        elif (
            type(live) is Tensor
            and self._fill
            and shape == tuple(live.shape)
            and dtype_name(live.dtype) == dtype
            and self._refs.form(number, self._specs) == live_form(live) == "strided"
        ):
            if not is_gone(live):  # Else load_state_dict makes a new one.
                self.homes.append(Home(number, live.detach(), path))
        elif live is None and wanted is not None and (device := self._device(number, parameter)):
            # By way of host memory, load_state_dict would copy it again, and wait for each.
            fresh = torch.empty(shape, dtype=dtypes()[dtype], device=device)
            self.homes.append(Home(number, fresh, path, is_live=False))
        elif not isinstance(live, Tensor) or is_distributed(type(live)):
            model = live if isinstance(live, Tensor) else parameter
            self._distributed_slot(number, model, live, path)

    def _device(self, number: Ref, like: Tensor | None) -> torch.device | None:
        """Where a slot of a fresh optimizer is made, if that is the device of its parameter."""
        if like is None or like.is_cpu or like.is_meta or not self._fill:
            return None
        plain = type(like) in (Tensor, torch.nn.Parameter)
        strided = self._refs.form(number, self._specs) == "strided"
        return like.device if plain and strided else None

    def _distributed_slot(self, number: Ref, model: Tensor | None, live: Any, path: str) -> None:
        """A slot that is a DTensor, or becomes one because its parameter is and has its shape."""
        dtype, shape = self._refs.signature(number, self._specs)
        if model is None or not is_distributed(type(model)) or shape != tuple(model.shape):
            return
        if model is live and self._fill and dtype_name(model.dtype) == dtype:
            self._distributed(number, model, path)
        elif shape:  # A number, such as how many steps were taken, is never distributed.
            fresh = torch.empty_like(model.detach(), dtype=dtypes()[dtype])
            self._distributed(number, fresh, path, is_live=False)
