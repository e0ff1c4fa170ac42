"""The event log and the timeline that is drawn from it."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.errors import ConfigError, PersistError
from ckpt_core.observe import Event, EventLog, EventName, timeline


def life(attempt: str, times: list[float], *, end: str = "committed") -> list[Event]:
    names = ["begin", "staged", "persisted", end][: len(times)]
    return [
        Event(EventName(name), time_s, step=int(attempt[1:]), attempt=attempt, nbytes=64)
        for name, time_s in zip(names, times, strict=True)
    ]


def bars(trace: dict[str, Any]) -> list[tuple[str, int, float, float]]:
    return [
        (item["name"], item["tid"], item["ts"], item["dur"])
        for item in trace["traceEvents"]
        if item["ph"] == "X"
    ]


def test_events_are_kept_in_order_and_passed_on() -> None:
    log = EventLog()
    seen: list[Event] = []
    log.subscribe(seen.append)
    for event in life("a7", [1.0, 2.0]):
        log.emit(event)
    assert [event.name for event in log.events()] == ["begin", "staged"]
    assert tuple(seen) == log.events()


def test_the_log_is_bounded_and_knows_how_many_it_saw() -> None:
    log = EventLog(capacity=3)
    for number in range(5):
        log.emit(Event(EventName.WAITED, float(number)))
    assert [event.time_s for event in log.events()] == [2.0, 3.0, 4.0]
    assert log.emitted == 5


def test_a_failing_subscriber_is_logged_once_and_hurts_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = EventLog()
    seen: list[Event] = []

    def fail(event: Event) -> None:
        raise RuntimeError("boom")

    log.subscribe(fail)
    log.subscribe(seen.append)
    with caplog.at_level(logging.ERROR):
        for event in life("a1", [1.0, 2.0, 3.0, 4.0]):
            log.emit(event)
    assert len(seen) == 4
    assert len(caplog.records) == 1


def test_a_subscriber_can_leave_even_while_it_is_called() -> None:
    log = EventLog()
    seen: list[Event] = []

    def once(event: Event) -> None:
        seen.append(event)
        leave()
        leave()

    leave = log.subscribe(once)
    for event in life("a1", [1.0, 2.0]):
        log.emit(event)
    assert len(seen) == 1


def test_a_subscriber_may_emit() -> None:
    log = EventLog()
    other = EventLog()
    log.subscribe(other.emit)
    log.subscribe(lambda event: log.events())
    log.emit(Event(EventName.RETIRED, 1.0, step=3))
    assert other.events() == log.events()


def test_events_from_many_threads_all_arrive() -> None:
    log = EventLog()
    emit = [Event(EventName.WAITED, 0.0)] * 500

    def work() -> None:
        for event in emit:
            log.emit(event)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert log.emitted == len(log.events()) == 2000


def test_a_name_may_be_given_as_text_but_must_be_known() -> None:
    assert Event("begin", 0.0).name is EventName.BEGIN
    with pytest.raises(ConfigError, match="started"):
        Event("started", 0.0)


def test_a_save_is_drawn_as_three_phases_on_one_row() -> None:
    drawn = bars(timeline(life("a7", [1.0, 1.5, 3.0, 3.25])))
    assert drawn == [
        ("staging", 2, 0.0, 500_000.0),
        ("persist", 2, 500_000.0, 1_500_000.0),
        ("commit", 2, 2_000_000.0, 250_000.0),
    ]


def test_rows_are_as_many_as_saves_in_flight_and_are_used_again() -> None:
    events = life("a1", [0, 1, 2, 5]) + life("a2", [1, 2, 3, 4]) + life("a3", [6, 7, 8, 9])
    rows: dict[int, set[int]] = {}
    trace = timeline(events)
    for item in trace["traceEvents"]:
        if item["ph"] == "X":
            rows.setdefault(item["tid"], set()).add(item["args"]["step"])
    assert rows == {2: {1, 3}, 3: {2}}
    names = [item["args"]["name"] for item in trace["traceEvents"] if item["name"] == "thread_name"]
    assert names[2:] == ["in-flight checkpoint 1", "in-flight checkpoint 2"]


def test_bars_of_one_row_never_overlap() -> None:
    events = [e for n in range(12) for e in life(f"a{n}", [n, n + 0.5, n + 1.5, n + 3.5])]
    ends: dict[int, float] = {}
    for _, row, start, length in sorted(bars(timeline(events)), key=lambda bar: (bar[1], bar[2])):
        assert start >= ends.get(row, 0.0)
        ends[row] = start + length


def test_a_begin_without_an_attempt_is_known_by_its_step() -> None:
    begin = [Event("begin", 0.0, step=7), Event("begin", 0.5, step=8)]
    rest = [event for n in (7, 8) for event in life(f"a{n}", [n, n + 1.0, n + 2.0, n + 3.0])[1:]]
    drawn = timeline([*begin, *rest])
    assert len(bars(drawn)) == 6
    assert not [item for item in drawn["traceEvents"] if "unfinished" in item["args"]]


def test_two_saves_of_one_step_are_told_apart_by_their_attempts() -> None:
    first, second = life("a7", [0.0, 1.0, 2.0, 3.0]), life("a7", [0.5, 1.5, 2.5, 3.5])
    second = [dataclasses.replace(event, attempt="b7") for event in second]
    rows = {
        (item["args"]["attempt"], item["tid"])
        for item in timeline(first + second)["traceEvents"]
        if item["ph"] == "X"
    }
    assert rows == {("a7", 2), ("b7", 3)}


def test_a_failure_ends_the_phase_it_happened_in_and_is_marked() -> None:
    trace = timeline(life("a7", [1.0, 1.5, 3.0, 4.0], end="failed"))
    assert [bar[0] for bar in bars(trace)] == ["staging", "persist", "commit"]
    assert [item["name"] for item in trace["traceEvents"] if item["ph"] == "i"] == ["failed"]


def test_a_save_that_has_not_ended_is_drawn_up_to_the_last_event() -> None:
    trace = timeline([*life("a7", [1.0, 2.0]), Event(EventName.WAITED, 5.0, seconds=1.0)])
    unfinished = [item for item in trace["traceEvents"] if item.get("args", {}).get("unfinished")]
    assert [(item["name"], item["dur"]) for item in unfinished] == [("persist", 3e6)]


def test_waits_and_restores_are_drawn_on_the_row_of_training() -> None:
    drawn = bars(timeline([Event(EventName.WAITED, 5.0, seconds=2.0)]))
    assert drawn == [("waited", 0, 0.0, 2e6)]


def test_a_timeline_of_incomplete_events_is_still_drawn() -> None:
    late = life("a7", [1.0, 2.0, 3.0, 4.0])[1:]
    assert bars(timeline(late)) == []
    assert timeline([])["traceEvents"] == []
    assert timeline([Event(EventName.FAILED, 1.0, step=4, detail="no space")])["traceEvents"]


def test_the_timeline_file_is_json_with_trace_events(tmp_path: Path) -> None:
    log = EventLog()
    for event in life("a7", [1.0, 2.0, 3.0, 4.0]):
        log.emit(event)
    log.write_timeline(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {"ph", "pid", "tid", "name"} <= set(trace["traceEvents"][0])
    for item in trace["traceEvents"]:
        assert item["ph"] in "MXi"
        assert item["ph"] == "M" or item["ts"] >= 0


def test_a_timeline_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(PersistError, match="missing"):
        EventLog().write_timeline(tmp_path / "missing" / "trace.json")
