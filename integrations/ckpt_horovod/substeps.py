"""The user's own update on some of the parameters at a time.

The user's `step` runs on a view of the optimizer: an object of the user's class that shares the state, and
whose groups hold the chosen parameters alone. No optimizer is implemented here. LightCheck wrote SGD and Adam
anew for this, which is wrong for every other optimizer, and for AdamW, whose class derives from Adam.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ckpt_core import ConfigError

_ONCE = ("_need_device_dtype_check_for_fused", "_warned_capturable_if_run_uncaptured")
"""What torch's optimizers note in their first step: a check or a warning that is not to come again."""


def unhooked(step: Any) -> Any:
    """A `step` without torch's hooks around it: a step in parts calls them once for each part otherwise."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step


class SubSteps:
    """One step of `optimizer`, in parts. Made for each step; used on the training thread.

    Args:
        optimizer: whose parameters are updated.
        base: the user's class, whose `step` does it.
    """

    def __init__(self, optimizer: Any, base: Any) -> None:
        self._optimizer = optimizer
        self._update = unhooked(base.step)
        self._view = base.__new__(base)
        self._view.__dict__.update(optimizer.__dict__)
        self._known = dict(self._view.__dict__)
        self._group_of = {
            id(param): number
            for number, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        }
        self._had_state = len(optimizer.state)

    def update(self, params: Sequence[Tensor]) -> None:
        """Update these parameters, and no others.

        Raises:
            ConfigError: the optimizer keeps something for all parameters together, so that a step in parts is
                another step than the whole.
        """
        groups = self._optimizer.param_groups
        chosen: dict[int, list[Tensor]] = {}
        for param in params:
            chosen.setdefault(self._group_of[id(param)], []).append(param)
        view = self._view
        view.param_groups = [
            {**groups[number], "params": part} for number, part in sorted(chosen.items())
        ]
        self._update(view)
        noted = {key: view.__dict__[key] for key in _ONCE if key in view.__dict__}
        self._optimizer.__dict__.update(noted)
        self._known.update(noted)
        for number, used in zip(sorted(chosen), view.param_groups, strict=True):
            self._check(groups[number], used, "its groups")
        self._check(self._known, view.__dict__, "itself")

    def finish(self) -> None:
        """Bring new entries of the state into the order in which a whole step would have made them.

        All-reduces finish in another order on each rank, and all ranks are to save one and the same tree.
        """
        state = self._optimizer.state
        made = set(list(state)[self._had_state :])
        groups = self._optimizer.param_groups
        for param in (param for group in groups for param in group["params"] if param in made):
            state[param] = state.pop(param)

    def _check(self, before: dict[str, Any], after: dict[str, Any], where: str) -> None:
        changed = [
            key
            for key, value in after.items()
            if key not in ("params", "param_groups") and before.get(key) is not value
        ]
        if changed:
            name = type(self._optimizer).__name__
            raise ConfigError(
                f"{name} changed {changed[0]!r} of {where} in a step on some of the parameters, so it cannot "
                f"be stepped in parts. Some parameters are updated and others are not: restore the newest "
                f"checkpoint, and pass separable=False to ckpt_horovod.DistributedOptimizer"
            )
