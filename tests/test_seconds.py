"""The table at the end of a run."""

from __future__ import annotations

import time

import pytest

from tests.seconds import pytest_runtest_makereport, rows_of


def report(nodeid: str, when: str, duration: float) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid, (nodeid, 0, nodeid), {}, "passed", None, when, duration=duration, processor_s=0.5
    )


def test_each_folder_has_a_row_with_its_longest_file_and_the_longest_folder_is_first() -> None:
    rows = rows_of(
        [
            report("tests/a/test_x.py::test_1", "setup", 1.0),
            report("tests/a/test_x.py::test_1", "call", 0.25),
            report("tests/a/test_x.py::test_2[b/c::d]", "call", 0.25),
            report("tests/a/test_y.py::test_1", "call", 0.1),
            report("tests/b/test_x.py::test_1", "teardown", 9.0),
            "another kind of report",
        ]
    )
    assert rows == [
        ("tests/b", "9.0", "0.5", "1", "test_x.py 9.0"),
        ("tests/a", "1.6", "2.0", "3", "test_x.py 1.5"),
    ]


def test_nothing_run_is_no_row() -> None:
    assert rows_of([]) == []


def test_a_report_has_what_the_processor_did_since_the_one_before() -> None:
    def told() -> float:
        steps = pytest_runtest_makereport()
        next(steps)
        with pytest.raises(StopIteration) as ended:
            steps.send(report("tests/a/test_x.py::test_1", "call", 0.0))
        return float(ended.value.value.processor_s)

    told()
    until_s = time.process_time() + 0.2
    while time.process_time() < until_s:
        pass
    assert told() > 0.1
