"""FSDP1 without its collectives: each rank's runs of the parameters, cut out of the flat ones where they lie.

A rank holds a stretch of each flat parameter. What of a parameter lies in it is a run of its elements, which
`FlatPart` says to the engine; the same of what an optimizer keeps for it. Nothing is copied: an optimizer's
step is all that changes it. How FSDP lays parameters out has no public name, so it is believed only where it
can be seen: `Cuts.of` takes the plain forms alone, and `shows` compares with FSDP's own sharded states, byte
for byte, before the first save of a fit. Everything else is left to FSDP's own way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.optim import Optimizer

from ckpt_core import FlatPart

State = dict[str, Any]


class What(StrEnum):
    """What an optimizer keeps under one key."""

    RUN = "run"
    NUMBER = "number"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the things that an optimizer keeps for a parameter."""

    key: str
    kind: What
    dtype: torch.dtype | None = None

    @property
    def nothing(self) -> Tensor:
        """What a rank has of it that has nothing of the parameter."""
        return torch.empty(0, dtype=self.dtype)


Form = tuple[Kind, ...]
"""Everything that it keeps for one."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A parameter, and what of it this rank holds.

    Attributes:
        flat: the flat parameter that it is in.
        shape: its own.
        place: where the run begins in this rank's stretch of the flat parameter.
        numel: elements of the run.
        begin: the first of them, counted in the parameter.
        owner: what the optimizer knows: the parameter's view, or the flat parameter.
        is_alone: the optimizer keeps what is the run's alone; else, of the whole stretch.
    """

    flat: Any
    shape: tuple[int, ...]
    place: int
    numel: int
    begin: int
    owner: Tensor
    is_alone: bool

    @property
    def stretch(self) -> Tensor:
        """This rank's memory of the flat parameter, whatever that shows just now."""
        found: Tensor = getattr(self.flat, "_local_shard", self.flat)
        return found.detach()

    def part_of(self, stretch: Tensor) -> FlatPart:
        """The run of it, of memory that lies as the stretch does."""
        return FlatPart(stretch[self.place : self.place + self.numel], self.shape, self.begin)

    def kept_part(self, kept: Mapping[str, Any], form: Kind) -> Any:
        """What stands for one of the things that an optimizer keeps for the parameter."""
        if form.kind is What.NOTHING:
            return None
        if form.kind is What.NUMBER:
            # One rank's is stored: that of the rank with the first element.
            mine = kept[form.key].reshape(1) if self.numel and not self.begin else form.nothing
            return FlatPart(mine, (), 0)
        if not self.numel:
            return FlatPart(form.nothing, self.shape, 0)
        if self.is_alone:
            return FlatPart(kept[form.key], self.shape, self.begin)
        return self.part_of(kept[form.key])


class Cuts:
    """The runs of one model, and of its optimizers, by name and number as everywhere else.

    Attributes:
        runs: by name of the parameter, in the order of the model.
    """

    def __init__(self, model: nn.Module, runs: dict[str, Run]) -> None:
        self.runs = runs
        self._model = model

    @property
    def are_in_use(self) -> bool:
        """Whether the model computes with other memory just now, which a change of this would not reach."""
        return any(run.flat.data_ptr() != run.stretch.data_ptr() for run in self.runs.values())

    @classmethod
    def of(cls, model: nn.Module) -> Cuts | None:
        """None where a parameter lies in a form that is not known here. No collective."""
        runs: dict[str, Run] = {}
        for prefix, module in model.named_modules():
            handle = module._handle if isinstance(module, Fsdp) else None
            if handle is None:
                continue
            if not _is_plain(module, handle):
                return None
            for name, run in _runs_of(handle.flat_param):
                runs[clean_tensor_name(f"{prefix}.{name}" if prefix else name)] = run
        return cls(model, runs) if runs else None

    def model_state(self, names: Iterable[str]) -> State:
        """Live parts of parameters, and copies of buffers, which the next forward pass may change."""
        buffers = self._buffers()
        return {
            name: run.part_of(run.stretch)
            if (run := self.runs.get(name)) is not None
            else buffers[name].detach().clone()
            for name in names
        }

    def _buffers(self) -> dict[str, Tensor]:
        """By clean name. Looked up at each save: `self.mean = self.mean * d + x` makes another tensor."""
        found = self._model.named_buffers(remove_duplicate=False)
        return {clean_tensor_name(name): buffer for name, buffer in found}

    def shows(self, theirs: Mapping[str, Any]) -> bool:
        """Whether FSDP's own sharded state has the same names, shapes and bytes."""
        buffers = self._buffers()
        for name, value in theirs.items():
            run = self.runs.get(name)
            if run is None:
                buffer = buffers.get(name)
                if buffer is None or not _is_same_memory(buffer, value):
                    return False
            elif not _is_part(value, run.part_of(run.stretch)):
                return False
        return self.runs.keys() <= theirs.keys()


class Kept:
    """What one optimizer keeps for the parameters of a model."""

    def __init__(self, cuts: Cuts, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._cuts = cuts
        names: dict[int, list[str]] = {}
        for name, run in cuts.runs.items():
            names.setdefault(id(run.owner), []).append(name)
        self._of_groups = [
            [name for param in group["params"] for name in names.get(id(param), [""])]
            for group in optimizer.param_groups
        ]

    @cached_property
    def named(self) -> list[tuple[str, Run]]:
        """Its parameters, in their order."""
        return [(name, self._cuts.runs[name]) for names in self._of_groups for name in names]

    def forms(self) -> dict[str, Form] | None:
        """Of the parameters that this rank has something of; None: there is more to it. No collective."""
        if any("" in names for names in self._of_groups) or not _is_usual(self.optimizer):
            return None
        named, state = self.named, self.optimizer.state
        if not {id(key) for key in state} <= {id(run.owner) for _, run in named}:
            return None
        found: dict[str, Form] = {}
        for name, run in named:
            form = _form(state.get(run.owner, {}), run)
            if form is None:
                return None
            if run.numel:
                found[name] = form
        return found

    def state(self, forms: Mapping[str, Form]) -> State:
        """As its state_dict, of live parts. `forms` are those of all ranks."""
        kept = self.optimizer.state
        states = {
            number: {
                one.key: run.kept_part(kept.get(run.owner, {}), one) for one in forms.get(name, ())
            }
            for number, (name, run) in enumerate(self.named)
            if forms.get(name)
        }
        return {"state": states, "param_groups": self._groups()}

    def shows(self, theirs: State, forms: Mapping[str, Form]) -> bool:
        """Whether FSDP's own sharded state, by number, has the same keys and bytes."""
        ours = self.state(forms)
        groups = [[group["params"] for group in one["param_groups"]] for one in (ours, theirs)]
        if groups[0] != groups[1] or ours["state"].keys() != theirs["state"].keys():
            return False
        return all(
            kept.keys() == theirs["state"][number].keys()
            and all(_is_kept(theirs["state"][number][key], part) for key, part in kept.items())
            for number, kept in ours["state"].items()
        )

    def _groups(self) -> list[State]:
        numbers = iter(range(len(self.named)))
        rows = zip(self.optimizer.param_groups, self._of_groups, strict=True)
        return [
            {**{key: value for key, value in group.items() if key != "params"}, "params": found}
            for group, names in rows
            for found in [[next(numbers) for _ in names]]
        ]


def merged(everyones: Iterable[dict[str, Form] | None]) -> dict[str, Form] | None:
    """The forms of all ranks together; None where some rank has none, or two differ."""
    found: dict[str, Form] = {}
    for forms in everyones:
        if forms is None or any(
            found.setdefault(name, forms[name]) != forms[name] for name in forms
        ):
            return None
    return found


def _is_usual(optimizer: Any) -> bool:
    """Whether its state is all that there is to save and to load."""
    kind = type(optimizer)
    usual = (
        kind.state_dict is Optimizer.state_dict
        and kind.load_state_dict is Optimizer.load_state_dict
    )
    hooks = [
        *("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
        *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
    ]
    return usual and not any(getattr(optimizer, name, None) for name in hooks)


def _form(kept: Mapping[str, Any], run: Run) -> Form | None:
    numel = run.numel if run.is_alone else run.stretch.numel()
    found = []
    for key, value in kept.items():
        if value is None:
            found.append(Kind(key, What.NOTHING))
        elif type(value) is not Tensor or value.layout is not torch.strided:
            return None
        elif value.dim() == 0:
            found.append(Kind(key, What.NUMBER, value.dtype))
        elif value.shape == (numel,) and value.is_contiguous():
            found.append(Kind(key, What.RUN, value.dtype))
        else:
            return None
    return tuple(found)


def _is_kept(theirs: Any, part: FlatPart | None) -> bool:
    if part is None or part.shape:
        return theirs is None if part is None else _is_part(theirs, part)
    if type(theirs) is not Tensor or theirs.dim():
        return False
    return not part.tensor.numel() or _is_equal(theirs.reshape(1), part.tensor)


def _is_plain(module: Any, handle: Any) -> bool:
    flat = handle.flat_param
    return bool(
        handle.uses_sharded_strategy
        and (handle.rank, handle.world_size) == (dist.get_rank(), dist.get_world_size())
        and not handle._offload_params
        and handle._fsdp_extension is None
        and module.mixed_precision.buffer_dtype is None
        and not flat._shared_param_infos
        and not any(flat._param_extensions)
        and all(flat._contiguities)
    )


def _runs_of(flat: Any) -> Iterator[tuple[str, Run]]:
    """Of one flat parameter, under names within its module."""
    owners = flat._params if flat._params is not None else [flat] * len(flat._fqns)
    rows = zip(flat._fqns, flat._shapes, flat._shard_param_infos, owners, strict=True)
    for name, shape, info, owner in rows:
        place, numel, begin = 0, 0, 0
        if info.in_shard:
            place, numel = info.offset_in_shard, info.numel_in_shard
            begin = info.intra_param_start_idx
        yield name, Run(flat, tuple(shape), place, numel, begin, owner, owner is not flat)


def _is_same_memory(buffer: Tensor, value: Any) -> bool:
    return (
        type(value) is Tensor
        and (value.data_ptr(), value.dtype) == (buffer.data_ptr(), buffer.dtype)
        and value.shape == buffer.shape
    )


def _is_part(theirs: Any, part: FlatPart) -> bool:
    """Whether a sharded tensor is of that shape, and equal where both have something on this rank."""
    if type(theirs) is not ShardedTensor or tuple(theirs.size()) != part.shape:
        return False
    for shard in theirs.local_shards():
        rows = torch.Size(part.shape[1:]).numel()
        first = int(shard.metadata.shard_offsets[0]) * rows
        low = max(first, part.begin)
        high = min(first + shard.tensor.numel(), part.begin + part.tensor.numel())
        if theirs.dtype != part.tensor.dtype or (
            low < high
            and not _is_equal(
                shard.tensor.reshape(-1)[low - first : high - first],
                part.tensor[low - part.begin : high - part.begin],
            )
        ):
            return False
    return True


def _is_equal(one: Tensor, other: Tensor) -> bool:
    # As bytes: numbers that are not equal to themselves are.
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
