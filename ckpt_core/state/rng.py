"""The states of all random number generators, as one object for the state tree."""

from __future__ import annotations

import random
import sys
import warnings
from typing import Any

import torch

from ckpt_core.errors import RestoreWarning
from ckpt_core.state.generators import NO_DEVICES, check_states
from ckpt_core.system.devices import Devices


class RngState:
    """Put one into the state: a save takes the generators' states, a restore puts them back.

    Covers Python's `random`, numpy's global generator (once numpy is imported), torch's CPU
    generator and, of each type of device that is in use, the generator of each device. All are eager:
    their bytes are copied before `save` returns.

    Args:
        devices: the door to them; for tests.
    """

    # Also of those that were pickled before there was one.
    _devices = Devices()

    def __init__(self, *, devices: Devices | None = None) -> None:
        if devices is not None:
            self._devices = devices

    def state_dict(self) -> dict[str, Any]:
        """The states as of now; called by `save` on the training thread. Initializes no device."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if sys.modules.get("numpy") is not None:
            import numpy as np

            state["numpy"] = np.random.get_state()
        return state | self._devices.generators()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the generators back; called by `restore` when everything else has been loaded.

        Devices that this machine lacks are left out, and so is numpy when it is not installed. Devices
        that are not in use yet are not initialized: their generators are put back when they are, whatever
        was seeded before, and are saved meanwhile as they will be.

        Raises:
            ValueError: these are no states of such generators; nothing was put back.
        """
        check_states(state)
        saved: Any = state.get("numpy")
        here = None if saved is None else numpy_kind()
        kind = saved["bit_generator"] if isinstance(saved, dict) else saved and saved[0]
        if here is not None and kind != here:
            raise ValueError(f"NumPy's global generator was a {kind}, and is a {here}")
        # Order matters: torch refuses a state of another length, before it takes it.
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        if here is not None:
            import numpy as np

            np.random.set_state(saved)
        of_devices = {key: state[key] for key in state.keys() - NO_DEVICES}
        if (counts := self._devices.set_generators(of_devices)) is not None:
            warnings.warn(
                f"random numbers of devices: {counts[0]} of them were visible when the state was saved, and "
                f"{counts[1]} are. The current device goes on with those of the one that was current then, "
                f"where the checkpoint tells which",
                RestoreWarning,
                stacklevel=2,
            )


def numpy_kind() -> str | None:
    """Name of the bit generator below NumPy's global one; None where NumPy is not installed."""
    try:
        import numpy as np
    except ImportError:
        return None
    found: str = np.random.get_state(legacy=False)["bit_generator"]
    return found
