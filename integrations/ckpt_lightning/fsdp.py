"""FSDP of the first kind (FSDPStrategy): its sharded states as distributed tensors, under everybody's names.

A parameter lies there as a run of a flat one, which no name of a model leads to. FSDP's own sharded states
put each parameter together again, one unit at a time, and give every rank a part of it: that is a collective,
in each save, and no rank ever holds the whole. The parts are copies, which training does not change.

    save      model_state, optimizer_state     parts as DTensors; optimizer states by number, as elsewhere
    restore   Parts(...).tree  -> filled by the engine ->  Parts.load()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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

State = dict[str, Any]


def model_state(strategy: FSDPStrategy) -> State:
    """The parts of this rank, and copies of the rest. Called on every rank: a collective."""
    found = _distributed(_sharded_model(strategy))
    # Buffers change in the next forward pass.
    return {
        name: value.clone()
        if isinstance(value, Tensor) and not hasattr(value, "device_mesh")
        else value
        for name, value in found.items()
    }


def optimizer_state(strategy: FSDPStrategy, optimizer: Any) -> State:
    """The same of an optimizer, by number of the parameter. Called on every rank: a collective."""
    state: State = _distributed(_by_number(_sharded_optimizer(strategy, optimizer)))
    return state


class Parts:
    """What a step is restored into: FSDP's own sharded states, whose memory `tree` shows as DTensors.

    Made and loaded on every rank: collectives. Nothing of the model is changed before `load`. Optimizers that
    have no state yet get one, as by a step that changes nothing, which `drop` takes from them again.

    Args:
        optimizers: those that are restored too.
    """

    def __init__(self, strategy: FSDPStrategy, optimizers: list[Any]) -> None:
        self._strategy = strategy
        self._model = _sharded_model(strategy)
        self._fresh = [optimizer for optimizer in optimizers if not optimizer.state]
        for optimizer in self._fresh:
            _init_optim_state(optimizer)
        self._optimizers = [(one, _sharded_optimizer(strategy, one)) for one in optimizers]
        self.tree: State = {"state_dict": _distributed(self._model)}
        if optimizers:
            states = [_distributed(_by_number(state)) for _, state in self._optimizers]
            # Rates and the like are whatever was saved.
            self.tree["optimizer_states"] = [{**state, "param_groups": None} for state in states]

    def drop(self) -> None:
        """Nothing is loaded: leave the optimizers as they were."""
        for optimizer in self._fresh:
            optimizer.state.clear()

    def load(self, found: Mapping[str, Any], *, strict: bool) -> None:
        """Let FSDP take what the engine has filled in."""
        model = _model_of(self._strategy)
        with _sharded(model):
            model.load_state_dict(self._model, strict=strict)
            states = found.get("optimizer_states") or []
            for (optimizer, state), saved in zip(self._optimizers, states, strict=False):
                _named_groups(state, saved["param_groups"])
                optimizer.load_state_dict(Fsdp.optim_state_dict_to_load(model, optimizer, state))


def _sharded_model(strategy: FSDPStrategy) -> State:
    model = _model_of(strategy)
    with _sharded(model):
        state: State = model.state_dict()
    return state


def _sharded_optimizer(strategy: FSDPStrategy, optimizer: Any) -> State:
    model = _model_of(strategy)
    with _sharded(model):
        # Lightning wraps the optimizers that it hands out.
        state: State = Fsdp.optim_state_dict(model, getattr(optimizer, "_optimizer", optimizer))
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


def _by_number(state: State) -> State:
    """FSDP calls parameters by their names; all other optimizers count them."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    number = {name: at for at, name in enumerate(names)}
    groups = [
        {**g, "params": [number[name] for name in g["params"]]} for g in state["param_groups"]
    ]
    return {
        "state": {number[name]: values for name, values in state["state"].items()},
        "param_groups": groups,
    }


def _named_groups(state: State, saved: list[State]) -> None:
    """Give the groups their saved settings; the names of their parameters stay."""
    if len(saved) != len(state["param_groups"]):
        raise ConfigError(
            f"the step has {len(saved)} groups of parameters, the optimizer has "
            f"{len(state['param_groups'])}: make it as it was made"
        )
    for group, settings in zip(state["param_groups"], saved, strict=True):
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
