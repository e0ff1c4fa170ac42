"""Which iterations are saved, the same on every rank."""

from __future__ import annotations

import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from horovod.torch.mpi_ops import broadcast_async, poll, synchronize

from ckpt_core import ConfigError, EveryNSteps
from ckpt_horovod.reductions import POLL_S

_log = logging.getLogger("ckpt_horovod")

_NUMBERS: defaultdict[tuple[Any, str], Iterator[int]] = defaultdict(itertools.count)
"""Of the broadcasts of one name in a process set: of two optimizers, both may be under way.

Taken at the first broadcast: a rank may make more optimizers than the others, and leave them alone.
"""


class Policy(Protocol):
    """What is asked of a policy; those of ckpt_core are some."""

    def should_save(self, step: int) -> bool:
        """Whether to save at this step; a yes counts as saved."""


def policy_of(every_n_steps: int | None, policy: Policy | None) -> Policy | None:
    """The policy of these arguments; None: saves are asked for one by one.

    Raises:
        ConfigError: both are given, or one is wrong.
    """
    if every_n_steps is not None and policy is not None:
        raise ConfigError("every_n_steps= and policy= exclude each other: give one of them")
    if every_n_steps is not None:
        try:
            return EveryNSteps(every_n_steps)
        except ConfigError as exc:
            raise ConfigError(f"every_n_steps={every_n_steps!r} must be an int above 0") from exc
    if policy is not None and not callable(getattr(policy, "should_save", None)):
        raise ConfigError(
            f"policy={policy!r} has no should_save(step): give one such as EverySeconds(600)"
        )
    return policy


class Decisions:
    """Asks the policy once for each iteration.

    A policy that counts steps answers alike everywhere. Any other is asked on the first rank, one iteration
    ahead, and its answer is broadcast behind that iteration: two may be under way at the same time.

    Args:
        policy: None says no to every iteration; so does a rank that is not in the process set.
        process_set: the ranks that save together.
        name: of the broadcasts; the same on all ranks, which first step those of one name in one order.

    Attributes:
        deferred: one that was due while gradients were accumulated is yet to be saved.
    """

    def __init__(self, policy: Policy | None, *, process_set: Any, name: str) -> None:
        self.policy = policy if process_set.included() else None
        self._process_set = process_set
        alone = process_set.size() == 1
        self._told = policy is not None and not alone and not isinstance(policy, EveryNSteps)
        self._name = name
        self._number: int | None = None
        self._problem: Exception | None = None
        self._coming: dict[int, int] = {}
        self._answers: dict[int, bool] = {}
        self.deferred = self._told_deferred = False

    def ahead(self, step: int) -> None:
        """This iteration comes next: let its decision travel, if it has to. Called on every rank."""
        if not self._told or self.policy is None:
            return
        if step in self._coming or step in self._answers:
            return
        if self._number is None:
            self._number = next(_NUMBERS[self._process_set.process_set_id, self._name])
        leads = self._process_set.rank() == 0
        answer = torch.tensor([leads and self._says(step)], dtype=torch.uint8, device="cpu")
        first = min(self._process_set.ranks or [0])
        name = f"ckpt_horovod.decision.{self._number}.{self._name}.{step % 2}"
        self._coming[step] = broadcast_async(
            answer, first, name=name, process_set=self._process_set
        )

    def is_due(self, step: int) -> bool:
        """Whether to save at this iteration; asking again gives the same answer.

        Raises:
            HorovodInternalError: another rank is gone.
        """
        if step not in self._answers:
            self._answers = {step: self._ask(step)}
        return self._answers[step]

    def forget(self) -> None:
        """The ranks have met anew: what was asked before counts no more."""
        self._coming, self._answers, self.deferred = {}, {}, False

    def defer(self, step: int, *, due: bool) -> None:
        """What is accumulated would be missing in this one, maybe `due`; called on every rank."""
        self.deferred = due
        if due and not self._told_deferred:
            self._told_deferred = True
            _log.warning(
                "iteration %d is due, and gradients are being accumulated, which are in no checkpoint: "
                "the iteration of the next step() is saved instead, now and later",
                step,
            )

    def went_back(self, step: int) -> None:
        """Training goes on behind this iteration; called on every rank.

        What was asked about the next ones holds, since a policy that has said yes does not say it again.
        """
        coming = (step + 1, step + 2)
        self._coming = {later: other for later, other in self._coming.items() if later in coming}
        self._answers = {later: yes for later, yes in self._answers.items() if later == step + 1}

    def report(self) -> None:
        """Raise what the policy has raised since the last call; called where an iteration has ended."""
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def _says(self, step: int) -> bool:
        assert self.policy is not None
        try:
            return bool(self.policy.should_save(step))
        except Exception as exc:
            # A no: other ranks wait for an answer, and a step is asked about before it is made.
            self._problem = exc
            return False

    def _ask(self, step: int) -> bool:
        if self.policy is None:
            return False
        if not self._told:
            return self._says(step)
        self.ahead(step)
        handle = self._coming.pop(step)
        self._coming = {later: other for later, other in self._coming.items() if later > step}
        while not poll(handle):
            time.sleep(POLL_S)
        return bool(synchronize(handle).item())
