"""What each save has cost, from what the engine told of it."""

from __future__ import annotations

from ckpt_core.observe import Event, EventName, Meter


def tell(meter: Meter, name: EventName, seconds: float, *, step: int | None = 3) -> None:
    meter.on_event(Event(name, 0.0, step=step, seconds=seconds, nbytes=100))


def test_events_that_come_before_the_save_returns_are_not_lost() -> None:
    meter = Meter()
    tell(meter, EventName.STAGED, 0.1)
    tell(meter, EventName.PERSISTED, 0.5)
    tell(meter, EventName.COMMITTED, 0.6)
    meter.begun(3, stall_s=0.01, in_flight=0)
    (cost,) = meter.take()
    assert (cost.staged_s, cost.persist_s, cost.as_metrics()["ckpt/bytes_per_s"]) == (0.1, 0.5, 200)


def test_a_wait_at_a_barrier_counts_for_the_newest_save() -> None:
    meter = Meter()
    tell(meter, EventName.WAITED, 9.0, step=None)
    for step in (3, 4):
        meter.begun(step, stall_s=0.25, in_flight=1)
    tell(meter, EventName.WAITED, 0.5, step=None)
    for step in (3, 4):
        tell(meter, EventName.COMMITTED, 1.0, step=step)
    assert [cost.stall_s for cost in meter.take()] == [0.25, 0.75]


def test_a_save_that_fails_is_counted_in_those_after_it_and_in_the_summary() -> None:
    meter = Meter()
    meter.begun(3, stall_s=0.5, in_flight=0)
    tell(meter, EventName.FAILED, 0.2)
    meter.begun(4, stall_s=0.5, in_flight=0)
    tell(meter, EventName.COMMITTED, 0.2, step=4)
    (cost,) = meter.take()
    assert (cost.step, cost.failures, cost.interval_steps) == (4, 1, 1)
    assert "1 step saved" in meter.summary() and "1 save failed" in meter.summary()
