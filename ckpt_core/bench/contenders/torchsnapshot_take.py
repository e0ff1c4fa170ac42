"""torchsnapshot's asynchronous snapshot."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

from ckpt_core.bench.contenders.base import (
    Contender,
    Handle,
    Profile,
    State,
)


class TorchSnapshot(Contender):
    """`Snapshot.async_take` with its defaults; one snapshot in flight, as its users do."""

    name: ClassVar[str] = "torchsnapshot"
    title: ClassVar[str] = "torchsnapshot"
    fsyncs: ClassVar[str] = "no"
    modules: ClassVar[tuple[str, ...]] = ("torchsnapshot",)
    distribution: ClassVar[str] = "torchsnapshot"
    setup: ClassVar[str] = "async_take, defaults"

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        self._library: Any = import_module("torchsnapshot")
        self._pending: _Pending | None = None

    def _app_state(self, state: State) -> dict[str, Any]:
        # A plain UserDict around the live tensors: its state_dict() is the state itself.
        return {"state": self._library.StateDict(**state)}

    def save(self, state: State, step: int) -> Handle:
        """Start a snapshot, after the previous one has ended."""
        if self._pending is not None:
            self._pending.wait_durable()
        path = str(self._paths.next(step))
        self._pending = _Pending(self._library.Snapshot.async_take(path, self._app_state(state)))
        return self._pending

    def load_into(self, state: State) -> None:
        """Load into the live tensors."""
        snapshot = self._library.Snapshot(str(self._paths.current()))
        snapshot.restore(self._app_state(state))

    def close(self) -> None:
        """Wait for the last snapshot."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait_durable()


class _Pending:
    persist_s: float | None = None

    def __init__(self, pending: Any) -> None:
        self._pending = pending

    def barrier(self) -> None:
        """The call returns once every tensor is staged."""

    def wait_durable(self) -> None:
        """Wait until its metadata is written."""
        self._pending.wait()
