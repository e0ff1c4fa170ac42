"""The table at the end of a run."""

from __future__ import annotations

import pytest

from tests.seconds import rows_of


def report(nodeid: str, when: str, duration: float) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid, (nodeid, 0, nodeid), {}, "passed", None, when, duration=duration
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
        ("tests/b", "9.0", "1", "test_x.py 9.0"),
        ("tests/a", "1.6", "3", "test_x.py 1.5"),
    ]


def test_nothing_run_is_no_row() -> None:
    assert rows_of([]) == []
