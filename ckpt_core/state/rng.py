"""The states of all random number generators, as one object for the state tree."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from ckpt_core.state.generators import check_states


class RngState:
    """Put one into the state: a save takes the generators' states, a restore puts them back.

    Covers Python's `random`, numpy's global generator (once numpy is imported), torch's CPU
    generator and, once CUDA is in use, the generator of each CUDA device. All are eager: their
    bytes are copied before `save` returns.
    """

    def state_dict(self) -> dict[str, Any]:
        """The states as of now; called by `save` on the training thread."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        if "numpy" in sys.modules:
            import numpy as np

            state["numpy"] = np.random.get_state()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = list(torch.cuda.get_rng_state_all())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the generators back; called by `restore` when everything else has been loaded.

        Devices that this machine lacks are left out, and so is numpy when it is not installed.

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
        if "cuda" in state and torch.cuda.is_available():
            count = torch.cuda.device_count()
            for device, device_state in enumerate(state["cuda"][:count]):
                torch.cuda.set_rng_state(device_state, device)
