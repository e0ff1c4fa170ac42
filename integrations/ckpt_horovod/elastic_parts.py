"""What a `TorchState` consists of: saved as parts of one tree, told to other ranks, put back.

handled    model, optimizer, whatever has state_dict and load_state_dict: by Horovod's handlers
values     all the rest, by name
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from horovod.torch.elastic.state import SamplerStateHandler
from horovod.torch.functions import broadcast_object, broadcast_parameters
from horovod.torch.mpi_ops import rank
from torch import Tensor, nn
from torch.optim import Optimizer

from ckpt_core import ConfigError, RngState
from ckpt_horovod.elastic_settings import ATTRIBUTES, paths_of
from ckpt_horovod.iterations import Iterations
from ckpt_horovod.optimizer import _forget_reductions, keeping_groups


@dataclass(frozen=True)
class Standing:
    """Where the first rank stands when ranks meet; all do as it says.

    Attributes:
        live: it has been training, and no rank was lost: its state counts.
        initial: it holds the state of its construction, to begin from if there is no step.
        count: iterations of its optimizer.
        stateless: names of optimizers that have no state yet.
    """

    live: bool
    initial: bool
    count: int
    stateless: frozenset[str]


@dataclass(frozen=True)
class _Initial:
    """What Horovod's handlers do not copy of the state at construction."""

    loose: dict[str, Tensor]
    values: dict[str, Any]
    rng: dict[str, Any]
    count: int


class Parts:
    """The parts of one State, once Horovod's constructor has made handlers and values.

    Args:
        state: the State.
        iterations: of its optimizer.
        per_rank: see TorchState.
    """

    def __init__(self, state: Any, iterations: Iterations, per_rank: Iterable[str]) -> None:
        self._state = state
        self._iterations = iterations
        self._handle_objects()
        self._own = paths_of(per_rank, self.values())
        iterations.keep_per_rank(self._own)
        handled = {name: item.value for name, item in self._handlers.items() if name != "optimizer"}
        state.optimizer.attach(**handled, **{ATTRIBUTES: _Values(self)})
        self._initial: _Initial | None = _Initial(
            {name: param.clone() for name, param in self._loose().items()},
            copy.deepcopy(_noted(self.values(), keep=True)),
            RngState().state_dict(),
            iterations.count,
        )

    def values(self) -> dict[str, Any]:
        """The plain values of now."""
        return {name: getattr(self._state, name) for name in self._state._saved_state}

    def set_values(self, values: dict[str, Any]) -> None:
        """Set those that the State has; one that is new to it stays as it was made."""
        for name, value in values.items():
            if name in self._state._saved_state:
                # An object that loads is filled: the program holds it, too.
                found = _taken(getattr(self._state, name), value, name)
                setattr(self._state, name, found)

    def replaced(self, name: str, value: Any) -> None:
        """The user has put another object in the place of a handled one."""
        self._state.optimizer.attach(**{name: value})
        if self._initial is None:
            self._drop_copies()

    # -- the state at construction ----------------------------------------------------------------

    @property
    def have_initial(self) -> bool:
        """Whether `go_back` is possible."""
        return self._initial is not None

    def go_back(self) -> None:
        """Make everything what it was at construction, where that is kept."""
        if self._initial is None:
            return
        with keeping_groups([handler.value for handler in self._of(Optimizer).values()]):
            for handler in self._handlers.values():
                handler.restore()
                # Loading may put the copy itself into use, and training would change it.
                handler.save()
        for name, param in self._loose().items():
            if name in self._initial.loose:
                param.copy_(self._initial.loose[name])
        self.set_values(copy.deepcopy(self._initial.values))
        RngState().load_state_dict(self._initial.rng)
        self._iterations.count = self._initial.count

    def drop_initial(self) -> None:
        """There is a step to go back to: free the copies of model and optimizer."""
        if self._initial is not None:
            self._initial = None
            self._drop_copies()

    def _drop_copies(self) -> None:
        for handler in self._handlers.values():
            for name in vars(handler):
                if name.startswith("_saved_"):  # Horovod's name for them, in each of its handlers
                    setattr(handler, name, None)

    # -- one state on all ranks -------------------------------------------------------------------

    def standing(self, *, live: bool) -> Standing:
        """For the first rank to tell."""
        optimizers = self._of(Optimizer)
        stateless = [name for name, handler in optimizers.items() if not handler.value.state]
        return Standing(live, self.have_initial, self._iterations.count, frozenset(stateless))

    def take_tensors(self, told: Standing) -> None:
        """Take the first rank's models and optimizers; called on all ranks."""
        # Order matters: to fill an empty optimizer Horovod makes a step, which may change parameters.
        for name, handler in self._of(Optimizer).items():
            if name in told.stateless:
                handler.value.state.clear()
            else:
                handler.sync()
        for handler in self._of(nn.Module).values():
            handler.sync()
        broadcast_parameters(self._loose(), root_rank=0)
        self._iterations.count = told.count
        self.forget_gradients()

    def take_values(self, *, keep_own: bool) -> None:
        """Take the first rank's learning rates, schedulers, samplers and plain values; called on all ranks.

        Args:
            keep_own: those that belong to each rank alone stay, and those of which a part does.
        """
        for handler in self._of(Optimizer).values():
            groups = handler.value.param_groups
            told = tell([_without_params(group) for group in groups])
            for group, options in zip(groups, told, strict=True):
                group.update(options)
        kept = self._own if keep_own else ()
        for name, handler in self._handlers.items():
            if not isinstance(handler.value, Optimizer | nn.Module) and not _is_of(name, kept):
                handler.sync()
        values = self.values().items()
        mine = {k: v for k, v in values if not _is_of(f"{ATTRIBUTES}.{k}", kept)}
        told = tell(_noted(mine))
        if rank():  # the first has them, as the objects that the program holds
            self.set_values(told)

    def forget_gradients(self) -> None:
        """All-reduces that will never end, and gradients of a step that was not made."""
        for handler in self._of(Optimizer).values():
            if hasattr(handler.value, "_allreduce_delay"):
                _forget_reductions(handler.value)
            else:
                handler.value.zero_grad()

    # -- inside -----------------------------------------------------------------------------------

    @property
    def _handlers(self) -> dict[str, Any]:
        found: dict[str, Any] = self._state._handlers
        return found

    def _loose(self) -> dict[str, Tensor]:
        """Parameters of the optimizer that no handler knows: those that `model=` lacks, such as a loss's."""
        found: dict[str, Tensor] = self._state.optimizer._tree.loose()
        return found

    def _of(self, kind: type[Any]) -> dict[str, Any]:
        return {name: one for name, one in self._handlers.items() if isinstance(one.value, kind)}

    def _handle_objects(self) -> None:
        """Objects that load are handled as Horovod handles samplers, instead of being pickled anew."""
        plain = self._state._saved_state
        if plain.get("model", self) is None:
            del plain["model"]
        for name, value in list(plain.items()):
            if _loads(value):
                self._handlers[name] = SamplerStateHandler(value)
                del plain[name]


class _Values:
    """The plain values as a part of the saved tree: as of whenever they are asked for."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def state_dict(self) -> dict[str, Any]:
        """For a save."""
        return self._parts.values()

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """For a restore."""
        self._parts.set_values(values)


def tell(mine: Any) -> Any:
    """What the first rank gives here; called on all ranks."""
    return broadcast_object(mine, root_rank=0, name="ckpt_horovod.elastic")


@dataclass(frozen=True)
class _State:
    """What stands for an object among the values that gives its state, and loads it.

    Attributes:
        given: its state.
        of: the object; None where it is told to other ranks, of which each has its own.
    """

    given: Any
    of: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _State:
        return _State(copy.deepcopy(self.given, memo), self.of)


_PLAIN = int | float | str | bytes | None


def _loads(value: Any) -> bool:
    return (
        not isinstance(value, type)
        and hasattr(value, "state_dict")
        and hasattr(value, "load_state_dict")
    )


def _holds(value: Any, within: tuple[int, ...] = ()) -> bool:
    """Whether something in a container loads its state."""
    if not isinstance(value, dict | list | tuple) or id(value) in within:
        return False
    within = (*within, id(value))
    items = value.values() if isinstance(value, dict) else value
    return any(
        isinstance(one, _State) or _loads(one) or _holds(one, within)
        for one in items
        if not isinstance(one, _PLAIN)
    )


def _noted(value: Any, *, keep: bool = False) -> Any:
    """Values, with states for objects that load: a scheduler would be copied with its optimizer."""
    if _loads(value):
        return _State(value.state_dict(), value if keep else None)
    if not _holds(value):
        return value
    if type(value) is tuple:
        return tuple(_noted(item, keep=keep) for item in value)
    if isinstance(value, dict | list):
        value = copy.copy(value)
        for key in _keys(value):
            value[key] = _noted(value[key], keep=keep)
    return value


def _taken(live: Any, saved: Any, name: str) -> Any:
    """What belongs in the place of `live`: what was saved, in which objects that load are filled and kept.

    Raises:
        ConfigError: the first rank has an object there, and this one none.
    """
    if isinstance(saved, _State):
        live, saved = (live if saved.of is None else saved.of), saved.given
        if not _loads(live):
            raise ConfigError(
                f"{name}: the first rank has an object there that loads its state, and this rank has "
                f"{type(live).__name__}: make it before the function that hvd.elastic.run wraps"
            )
    if _loads(live) and saved is not None:
        with keeping_groups([live] if isinstance(live, Optimizer) else []):
            live.load_state_dict(saved)
        return live
    if not _holds(saved) and not _holds(live):
        return saved
    if type(saved) is tuple:
        return tuple(_taken(_at(live, key), saved[key], f"{name}.{key}") for key in _keys(saved))
    if isinstance(saved, dict | list):
        for key in _keys(saved):
            saved[key] = _taken(_at(live, key), saved[key], f"{name}.{key}")
    return saved


def _keys(value: Any) -> Iterable[Any]:
    return list(value) if isinstance(value, dict) else range(len(value))


def _at(live: Any, key: Any) -> Any:
    """What a live dict, list or tuple has there."""
    if isinstance(live, dict):
        return live.get(key)
    within = isinstance(live, list | tuple) and isinstance(key, int) and key < len(live)
    return live[key] if within else None


def _is_of(name: str, paths: Iterable[str]) -> bool:
    """Whether one of the paths is this part of the tree, or lies in it."""
    return any(path == name or path.startswith(f"{name}.") for path in paths)


def _without_params(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
