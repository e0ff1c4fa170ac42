"""FSDP of the first kind (FSDPStrategy): its sharded states as parts of tensors, under everybody's names.

A parameter lies there as a run of a flat one, which no name of a model leads to. `cutting` finds the runs, in
the plain forms of it. In all others, FSDP's own sharded states put each parameter together again, one unit at
a time, and give every rank a part of it: collectives, in each save, and no rank ever holds the whole. The
parts are copies then, which training does not change.

    save      model_state, optimizer_state     optimizer states by number, as elsewhere
    restore   Into.of(...).tree  -> filled by the engine ->  .load(), or .drop()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
from torch.distributed.fsdp import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor, Shard

from ckpt_core import ConfigError
from ckpt_lightning.cutting import Cuts, Form, Kept, State, merged
from ckpt_lightning.runs import Offered, RunParts, is_filled

_KNOWN = "_ckpt_lightning_cuts"


@dataclass
class _Known:
    """What the ranks have found out together of a model, which all of them know alike.

    Attributes:
        model: whose it is.
        cuts: None: FSDP's own way.
        names: what its state has.
        forms: of the optimizers that were met; None: FSDP's own way.
    """

    model: torch.nn.Module
    cuts: Cuts | None
    names: list[str]
    forms: dict[Any, dict[str, Form] | None] = field(default_factory=dict)


def is_cut(strategy: FSDPStrategy) -> bool:
    """Whether what was saved last of the model is live, and no copies."""
    known = getattr(strategy, _KNOWN, None)
    return known is not None and known.model is strategy.model and known.cuts is not None


def model_state(strategy: FSDPStrategy) -> State:
    """The parts of this rank, and copies of the rest. Called on every rank; a collective where it must be."""
    known: _Known | None = getattr(strategy, _KNOWN, None)
    if known is None or known.model is not strategy.model:
        model = _model_of(strategy)
        theirs, cuts = _sharded_model(strategy), Cuts.of(model)
        shown = _all_agree(strategy, cuts is not None and cuts.shows(theirs))
        known = _Known(model, cuts if shown else None, list(theirs))
        setattr(strategy, _KNOWN, known)
        if known.cuts is None:
            return _copied(theirs)
    if known.cuts is None:
        return _copied(_sharded_model(strategy))
    return known.cuts.model_state(known.names)


def optimizer_state(strategy: FSDPStrategy, optimizer: Any) -> State:
    """The same of an optimizer, by number of the parameter. Called on every rank, behind `model_state`."""
    known: _Known = getattr(strategy, _KNOWN)
    own = _bare(optimizer)
    if known.cuts is None or known.forms.get(own, {}) is None:
        return _by_fsdp(strategy, own)
    kept = Kept(known.cuts, own)
    mine, agreed = kept.forms(), known.forms.get(own)
    # Order matters: what all ranks know, all of them know alike, so they come to the same collectives.
    if not _all_agree(strategy, _is_still(mine, agreed)):
        theirs = _by_number(_sharded_optimizer(strategy, own))
        agreed = merged(_of_all(mine))
        if not _all_agree(strategy, agreed is not None and kept.shows(theirs, agreed)):
            agreed = None
        known.forms[own] = agreed
        if agreed is None:
            state: State = _distributed(theirs)
            return state
    assert agreed is not None
    return kept.state(agreed)


def _is_still(mine: dict[str, Form] | None, agreed: dict[str, Form] | None) -> bool:
    return (
        mine is not None
        and agreed is not None
        and all(agreed.get(name) == form for name, form in mine.items())
    )


def _all_agree(strategy: FSDPStrategy, mine: bool) -> bool:
    flag = torch.tensor(int(mine), device=strategy.root_device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def _of_all(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _bare(optimizer: Any) -> Any:
    # Lightning wraps the optimizers that it hands out.
    return getattr(optimizer, "_optimizer", optimizer)


def _copied(theirs: State) -> State:
    """FSDP's own state of a model, whose parts are copies; buffers change in the next forward pass."""
    return {
        name: value.clone()
        if isinstance(value, Tensor) and not hasattr(value, "device_mesh")
        else value
        for name, value in _distributed(theirs).items()
    }


def _by_fsdp(strategy: FSDPStrategy, optimizer: Any) -> State:
    state: State = _distributed(_by_number(_sharded_optimizer(strategy, optimizer)))
    return state


@dataclass
class Into:
    """What a step is restored into, and what must be done behind that. Made and loaded on every rank.

    Optimizers without a state get one, as by a step that changes nothing, which `drop` takes from them again.

    Attributes:
        tree: for the engine to fill; nothing of the model is changed before `load`.
    """

    tree: State
    _optimizers: list[Any]
    _fresh: list[Any]
    _parts: Parts | RunParts

    @classmethod
    def of(cls, strategy: FSDPStrategy, optimizers: list[Any]) -> Into:
        """By runs, without a collective for what is read, where all ranks can; else by FSDP's own states.

        Args:
            optimizers: those that are restored too.
        """
        fresh = [one for one in optimizers if not one.state]
        for optimizer in fresh:
            _init_optim_state(optimizer)
        parts = _by_runs(strategy, optimizers) or Parts(strategy, optimizers)
        return cls(parts.tree, optimizers, fresh, parts)

    def drop(self) -> None:
        """Nothing is loaded: leave the optimizers as they were."""
        for optimizer in self._fresh:
            optimizer.state.clear()

    def load(self, found: Mapping[str, Any], *, strict: bool) -> None:
        """Take what the engine has filled in; `found` is the tree that it gave.

        Raises:
            ConfigError: an optimizer has other groups than the one that was saved.
        """
        states = found.get("optimizer_states") or []
        groups = [state["param_groups"] for state in states]
        for optimizer, saved in zip(self._optimizers, groups, strict=False):
            _check_groups(optimizer.param_groups, saved)
        if isinstance(self._parts, Parts):
            self._parts.load(states, strict=strict)
            return
        self._parts.load(states)
        for optimizer, saved in zip(self._optimizers, groups, strict=False):
            _set_groups(_bare(optimizer).param_groups, saved)


def _by_runs(strategy: FSDPStrategy, optimizers: list[Any]) -> RunParts | None:
    model = _model_of(strategy)
    cuts = Cuts.of(model)
    able = cuts is not None and not cuts.are_in_use and is_filled(model)
    if not _all_agree(strategy, able):
        return None
    assert cuts is not None
    kept = [Kept(cuts, _bare(optimizer)) for optimizer in optimizers]
    forms = [merged(_of_all(one.forms())) for one in kept]
    return None if None in forms else RunParts(cuts, model, kept, forms)


class Parts:
    """What a step is restored into: FSDP's own sharded states, whose memory `tree` shows as DTensors.

    Made and loaded on every rank: collectives. Nothing of the model is changed before `load`.

    Args:
        optimizers: those that are restored too, which have their state already.
    """

    def __init__(self, strategy: FSDPStrategy, optimizers: list[Any]) -> None:
        self._strategy = strategy
        self._model = _sharded_model(strategy)
        self._optimizers = [(one, _sharded_optimizer(strategy, one)) for one in optimizers]
        self.tree: State = {"state_dict": _distributed(self._model)}
        if optimizers:
            states = [_distributed(_by_number(state)) for _, state in self._optimizers]
            # Rates and the like are whatever was saved.
            self.tree["optimizer_states"] = [
                {"state": Offered(state["state"]), "param_groups": None} for state in states
            ]

    def load(self, saved: list[State], *, strict: bool) -> None:
        """Let FSDP take what the engine has filled in, of what was saved of each optimizer."""
        model = _model_of(self._strategy)
        with _sharded(model):
            model.load_state_dict(self._model, strict=strict)
            for (optimizer, state), theirs in zip(self._optimizers, saved, strict=False):
                _set_groups(state["param_groups"], theirs["param_groups"])
                for number, name in enumerate(_names(state)):
                    if number not in theirs["state"]:
                        state["state"].pop(name, None)
                optimizer.load_state_dict(Fsdp.optim_state_dict_to_load(model, optimizer, state))


def _sharded_model(strategy: FSDPStrategy) -> State:
    model = _model_of(strategy)
    with _sharded(model):
        state: State = model.state_dict()
    return state


def _sharded_optimizer(strategy: FSDPStrategy, optimizer: Any) -> State:
    model = _model_of(strategy)
    with _sharded(model):
        state: State = Fsdp.optim_state_dict(model, _bare(optimizer))
    return state


@contextmanager
def _sharded(model: torch.nn.Module) -> Iterator[None]:
    with Fsdp.state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        # The engine takes them off the device, behind training.
        ShardedStateDictConfig(offload_to_cpu=False),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    ):
        yield


def _model_of(strategy: FSDPStrategy) -> torch.nn.Module:
    assert strategy.model is not None
    return strategy.model


def _names(state: State) -> list[str]:
    return [name for group in state["param_groups"] for name in group["params"]]


def _by_number(state: State) -> State:
    """FSDP calls parameters by their names; all other optimizers count them."""
    number = {name: at for at, name in enumerate(_names(state))}
    groups = [
        {**g, "params": [number[name] for name in g["params"]]} for g in state["param_groups"]
    ]
    return {
        "state": {number[name]: values for name, values in state["state"].items()},
        "param_groups": groups,
    }


def _check_groups(live: list[State], saved: list[State]) -> None:
    if len(saved) != len(live):
        raise ConfigError(
            f"the step has {len(saved)} groups of parameters, the optimizer has {len(live)}: "
            f"make it as it was made"
        )


def _set_groups(live: list[State], saved: list[State]) -> None:
    """Give the groups their saved settings; their parameters, or the names of those, stay."""
    for group, settings in zip(live, saved, strict=True):
        group.update({name: value for name, value in settings.items() if name != "params"})


def _distributed(value: Any) -> Any:
    """The same tree with DTensors in place of sharded tensors, of the same memory."""
    if isinstance(value, ShardedTensor):
        return _as_dtensor(value)
    if isinstance(value, dict):
        return {key: _distributed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_distributed(item) for item in value]
    return value


@lru_cache
def _all_ranks(device_type: str, ranks: int) -> DeviceMesh:
    # It has no process groups: the engine asks it for places alone. Thousands of tensors share one.
    return DeviceMesh(device_type, list(range(ranks)), _init_backend=False)


def _as_dtensor(sharded: ShardedTensor) -> DTensor:
    if dist.get_world_size(sharded._process_group) != dist.get_world_size():
        raise ConfigError(
            "FSDPStrategy shards within a part of the ranks alone: pass device_mesh=(replicas, shards), "
            "so that it tells where the parts are"
        )
    size = sharded.size()
    shards = sharded.local_shards()
    # FSDP cuts along the first dimension, as DTensors do; the last ranks may have got nothing.
    local = shards[0].tensor if shards else torch.empty(0, *size[1:], dtype=sharded.dtype)
    mesh = _all_ranks(local.device.type, dist.get_world_size())
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(
        local.detach(), mesh, [Shard(0)], run_check=False, shape=size, stride=stride
    )
