"""The random number generators of devices: also where these are not in use yet, and have none.

Used behind the door to devices alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_CURRENT = "current"
"""Beside the types of devices in the states of generators; of their form, so that older releases take it."""

_waiting: list[weakref.ref[_PutBack]] = []
"""At most one, of this process; gone once torch has forgotten it for a seed that was set later."""


class _PutBack:
    """Puts states back when torch begins to use the devices, which it calls this for."""

    def __init__(self, kind: str, states: Mapping[str, Sequence[Tensor]]) -> None:
        self.kind = kind
        self.states = {
            name: [state.clone() for state in states[name]]
            for name in (kind, _CURRENT)
            if name in states
        }

    def __call__(self) -> None:
        _waiting.clear()  # torch keeps this one for good
        module: Any = torch.get_device_module(self.kind)

        def put(state: Tensor, index: int | None = None) -> None:
            # Not `set_rng_state`, which would wait for the lock that torch holds meanwhile.
            place = module.current_device() if index is None else index
            module.default_generators[place].set_state(state)

        _put_all(put, self.states, self.kind, module.device_count())


def generators_of(kind: str, *, in_use: bool) -> dict[str, list[Tensor]]:
    """The states of a type's, and which is the current device's; before it is in use what waits for it."""
    if not in_use:
        waiting = _waiting[0]() if _waiting else None
        return {} if waiting is None or waiting.kind != kind else dict(waiting.states)
    module = torch.get_device_module(kind)
    if hasattr(module, "get_rng_state_all"):
        current = torch.tensor([module.current_device()], dtype=torch.uint8, device="cpu")
        return {kind: list(module.get_rng_state_all()), _CURRENT: [current]}
    return {kind: [module.get_rng_state()]} if hasattr(module, "get_rng_state") else {}


def put_generators_back(
    kind: str, states: Mapping[str, Sequence[Tensor]], *, in_use: bool
) -> tuple[int, int] | None:
    """For `Devices.set_generators`, of a type that is in `states`."""
    module, saved = torch.get_device_module(kind), states[kind]
    count = module.device_count()
    if hasattr(module, "set_rng_state_all"):
        if in_use or not hasattr(module, "_lazy_call"):
            _put_all(module.set_rng_state, states, kind, count)
        elif count:
            waiting = _PutBack(kind, states)
            _waiting[:] = [weakref.ref(waiting)]
            # In the place of seeds: torch sets those that were asked for before behind all other calls.
            module._lazy_call(waiting, seed_all=True)
    elif saved and hasattr(module, "set_rng_state"):  # MPS: there is one device.
        module.set_rng_state(saved[0])
    return None if len(saved) == count else (len(saved), count)


def _put_all(put: Any, states: Mapping[str, Sequence[Tensor]], kind: str, count: int) -> None:
    saved = states[kind]
    for index, state in enumerate(saved[:count]):
        put(state, index)
    # Of older releases it is not known, and of forged states it may be anything.
    current = [int(index) for row in states.get(_CURRENT, ()) for index in row]
    if len(saved) != count and current and current[0] < len(saved):
        # Without a number: a process that does not use its devices yet is asked for it later.
        put(saved[current[0]])
