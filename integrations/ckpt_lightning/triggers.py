"""When to save: the arguments of the callback, checked once, as one policy of ckpt_core."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from operator import or_
from typing import Any

from ckpt_core import ConfigError, EveryNSteps, EverySeconds

_RENAMED = {
    "dirpath": "it is the first argument, the root",
    "filename": "steps have fixed names, step-000000000120",
    "every_n_train_steps": "it is every_n_steps here",
    "verbose": "every save is in the log of ckpt_core",
    "save_weights_only": "a step holds the whole state; take ['state_dict'] of ckpt_lightning.load(path)",
    "save_on_train_epoch_end": "epochs are saved after everything that belongs to them",
    "enable_version_counter": "a step is never overwritten by another run",
    "auto_insert_metric_name": "steps have fixed names, step-000000000120",
    "keep_last": "pass options=Options(keep_last=...)",
}


@dataclass(frozen=True)
class Triggers:
    """What starts a save; any of them does. With none, every epoch is saved.

    Attributes:
        every_n_steps: at the multiples of this many optimizer steps.
        every_n_epochs: after each of this many epochs.
        train_time_interval: when this much time has passed since the last save.
        policy: any policy of ckpt_core.
        save_last: the state at the end of training, whatever the others say.
        save_on_exception: the last whole step when training fails in the next one.
    """

    every_n_steps: int | None = None
    every_n_epochs: int | None = None
    train_time_interval: timedelta | float | None = None
    policy: Any = None
    save_last: bool = True
    save_on_exception: bool = False

    def __post_init__(self) -> None:
        for name in ("every_n_steps", "every_n_epochs"):
            _check_count(name, getattr(self, name))
        for name in ("save_last", "save_on_exception"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")

    def schedule(self, *, monitors: bool) -> Schedule:
        """What decides during one fit. `monitors`: a monitored metric asks for saves as well."""
        parts: list[Any] = []
        if self.every_n_steps is not None:
            parts.append(EveryNSteps(self.every_n_steps))
        if self.train_time_interval is not None:
            parts.append(EverySeconds(self.train_time_interval))
        if self.policy is not None:
            if not all(callable(getattr(self.policy, name, None)) for name in ("due", "saved")):
                text = (
                    "pass a policy of ckpt_core, for instance EveryNSteps(100) | EverySeconds(600)"
                )
                raise ConfigError(f"policy={self.policy!r} is no policy: {text}")
            parts.append(self.policy)
        with suppress(TypeError):  # of one of another make, which knows no `|`
            # Together: beside multiples of a number, what saves at any step fits levels that want those.
            parts = [reduce(or_, parts)] if parts else []
        every_n_epochs = self.every_n_epochs
        if not parts and every_n_epochs is None and not monitors:
            every_n_epochs = 1
        return Schedule(tuple(parts), every_n_epochs)


@dataclass
class Schedule:
    """Asked after each step and after each epoch. A wish lasts until a save starts.

    Attributes:
        agree: if ranks could answer differently, gives all of them the answer of rank 0.
    """

    policies: tuple[Any, ...]
    every_n_epochs: int | None
    wanted: bool = False
    agree: Callable[[bool], bool] | None = None

    def watch(self, checkpointer: Any) -> None:
        """Let policies that measure see the engine that saves; rank 0 decides already, where that matters."""
        for policy in self.policies:
            watch = getattr(policy, "watch", None)
            if watch is not None:
                watch(checkpointer, agree=False)

    @property
    def within_epochs(self) -> bool:
        """Whether a save may come in the middle of an epoch."""
        return bool(self.policies)

    def after_step(self, step: int) -> bool:
        """Whether a save is wanted after this step."""
        # Every policy is asked, since the first question sets its origin.
        answers = [policy.due(step) for policy in self.policies]
        self.wanted = self.wanted or any(answers)
        if self.agree is not None:
            self.wanted = self.agree(self.wanted)
        return self.wanted

    def after_epoch(self, epochs: int) -> bool:
        """Whether a save is wanted after so many epochs."""
        if self.every_n_epochs is not None and epochs % self.every_n_epochs == 0:
            self.wanted = True
        return self.wanted

    def saved(self, step: int) -> None:
        """A save starts: it counts for every wish."""
        self.wanted = False
        for policy in self.policies:
            policy.saved(step)


def refuse_unknown(unknown: dict[str, Any], call: Callable[..., None]) -> None:
    """Raises ConfigError for arguments that the callback does not have; says what to use instead.

    Args:
        call: what has been called, with those that it has.
    """
    for name in unknown:
        known = [
            one for one in inspect.signature(call).parameters if one not in ("self", "unknown")
        ]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
        hint = _RENAMED.get(name, hint)
        raise ConfigError(f"AsyncCheckpoint has no argument {name!r}: {hint}")


def _check_count(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} must be an int of at least 1, or None")
