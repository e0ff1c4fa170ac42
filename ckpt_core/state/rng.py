"""The states of all random number generators, as one object for the state tree."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ckpt_core.state.generators import NO_DEVICES, check_states
from ckpt_core.system.devices import Devices


class RngState:
    """Put one into the state: a save takes the generators' states, a restore puts them back.

    Covers Python's `random`, numpy's global generator (once numpy is imported), torch's CPU
    generator and, of each type of device that is in use, the generator of each device. All are eager:
    their bytes are copied before `save` returns.
    """

    def state_dict(self) -> dict[str, Any]:
        """The states as of now; called by `save` on the training thread. Initializes no device."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if "numpy" in sys.modules:
            import numpy as np

            state["numpy"] = np.random.get_state()
        return state | _states_of_devices()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the generators back; called by `restore` when everything else has been loaded.

        Devices that this machine lacks are left out, and so is numpy when it is not installed. Devices
        that are not in use yet are not initialized: their generators are put back when they are.

        Raises:
            ValueError: these are no states of such generators; nothing was put back.
        """
        check_states(state)
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            try:
                import numpy as np
            except ImportError:
                pass
            else:
                np.random.set_state(state["numpy"])
        _put_back({key: state[key] for key in state.keys() - NO_DEVICES})


def _states_of_devices() -> dict[str, list[Tensor]]:
    """By type of device; nothing of a type that is not in use, or whose backend cannot be asked."""
    devices = Devices()
    kind = devices.kind()
    if kind is None or not devices.in_use():
        return {}
    module = torch.get_device_module(kind)
    if hasattr(module, "get_rng_state_all"):
        return {kind: list(module.get_rng_state_all())}
    return {kind: [module.get_rng_state()]} if hasattr(module, "get_rng_state") else {}


def _put_back(states: Mapping[str, Sequence[Tensor]]) -> None:
    """Of the type of device that this process has, one state for each, in order."""
    kind = Devices().kind()
    if kind is None or kind not in states:
        return
    module = torch.get_device_module(kind)
    mine = states[kind][: module.device_count()]
    if hasattr(module, "set_rng_state_all"):
        for index, state in enumerate(mine):
            module.set_rng_state(state, index)
    elif mine and hasattr(module, "set_rng_state"):  # MPS: there is one device.
        module.set_rng_state(mine[0])
