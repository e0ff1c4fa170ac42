"""When a job is stopped: exponential failures and traces."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from ckpt_core import ConfigError
from ckpt_core.simulate import Kind, Outage, Stops, Trace, exponential, parse_trace
from tests.simulate.traces import lines, synthetic

ROWS = [",Time,GPUs", "0,1000.5,8", "1,1063.5,8", "2,1126.5,6", "3,1189.5,7", "4,1252.5,0"]


def test_gaps_between_failures_have_the_mean_and_the_spread_of_an_exponential() -> None:
    times = [one.at_s for one in itertools.islice(exponential(100.0, seed=2), 20_000)]
    gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
    assert statistics.mean(gaps) == pytest.approx(100, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(100, rel=0.03)


@pytest.mark.parametrize("mtbf_s", [0.0, -1.0, math.nan, math.inf])
def test_a_mean_time_that_is_none_is_refused_at_once(mtbf_s: float) -> None:
    with pytest.raises(ConfigError, match="mtbf_s"):
        exponential(mtbf_s, seed=0)


def test_a_trace_begins_at_zero() -> None:
    trace = parse_trace(ROWS)
    assert trace == Trace((0.0, 63.0, 126.0, 189.0, 252.0), (8, 8, 6, 7, 0))
    assert trace.duration_s == 252.0
    assert trace.changes == (-2, 1, -7)


def test_a_trace_needs_no_heading() -> None:
    assert parse_trace(ROWS[1:]) == parse_trace(ROWS)


def test_every_change_stops_the_job_or_only_losses_do() -> None:
    trace = parse_trace(ROWS)
    assert [one.at_s for one in trace.outages()] == [126.0, 189.0, 252.0]
    assert [one.at_s for one in trace.outages(stops=Stops.LOSS)] == [126.0, 252.0]


def test_a_job_that_needs_more_waits_for_them() -> None:
    trace = parse_trace(ROWS)
    assert list(trace.outages(gpus=7)) == [
        Outage(126.0, 189.0),
        Outage(189.0, 189.0, Kind.PROCESS),
        Outage(252.0, math.inf),
    ]
    assert next(trace.outages(gpus=9)) == Outage(0.0, math.inf)


def test_a_synthetic_trace_is_read_back() -> None:
    trace = parse_trace(lines(synthetic()))
    assert trace == synthetic()
    assert len(trace.changes) == 48


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([], "0 rows"),
        (ROWS[:2], "1 rows"),
        ([*ROWS[:3], "x,y"], "line 4"),
        ([*ROWS[:3], "2,nan,4"], "line 4"),
        ([*ROWS[:3], "2,2000,-4"], "line 4"),
        ([*ROWS[:3], "2,2000,4.5"], "line 4"),
        ([*ROWS[:3], "2,2000,\u00b2"], "line 4"),
        ([*ROWS[:3], f"2,2000,{'9' * 5000}"], "line 4"),
        ([*ROWS[:3], "2,1063.5,4"], "time must go up"),
        (["a,b,c,d", "0,1,2,3"], "line 2"),
    ],
)
def test_what_is_no_trace_is_told_with_its_line(rows: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_trace(rows, name="t.csv")
