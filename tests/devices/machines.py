"""Where a test's tensors are: on a CUDA device, or on late ones. The same test runs on both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ckpt_core.system.devices import Devices
from tests.devices.late_devices import PACES, LateDevices

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
"""One of the names that `machine_of` takes; the others are those of paces."""


class OnCuda:
    """The real thing: what is asked of it is late by itself."""

    devices = Devices()
    name = "cuda"

    def put(self, made: Any) -> Any:
        """A tensor, or a module with all that it holds."""
        return made.cuda()

    def run(self, do: Callable[[], Any]) -> None:
        """A piece of training."""
        do()

    def drain(self) -> None:
        """Wait for all of it."""
        torch.cuda.synchronize()


class OnLate:
    """The last of two late devices."""

    name = "cpu"

    def __init__(self, devices: LateDevices) -> None:
        self.devices = devices

    def put(self, made: Any) -> Any:
        for tensor in _tensors(made):
            self.devices.place(tensor, len(self.devices.devices) - 1)
        return made

    def run(self, do: Callable[[], Any]) -> None:
        def with_gradients() -> None:
            with torch.enable_grad():
                do()

        self.devices.run(len(self.devices.devices) - 1, with_gradients)

    def drain(self) -> None:
        self.devices.drain()


Machine = OnCuda | OnLate


def machine_of(name: str) -> Machine:
    """The machine of that name."""
    return OnCuda() if name == "cuda" else OnLate(LateDevices(PACES[name]))


def _tensors(made: Any) -> Iterator[Tensor]:
    if isinstance(made, Tensor):
        yield made
    elif isinstance(made, torch.nn.Module):
        yield from made.state_dict(keep_vars=True).values()
    elif isinstance(made, torch.optim.Optimizer):
        for state in made.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
