"""moonclip: what has not changed is skipped, and the rest is compressed, on threads of its own."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

from ckpt_core.bench.contenders.base import Contender, Handle, Profile, State


class Moonclip(Contender):
    """`CheckpointManager` with its defaults; the state goes through the model's way, tensor by tensor."""

    name: ClassVar[str] = "moonclip"
    title: ClassVar[str] = "moonclip"
    fsyncs: ClassVar[str] = "yes"
    disk_states: ClassVar[int] = 3
    memory_states: ClassVar[int] = 4
    modules: ClassVar[tuple[str, ...]] = ("moonclip",)
    distribution: ClassVar[str] = "moonclip"
    setup: ClassVar[str] = "defaults, max_full_snapshots=1"

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        library: Any = import_module("moonclip")
        self._manager: Any = library.CheckpointManager(str(profile.root), max_full_snapshots=1)

    def save(self, state: State, step: int) -> Handle:
        """Returns once the state has been copied."""
        self._manager.save(step=step, model=_Model(state))
        return _Pending(self._manager)

    def tidy(self) -> None:
        """Retention is part of the save."""

    def load_into(self, state: State) -> None:
        """Newest snapshot, copied into the live tensors as a model does it."""
        self._manager.load_latest(model=_Model(state))


class _Model:
    """A state, as a module has one."""

    def __init__(self, state: State) -> None:
        self._state = state

    def state_dict(self) -> State:
        """The live tensors."""
        return self._state

    def load_state_dict(self, loaded: State) -> None:
        """Into the live tensors."""
        for name, tensor in self._state.items():
            tensor.copy_(loaded[name])


class _Pending:
    persist_s: float | None = None

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def barrier(self) -> None:
        """Nothing to wait for."""

    def wait_durable(self) -> None:
        """Wait until all has been written and synced."""
        self._manager.flush()
