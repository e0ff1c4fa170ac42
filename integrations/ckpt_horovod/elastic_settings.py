"""What a `TorchState` may be given."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import horovod.torch as hvd

from ckpt_core import Checkpointer, ConfigError, EveryNSteps, Options, StoreOptions
from ckpt_horovod.coordinating import coordination
from ckpt_horovod.iterations import Iterations

ATTRIBUTES = "attributes"
"""Where the plain values of a State stand in the saved tree."""

_TAKEN = (ATTRIBUTES, "parameters", "rng")

_PATIENCE = StoreOptions(dead_after=10, timeout=60)
"""Ranks die here as a matter of course, and they meet right after a broadcast, so none has to be late."""


@dataclass(frozen=True)
class Settings:
    """What each Checkpointer of a State is opened with; see TorchState.

    Raises:
        ConfigError: one of them is wrong.
    """

    root: Any
    options: Options | None = None
    roots: Literal["shared", "node"] = "shared"
    store: StoreOptions | None = None
    trusted: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.root, str | os.PathLike) or not os.fspath(self.root):
            raise ConfigError(
                f"root={self.root!r}: give the directory for the checkpoints, such as root='ckpts'"
            )
        if self.options is not None and not isinstance(self.options, Options):
            raise ConfigError(f"options={self.options!r}: pass ckpt_core.Options(...)")
        if self.store is not None and not isinstance(self.store, StoreOptions):
            raise ConfigError(f"store_options={self.store!r}: pass ckpt_core.StoreOptions(...)")
        if self.roots not in ("shared", "node"):
            raise ConfigError(f"roots={self.roots!r} is unknown: use 'shared' or 'node'")
        if self.roots == "node" and self.options is not None and self.options.keep_last == 1:
            raise ConfigError(
                "options: keep_last=1 is not enough with roots='node', where a commit of the same "
                "iteration replaces the one before machine by machine: keep 2 or more"
            )
        given = self.options or Options()
        options = given.or_places_from_env()
        if options != given:
            object.__setattr__(self, "options", options)
        # The loop may change its working directory before the next Checkpointer is opened.
        object.__setattr__(self, "root", str(Options.checked_root(self.root)))

    def open(self) -> Checkpointer:
        """A Checkpointer for the ranks that Horovod has now; called on all of them."""
        store = coordination(roots=self.roots, options=self.store or _PATIENCE)
        return Checkpointer(self.root, self.options, coordination=store)


def checked_optimizer(optimizer: Any) -> Iterations:
    """The iterations of an optimizer that a State can save by.

    Raises:
        ConfigError: it cannot.
    """
    iterations = getattr(optimizer, "_iterations", None)
    if not isinstance(iterations, Iterations):
        raise ConfigError(
            f"optimizer={type(optimizer).__name__} is not wrapped: give the result of "
            f"ckpt_horovod.DistributedOptimizer(optimizer, ..., checkpointer=None)"
        )
    if iterations.checkpointer is not None:
        raise ConfigError(
            "optimizer= has a Checkpointer already: wrap it with checkpointer=None, since the TorchState "
            "opens one for each world of ranks"
        )
    policy = iterations.policy
    if policy is not None and not isinstance(policy, EveryNSteps):
        raise ConfigError(
            f"optimizer= has policy={policy!r}, which ranks that come and go cannot share: leave it out "
            f"and call commit(), or use every_n_steps="
        )
    ranks = getattr(optimizer, "process_set", hvd.global_process_set)
    if ranks is not hvd.global_process_set:
        raise ConfigError(f"optimizer= reduces over {ranks}: an elastic job trains with all ranks")
    return iterations


def check_names(attributes: Iterable[str]) -> None:
    """ConfigError if an attribute has the name of something that is always saved."""
    taken = [name for name in attributes if name in _TAKEN]
    if taken:
        raise ConfigError(
            f"{taken[0]}=: this name is taken by what is always saved; give it another one"
        )


def paths_of(per_rank: Iterable[str], values: Iterable[str]) -> tuple[str, ...]:
    """`per_rank`, as paths of the saved tree; `values` are the names of plain values.

    Raises:
        ConfigError: it is no list.
    """
    if isinstance(per_rank, str):
        raise ConfigError(f"per_rank={per_rank!r} must be a list, such as [{per_rank!r}]")
    known = set(values)
    return tuple(
        [f"{ATTRIBUTES}.{path}" if path.partition(".")[0] in known else path for path in per_rank]
    )
