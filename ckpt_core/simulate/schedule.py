"""Preemptive scheduling in rounds: what saving and loading at each switch does to completion times.

Source: LightCheck section IV-F; the policy is least attained service, as in Gavel (OSDI '20).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckpt_core.errors import ConfigError
from ckpt_core.simulate.costs import check


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A job for one machine.

    Attributes:
        arrival_s: when it may run first.
        service_s: training that it needs.
        save_s: to save it when its machine goes to another task.
        load_s: to load it when it gets a machine again.
    """

    arrival_s: float
    service_s: float
    save_s: float = 0.0
    load_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Progress:
    task: Task
    number: int
    attained_s: float = 0.0
    end_s: float | None = None

    def train(self, from_s: float, for_s: float) -> None:
        left_s = self.task.service_s - self.attained_s
        self.attained_s += min(left_s, for_s)
        if left_s <= for_s:
            self.end_s = from_s + left_s


def completion_times(tasks: Sequence[Task], *, machines: int, round_s: float) -> list[float]:
    """How long each task took from its arrival to its end, under least attained service.

    At the start of each round the tasks that have trained least get the machines, the older one
    first among equals. A task that keeps its machine pays nothing. Where one takes the place of
    another, the round begins with the save of that one and the load of this one, unless it never ran
    before. A machine whose task ends waits for the next round.

    Raises:
        ConfigError: no machine, no task, or a switch that takes a whole round.
    """
    _check(tasks, machines, round_s)
    waiting = [_Progress(task, number) for number, task in enumerate(tasks)]
    running: list[_Progress] = []
    number = 0
    everyone = list(waiting)
    while waiting or running:
        number = max(number, _first_round(waiting, running, round_s))
        now_s = number * round_s
        able = running + [one for one in waiting if one.task.arrival_s <= now_s]
        chosen = sorted(able, key=lambda one: (one.attained_s, one.number))[:machines]
        waiting = [one for one in waiting + running if one not in chosen]
        for one, delay_s in _delays(running, chosen):
            one.train(now_s + delay_s, round_s - delay_s)
        running = [one for one in chosen if one.end_s is None]
        number += 1
    return [(one.end_s or 0.0) - one.task.arrival_s for one in everyone]


def _check(tasks: Sequence[Task], machines: int, round_s: float) -> None:
    if machines < 1 or not tasks:
        raise ConfigError(f"{len(tasks)} tasks on machines={machines}: there must be one of each")
    check("round_s", round_s, above=0.0)
    for task in tasks:
        check("arrival_s", task.arrival_s)
        check("service_s", task.service_s, above=0.0)
    switch_s = max(task.save_s for task in tasks) + max(task.load_s for task in tasks)
    if switch_s >= round_s:
        raise ConfigError(f"round_s={round_s:g} is no longer than a switch ({switch_s:g} s)")


def _first_round(waiting: Sequence[_Progress], running: Sequence[_Progress], round_s: float) -> int:
    """The first round in which there is something to do."""
    if running:
        return 0
    return math.ceil(min(one.task.arrival_s for one in waiting) / round_s)


def _delays(
    running: Sequence[_Progress], chosen: Sequence[_Progress]
) -> Iterator[tuple[_Progress, float]]:
    """Each chosen task, and what of its round a switch takes."""
    leaving = [one.task.save_s for one in running if one not in chosen]
    for one in chosen:
        if one in running:
            yield one, 0.0
        else:
            save_s = leaving.pop() if leaving else 0.0
            yield one, save_s + (one.task.load_s if one.attained_s > 0 else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Tasks drawn at random.

    Attributes:
        tasks: how many.
        mean_service_s: of their training, exponentially distributed.
        mean_gap_s: between arrivals, exponentially distributed; 0: all at once.
        switches: pairs of seconds to save and to load; each task gets one of them, all equally likely.
    """

    tasks: int
    mean_service_s: float
    mean_gap_s: float = 0.0
    switches: tuple[tuple[float, float], ...] = ((0.0, 0.0),)

    def draw(self, seed: int) -> list[Task]:
        """The tasks of one seed; the same service and arrivals whatever a switch costs."""
        dice = random.Random(seed)
        tasks, at_s = [], 0.0
        for _ in range(self.tasks):
            save_s, load_s = dice.choice(self.switches)
            service_s = dice.expovariate(1 / self.mean_service_s)
            tasks.append(Task(arrival_s=at_s, service_s=service_s, save_s=save_s, load_s=load_s))
            at_s += dice.expovariate(1 / self.mean_gap_s) if self.mean_gap_s else 0.0
        return tasks


def mean_completion_s(load: Load, *, machines: int, round_s: float, seeds: Iterable[int]) -> float:
    """Average completion time over all tasks of all seeds."""
    return statistics.mean(
        statistics.mean(completion_times(load.draw(seed), machines=machines, round_s=round_s))
        for seed in seeds
    )
