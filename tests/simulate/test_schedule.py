"""Preemptive scheduling in rounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core import ConfigError
from ckpt_core.simulate import Load, Task, completion_times, mean_completion_s


def _task(service_s: float, arrival_s: float = 0.0, **switch: float) -> Task:
    return Task(arrival_s=arrival_s, service_s=service_s, **switch)


def test_a_task_alone_takes_its_service() -> None:
    assert completion_times([_task(25.0)], machines=1, round_s=10.0) == [25.0]


def test_two_tasks_on_one_machine_take_turns() -> None:
    # 0-10 a, 10-20 b, 20-30 a, 30-40 b.
    assert completion_times([_task(20.0), _task(20.0)], machines=1, round_s=10.0) == [30.0, 40.0]


def test_a_switch_takes_the_save_of_the_one_and_the_load_of_the_other() -> None:
    tasks = [_task(15.0, save_s=1.0, load_s=2.0), _task(15.0, save_s=1.0, load_s=2.0)]
    # 0-10 a (10); 10 save a, b never ran: 11-20 b (9); 20 save b and load the less served: b keeps it.
    # b has 9, a has 10: 20-26 b ends; 30 load a: 32-37 a ends.
    assert completion_times(tasks, machines=1, round_s=10.0) == [37.0, 26.0]


def test_tasks_that_keep_their_machines_pay_nothing() -> None:
    tasks = [_task(95.0, save_s=3.0, load_s=3.0) for _ in range(3)]
    assert completion_times(tasks, machines=3, round_s=10.0) == [95.0] * 3


def test_a_late_task_starts_with_the_next_round_and_goes_first() -> None:
    times = completion_times([_task(30.0), _task(10.0, arrival_s=12.0)], machines=1, round_s=10.0)
    assert times == [40.0, 18.0]


def test_nothing_runs_before_the_first_arrival() -> None:
    assert completion_times([_task(5.0, arrival_s=1001.0)], machines=1, round_s=10.0) == [14.0]


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(0, 100)), min_size=1, max_size=8),
    st.integers(1, 3),
)
def test_no_task_is_done_before_its_service_and_all_are_done(
    drawn: list[tuple[int, int]], machines: int
) -> None:
    tasks = [_task(float(service), float(arrival)) for service, arrival in drawn]
    times = completion_times(tasks, machines=machines, round_s=10.0)
    assert all(time >= task.service_s for time, task in zip(times, tasks, strict=True))
    last = max(time + task.arrival_s for time, task in zip(times, tasks, strict=True))
    # Whole rounds, since a machine whose task ends waits.
    most = sum(-(-service // 10) * 10 for service, _ in drawn) + 110
    assert last <= most


def test_dearer_switches_lengthen_completion() -> None:
    means = [
        mean_completion_s(
            Load(tasks=25, mean_service_s=2000.0, switches=((cost, cost),)),
            machines=3,
            round_s=360.0,
            seeds=range(5),
        )
        for cost in (0.0, 10.0, 40.0)
    ]
    assert means == sorted(means)
    assert means[2] > 1.1 * means[0]


@pytest.mark.parametrize(
    ("tasks", "machines", "round_s"),
    [([], 1, 10.0), ([_task(1.0)], 0, 10.0), ([_task(1.0, save_s=6.0, load_s=6.0)], 1, 10.0)],
)
def test_what_cannot_be_scheduled_is_refused(
    tasks: list[Task], machines: int, round_s: float
) -> None:
    with pytest.raises(ConfigError):
        completion_times(tasks, machines=machines, round_s=round_s)
