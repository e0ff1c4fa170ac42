"""Runs a scenario once for every operation at which it can be killed. Called in the warm process."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.crash.directories import DIRECTORIES
from tests.crash.layers import CHANGES, NAME_CHANGES, KillAt
from tests.crash.likeness import likeness
from tests.crash.promises import Found
from tests.crash.scenarios import SCENARIOS, Scenario
from tests.crash.warm import forked

POINTS = {"before": CHANGES, "after": NAME_CHANGES, "torn": ("pwrite",)}
ALL: dict[str, Scenario] = {**SCENARIOS, **DIRECTORIES}
_MOST = 2000
_CHECKS_PER_CHILD = 20


def kill_everywhere(scenario: str, point: str, place: str, *, writers: int) -> int:
    """Kill at every operation, restart after each, and check; how many kills there were."""
    plan = ALL[scenario]
    prepared = _prepared(plan, Path(place))
    checks = Checks(plan)
    for n, (root, acknowledged) in enumerate(
        _killed(plan, prepared, point, Path(place), writers=writers)
    ):
        checks.add(root, acknowledged, f"{scenario}, killed {point} operation {n}")
    return checks.finish()


def kill_twice(scenario: str, place: str) -> int:
    """Kill at every operation, and then the restart at every operation of its repair."""
    plan = ALL[scenario]
    prepared = _prepared(plan, Path(place))
    repair = replace(plan, act=lambda run: None, started=())
    checks, seen = Checks(plan), Seen()
    for at, (root, acknowledged) in enumerate(_killed(plan, prepared, "before", Path(place))):
        if seen.is_new(root, acknowledged):
            place_of_repairs = Path(place) / str(at)
            for again, (twice, _) in enumerate(_killed(repair, root, "before", place_of_repairs)):
                what = f"{scenario}, killed before operation {at}, and its repair at {again}"
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


def _killed(
    plan: Scenario, prepared: Path, point: str, place: Path, *, writers: int | None = None
) -> Iterator[tuple[Path, set[Found]]]:
    """A root for each kill, with what had been acknowledged before it; ends when none dies."""
    changes = {} if writers is None else {"writers": writers}
    for n in range(_MOST):
        root, log = place / f"killed-{n}", place / f"acknowledged-{n}"
        if prepared.exists():
            shutil.copytree(prepared, root)
        place.mkdir(exist_ok=True)
        sent, problem = forked(lambda: _run(plan, root, log, n, point, changes))  # noqa: B023
        assert not problem and sent in (0, signal.SIGKILL), f"at {n}: signal {sent}: {problem}"
        acknowledged = _read(log)
        if sent == 0:
            assert set(plan.started) <= acknowledged, f"only {acknowledged} were committed"
            shutil.rmtree(root)
            return
        yield root, acknowledged
    raise AssertionError("the scenario does not end")


def _run(
    plan: Scenario, root: Path, log: Path, n: int, point: str, changes: dict[str, int]
) -> None:
    kill = KillAt(n, point=point, names=POINTS[point])
    pipe = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def acknowledge(step: int, mark: int) -> None:
        os.write(pipe, f"{step} {mark}\n".encode())

    replace(plan, options=plan.options | changes).run(root, kill.files(plan.base), acknowledge)


def _read(log: Path) -> set[Found]:
    lines = log.read_text().splitlines() if log.exists() else []
    return {(int(step), int(mark)) for step, mark in (line.split() for line in lines)}


def _must(outcome: tuple[int, str]) -> None:
    assert outcome == (0, ""), outcome
