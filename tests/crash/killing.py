"""Runs a scenario and kills it, at every operation or at a part of them, in the warm process."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests import places
from tests.crash.directories import DIRECTORIES
from tests.crash.layers import CHANGES, NAME_CHANGES, KillAt
from tests.crash.likeness import likeness
from tests.crash.promises import Found
from tests.crash.scenarios import IN_MEMORY, SCENARIOS, Scenario
from tests.crash.warm import Warm, forked

POINTS = {"before": CHANGES, "after": NAME_CHANGES, "torn": ("pwrite",)}
ALL: dict[str, Scenario] = {**SCENARIOS, **IN_MEMORY, **DIRECTORIES}
_NEVER = 1_000_000
_MOST = 10
"""So many kills of one scenario, but for `CKPT_PLACES=all`."""
_MOST_BEFORE_A_REPAIR, _MOST_OF_A_REPAIR = 16, 6
_CHECKS_PER_CHILD = 20


def check_killed_everywhere(warm: Warm, scenario: str, point: str, place: Path) -> None:
    """Kill, restart after each kill, and hold the root to what was promised. For tests."""
    function = f"{__name__}:kill_everywhere"
    count = warm.call(function, scenario=scenario, point=point, place=str(place))
    print(f"{scenario}: {count} kills {point} an operation")
    assert count >= 3, "next to nothing was killed"


def check_killed_twice(warm: Warm, scenario: str, place: Path) -> None:
    """The same, with a second kill during the repair."""
    count = warm.call(f"{__name__}:kill_twice", scenario=scenario, place=str(place))
    print(f"{scenario}: {count} second kills")
    assert count > 12


def kill_everywhere(scenario: str, point: str, place: str) -> int:
    """Kill at operations, restart after each, and check; how many kills there were."""
    plan = ALL[scenario]
    # One writer, where the scenario is not about several: then operations have one order.
    dying = replace(plan, options={"writers": 1, **plan.options})
    life = _Life(f"{scenario} {point}", dying, _prepared(plan, Path(place)), point)
    checks = Checks(plan)
    for n, root, acknowledged in life.killed(Path(place), most=_MOST):
        checks.add(root, acknowledged, f"{scenario}, killed {point} operation {n}")
    return checks.finish()


def kill_twice(scenario: str, place: str) -> int:
    """Kill at operations, and then the restart at operations of its repair."""
    plan = ALL[scenario]
    first = _Life(f"{scenario} twice", plan, _prepared(plan, Path(place)))
    repair = replace(plan, act=lambda run: None, started=())
    checks, seen = Checks(plan), Seen()
    for at, root, acknowledged in first.killed(Path(place), most=_MOST_BEFORE_A_REPAIR):
        if seen.is_new(root, acknowledged):
            second = _Life(f"{scenario} {at}", repair, root)
            for n, twice, _ in second.killed(Path(place) / str(at), most=_MOST_OF_A_REPAIR):
                what = f"{scenario}, killed before operation {at}, and its repair at {n}"
                checks.add(twice, acknowledged, what)
        shutil.rmtree(root, ignore_errors=True)
    return checks.finish()


class Seen:
    """Roots that were killed so far, each with what had been acknowledged: a sync, say, changes neither."""

    def __init__(self) -> None:
        self._seen: set[tuple[bytes, frozenset[Found]]] = set()

    def is_new(self, root: Path, acknowledged: set[Found]) -> bool:
        """Whether there was none like it; from now on there is."""
        found = likeness(root), frozenset(acknowledged)
        if found in self._seen:
            return False
        self._seen.add(found)
        return True


class Checks:
    """Looks at killed roots, at one of those that are alike; many in one child, for a fork costs more."""

    def __init__(self, plan: Scenario) -> None:
        self._plan = plan
        self._seen = Seen()
        self._waiting: list[tuple[Path, set[Found], str]] = []
        self._count = 0

    def add(self, root: Path, acknowledged: set[Found], what: str) -> None:
        """Look at a root before long; it is deleted then."""
        self._count += 1
        if not self._seen.is_new(root, acknowledged):
            shutil.rmtree(root, ignore_errors=True)
            return
        self._waiting.append((root, acknowledged, what))
        if len(self._waiting) == _CHECKS_PER_CHILD:
            self.finish()

    def finish(self) -> int:
        """Look at what is left; how many kills there were in all."""
        sent, problem = forked(self._look_at_all)
        assert sent == 0 and not problem, f"signal {sent}: {problem}"
        for root, _, _ in self._waiting:
            shutil.rmtree(root)
        self._waiting = []
        return self._count

    def _look_at_all(self) -> None:
        for root, acknowledged, what in self._waiting:
            try:
                self._plan.check(root, acknowledged)
            except BaseException as exc:
                raise AssertionError(f"{what}; acknowledged {acknowledged}") from exc


def _prepared(plan: Scenario, place: Path) -> Path:
    root = place / "prepared"
    _must(forked(lambda: plan.prepare(root)))
    return root


@dataclass(frozen=True)
class _Life:
    """How a process lives that is killed `point` an operation; it begins with a copy of `prepared`."""

    name: str
    plan: Scenario
    prepared: Path
    point: str = "before"

    def killed(self, place: Path, *, most: int) -> Iterator[tuple[int, Path, set[Found]]]:
        """For each kill the operation, the root, and what had been acknowledged before it."""
        place.mkdir(exist_ok=True)
        log = place / "acknowledged"
        sent, acknowledged = self._lived(place / "whole", log, _NEVER)
        assert sent == 0 and set(self.plan.started) <= acknowledged, f"committed: {acknowledged}"
        for n in places.some(range(int(_counted(log).read_text())), most, of=self.name):
            root = place / f"killed-{n}"
            sent, acknowledged = self._lived(root, place / f"acknowledged-{n}", n)
            if sent:  # several writers do not always come to the same number of operations
                yield n, root, acknowledged

    def _lived(self, root: Path, log: Path, n: int) -> tuple[int, set[Found]]:
        """The signal that ended it, and what was acknowledged; a root that was not killed is deleted."""
        if self.prepared.exists():
            shutil.copytree(self.prepared, root)
        sent, problem = forked(lambda: self._run(root, log, n))
        assert not problem and sent in (0, signal.SIGKILL), f"at {n}: signal {sent}: {problem}"
        if sent == 0:
            shutil.rmtree(root)
        return sent, _read(log)

    def _run(self, root: Path, log: Path, n: int) -> None:
        kill = KillAt(n, point=self.point, names=POINTS[self.point])
        pipe = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def acknowledge(step: int, mark: int) -> None:
            os.write(pipe, f"{step} {mark}\n".encode())

        self.plan.run(root, kill.files(self.plan.base), acknowledge)
        _counted(log).write_text(str(kill.count))


def _counted(log: Path) -> Path:
    """Where a life that was not cut short notes how many operations it had."""
    return log.with_suffix(".count")


def _read(log: Path) -> set[Found]:
    lines = log.read_text().splitlines() if log.exists() else []
    return {(int(step), int(mark)) for step, mark in (line.split() for line in lines)}


def _must(outcome: tuple[int, str]) -> None:
    assert outcome == (0, ""), outcome
