"""A step into FSDP1's runs: each rank reads what it holds, and nothing is put together again.

Bytes are read into memory of its own, and copied when all of them are there: what a damaged step has touched
is no model's. That takes no collective, where FSDP's own way takes one for each parameter and each state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
from torch.distributed.fsdp._common_utils import clean_tensor_name

from ckpt_core import ConfigError, FlatPart
from ckpt_lightning.cutting import Cuts, Form, Kept, Kind, Run, State, What

_METHODS = (
    *("state_dict", "_save_to_state_dict", "get_extra_state"),
    *("load_state_dict", "_load_from_state_dict", "set_extra_state"),
)
_HOOKS = (
    *("_state_dict_pre_hooks", "_state_dict_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def is_filled(model: nn.Module) -> bool:
    """Whether its load_state_dict does nothing but fill its memory, in every module."""
    return all(isinstance(module, Fsdp) or _is_usual(module) for module in model.modules())


class Offered(dict[Any, Any]):
    """A mapping that shows none of its entries: what a step does not have of them is no difference."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class RunParts:
    """As `fsdp.Parts`. Made and loaded on every rank, without a collective.

    Args:
        kept: the optimizers that are restored too, which have their state already.
        forms: of each of them, on all ranks together.
    """

    def __init__(self, cuts: Cuts, model: nn.Module, kept: Sequence[Kept], forms: Sequence[Any]):
        self._cuts = cuts
        self._kept = list(zip(kept, forms, strict=True))
        self._buffers = _persistent(model)
        fresh = {name: torch.empty_like(buffer) for name, buffer in self._buffers.items()}
        parts = {name: _fresh(run.part_of(run.stretch)) for name, run in cuts.runs.items()}
        self.tree: State = {"state_dict": {**parts, **fresh}}
        if kept:
            self.tree["optimizer_states"] = [_places(one, form) for one, form in self._kept]

    def load(self, saved: Sequence[State]) -> None:
        """Copy what the engine has filled in; `saved` are the states of optimizers that the step has.

        Raises:
            ConfigError: of what lies in one flat parameter the step has states in part; nothing is changed.
        """
        for (kept, _), state in zip(self._kept, saved, strict=False):
            _check_flat(kept, state["state"])
        model = self.tree["state_dict"]
        for name, run in self._cuts.runs.items():
            run.part_of(run.stretch).tensor.copy_(model[name].tensor)
        for name, buffer in self._buffers.items():
            buffer.detach().copy_(model[name])
        rows = zip(self._kept, self.tree.get("optimizer_states", ()), saved, strict=False)
        for (kept, forms), filled, state in rows:
            for number, (name, run) in enumerate(kept.named):
                if number not in state["state"]:
                    kept.optimizer.state.pop(run.owner, None)
                    continue
                for kind in forms.get(name, ()):
                    _put(kept, run, kind, filled["state"][number][kind.key])


def _is_usual(module: nn.Module) -> bool:
    kind = type(module)
    return all(getattr(kind, name) is getattr(nn.Module, name) for name in _METHODS) and not any(
        getattr(module, name) for name in _HOOKS
    )


def _persistent(model: nn.Module) -> dict[str, Tensor]:
    return {
        clean_tensor_name(f"{prefix}.{name}" if prefix else name): buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def _fresh(part: FlatPart) -> FlatPart:
    return replace(part, tensor=torch.empty_like(part.tensor))


def _places(kept: Kept, forms: Mapping[str, Form]) -> State:
    """Where the states of an optimizer are read to. Rates and the like are whatever was saved."""
    states = {
        number: {kind.key: _place(kept, run, kind) for kind in forms[name]}
        for number, (name, run) in enumerate(kept.named)
        if forms.get(name)
    }
    return {"state": Offered(states), "param_groups": None}


def _check_flat(kept: Kept, saved: Mapping[int, Any]) -> None:
    sides: tuple[set[int], set[int]] = (set(), set())
    for number, (_, run) in enumerate(kept.named):
        sides[number in saved].add(id(run.owner))
    if sides[0] & sides[1]:
        raise ConfigError(
            "the step has no state of the optimizer for some of the parameters that FSDP keeps as one: "
            "resume it with FSDPStrategy(use_orig_params=True)"
        )


def _place(kept: Kept, run: Run, kind: Kind) -> Any:
    if kind.kind is What.NUMBER:
        return torch.empty((), dtype=kind.dtype)  # whoever has something of the parameter needs it
    part = run.kept_part(kept.optimizer.state.get(run.owner, {}), kind)
    return None if part is None else _fresh(part)


def _put(kept: Kept, run: Run, kind: Kind, filled: Any) -> None:
    state = kept.optimizer.state
    if not run.numel:
        if run.is_alone:
            state.pop(run.owner, None)  # made by the step that changed nothing
        return
    if kind.kind is What.NUMBER:
        state[run.owner][kind.key].copy_(filled)
    elif kind.kind is What.RUN:
        run.kept_part(state[run.owner], kind).tensor.copy_(filled.tensor)
