"""What each save has cost, from what the engine told of it."""

from __future__ import annotations

import re

import pytest

from ckpt_core.errors import PersistError
from ckpt_core.observe import Event, EventName, Meter


def tell(meter: Meter, name: EventName, seconds: float, *, step: int | None = 3) -> None:
    meter.on_event(Event(name, 0.0, step=step, seconds=seconds, nbytes=100))


def save(meter: Meter, persist_s: float, *, step: int = 3) -> None:
    tell(meter, EventName.BEGIN, 0.0, step=step)
    tell(meter, EventName.STAGED, 0.1, step=step)
    tell(meter, EventName.PERSISTED, persist_s, step=step)
    tell(meter, EventName.COMMITTED, persist_s + 0.1, step=step)


def begin(meter: Meter, step: int) -> None:
    with meter.saving(step):
        pass


def test_events_that_come_before_the_save_returns_are_not_lost() -> None:
    meter = Meter()
    with meter.saving(3):
        save(meter, 0.5)
    (cost,) = meter.take()
    assert (cost.staged_s, cost.persist_s, cost.as_metrics()["ckpt/bytes_per_s"]) == (0.1, 0.5, 200)


def test_what_is_told_of_a_save_that_nobody_measures_counts_for_no_later_one_of_that_step() -> None:
    meter = Meter()
    for step in range(100):
        save(meter, 9.0, step=step)
    with meter.saving(3):
        # The last of it, while the call waits for a place.
        tell(meter, EventName.COMMITTED, 9.1)
        tell(meter, EventName.BEGIN, 0.0)
    assert not meter.take()
    tell(meter, EventName.FAILED, 0.2)
    assert not meter.take() and "1 save failed" in meter.summary()
    assert not meter._early


def test_a_save_that_nobody_measures_is_not_taken_for_one_of_the_same_step_beside_it() -> None:
    def told(name: EventName, seconds: float, attempt: str) -> None:
        meter.on_event(Event(name, 0.0, 3, attempt, seconds, nbytes=100))

    meter = Meter()
    told(EventName.BEGIN, 0.0, "other")
    with meter.saving(3):
        told(EventName.BEGIN, 0.0, "mine")
        told(EventName.PERSISTED, 9.0, "other")
    told(EventName.COMMITTED, 9.1, "other")
    assert not meter.take()
    told(EventName.PERSISTED, 0.5, "mine")
    told(EventName.COMMITTED, 0.6, "mine")
    (cost,) = meter.take()
    assert cost.persist_s == 0.5


def test_the_failure_of_a_save_that_nobody_measures_is_not_that_of_a_call_that_was_refused() -> (
    None
):
    def refused() -> None:
        with meter.saving(3):
            meter.on_event(Event(EventName.FAILED, 0.0, 3, "other"))
            raise PersistError("refused at once")

    meter = Meter()
    with pytest.raises(PersistError):
        refused()
    assert not meter.failures


def test_a_wait_at_a_barrier_counts_for_the_newest_save() -> None:
    meter = Meter()
    tell(meter, EventName.WAITED, 900.0, step=None)
    for step in (3, 4):
        begin(meter, step)
    tell(meter, EventName.WAITED, 1000.0, step=None)
    for step in (3, 4):
        tell(meter, EventName.COMMITTED, 1.0, step=step)
    first, second = meter.take()
    assert first.stall_s < 1000.0 <= second.stall_s < 1900.0
    assert (first.in_flight, second.in_flight) == (1, 2)


def test_a_save_that_fails_is_counted_in_those_after_it_and_in_the_summary() -> None:
    meter = Meter()
    begin(meter, 3)
    tell(meter, EventName.FAILED, 0.2)
    begin(meter, 4)
    tell(meter, EventName.COMMITTED, 0.2, step=4)
    (cost,) = meter.take()
    assert (cost.step, cost.failures, cost.interval_steps) == (4, 1, 1)
    assert "1 step saved" in meter.summary() and "1 save failed" in meter.summary()
    # More than the engine's own line tells, which knows only of what is inside it.
    assert re.search(
        r"training waited \d+ ms in all, gathering its state included,", meter.summary()
    )


def test_a_call_that_raises_counts_as_a_save_only_where_one_had_begun() -> None:
    meter = Meter()

    def save(told: bool) -> None:
        with meter.saving(3):
            if told:
                tell(meter, EventName.FAILED, 0.2)
            raise PersistError("the disk is full")

    for told in (False, True):
        with pytest.raises(PersistError):
            save(told)
    assert "1 save failed" in meter.summary()
    assert not meter.take()


def test_a_save_that_is_tried_again_after_any_error_is_counted_by_itself() -> None:
    meter = Meter()

    def save() -> None:
        with meter.saving(3):
            tell(meter, EventName.FAILED, 0.2)
            raise MemoryError

    with pytest.raises(MemoryError):
        save()
    begin(meter, 3)
    tell(meter, EventName.COMMITTED, 0.2)
    assert len(meter.take()) == 1
