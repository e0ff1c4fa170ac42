"""Who saves a state that is on a device: this engine in each mode, and peers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ckpt_core.bench.contenders import Contender, State, contender_class
from ckpt_core.bench.contenders.ours import CkptCore

if TYPE_CHECKING:
    from ckpt_core import SaveHandle
    from ckpt_core.checkpointer import Checkpointer
    from ckpt_core.options import Options


@dataclass(slots=True)
class Started:
    """A save of this engine."""

    handle: SaveHandle
    checkpointer: Checkpointer
    timeout_s: float
    persist_s: float | None = None

    def barrier(self) -> None:
        """What the hook of an optimizer calls."""
        self.checkpointer.wait_staged()

    def wait_staged(self) -> None:
        """Until the bytes are out of training's way."""
        self.handle.staged.result(self.timeout_s)

    def wait_durable(self) -> None:
        """Until the step is committed."""
        self.handle.committed.result(self.timeout_s)


class Host(CkptCore):
    """Leaves are copied to page-locked memory."""

    title: ClassVar[str] = "ckpt-core"
    mode: ClassVar[str] = "host"

    def _options(self) -> Options:
        return dataclasses.replace(super()._options(), mode=self.mode, in_flight=1)

    @property
    def settings(self) -> str:
        """Mode and memory."""
        return f"mode={self.mode}, in_flight=1, {super().settings}"

    def prepare(self, state: State) -> None:
        """What is told before training."""
        assert self._checkpointer is not None
        self._checkpointer.prepare(state)

    def save(self, state: State, step: int) -> Started:
        """Asynchronous save of all leaves."""
        assert self._checkpointer is not None
        handle = self._checkpointer.save(step, state)
        return Started(handle, self._checkpointer, self._profile.timeout_s)


class OnDevice(Host):
    """Leaves are cloned on the device first."""

    title: ClassVar[str] = "ckpt-core, cloned on the device"
    mode: ClassVar[str] = "device"


class Auto(Host):
    """As the engine chooses."""

    title: ClassVar[str] = "ckpt-core, mode auto"
    mode: ClassVar[str] = "auto"


REGISTRY: dict[str, type[Host] | None] = {
    "ckpt_core": Host,
    "ckpt_core_device": OnDevice,
    "ckpt_core_auto": Auto,
    "torch_save": None,
    "dcp_async_overlapped": None,
    "torch_checkpointing": None,
}
"""Name -> class; None: as in `ckpt_core.bench.contenders`."""


def way_class(name: str) -> type[Contender]:
    """The class of a way."""
    return REGISTRY[name] or contender_class(name)
