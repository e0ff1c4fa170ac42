"""What the crews of all suites have in common: rounds of random order; who failed is out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ckpt_core.bench.closing import Closing
from ckpt_core.bench.remote import ContenderFailed, Remote
from ckpt_core.bench.results import Report

Item = TypeVar("Item")


class Turns(Closing):
    """Rounds of random order. Close it, or use it in a `with` block.

    Attributes:
        report: learns of contenders that fail.
        notify: told what happens, for a progress line.
    """

    def __init__(
        self, report: Report, notify: Callable[[str], None], *, seed: int, rounds: int
    ) -> None:
        """So many rounds for each title; `seed` is of all random orders."""
        self.report = report
        self.notify = notify
        self._random = random.Random(seed)
        self._rounds = rounds

    def rounds(self, title: str) -> Iterator[int]:
        """Numbers of the rounds, told as they begin."""
        for number in range(self._rounds):
            self.notify(f"{title}: round {number + 1} of {self._rounds}")
            yield number

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        """The same items in the run's own random order."""
        return self._random.sample(items, len(items))


class Processes(Turns):
    """Running contenders, each in its process. Close it, or use it in a `with` block."""

    def __init__(
        self, report: Report, notify: Callable[[str], None], *, seed: int, rounds: int
    ) -> None:
        """With no process yet."""
        super().__init__(report, notify, seed=seed, rounds=rounds)
        self._remotes: dict[str, Remote] = {}

    def names(self) -> list[str]:
        """Those that still run, in the order of the report."""
        return list(self._remotes)

    def ask(self, name: str, operation: str, **arguments: Any) -> dict[str, Any] | None:
        """Answer of a contender, or None when it failed, now or before; then it is out."""
        remote = self._remotes.get(name)
        if remote is None:
            return None
        try:
            return remote.call(operation, **arguments)
        except ContenderFailed as exc:
            self.notify(str(exc))
            self.report.entrants[name].fail(str(exc))
            self._remotes.pop(name).close()
            return None

    def close(self) -> None:
        """End every process; idempotent."""
        for remote in self._remotes.values():
            remote.hang_up()  # they end side by side
        while self._remotes:
            self._remotes.popitem()[1].close()
