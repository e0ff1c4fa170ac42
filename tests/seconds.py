"""Told at the end of a run: how long each folder took, so that growth is seen, and where it struck.

Seconds of a clock grow with whatever else the machine does; those of the processor hardly.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from pathlib import PurePosixPath

import pytest

from tests import places

ROW = "{:34}{:>8}{:>11}{:>8}  {}"
"""Folder, seconds, those of the processor, tests, and the file that took longest."""
HEAD = ("", "seconds", "processor", "tests", "longest file")

_counted_s = [0.0]
"""Seconds of the processor that are some test's."""


def _processor_s() -> float:
    """Of this process and of those it has started and waited for."""
    return sum(os.times()[:4])


def pytest_runtest_logstart() -> None:
    """What was before the first test is none's."""
    _counted_s[0] = _counted_s[0] or _processor_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Whoever waits for a process counts it: one that serves a whole folder is its last test's."""
    report = yield
    now_s = _processor_s()
    report.processor_s = now_s - _counted_s[0]
    _counted_s[0] = now_s
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The seconds of all processes are added up: with `-n 2` they are about twice those of a clock."""
    stats = terminalreporter.stats.values()
    rows = rows_of(report for reports in stats for report in reports)
    if len(rows) > 1:
        terminalreporter.section("seconds of each folder")
        for row in [HEAD, *rows]:
            terminalreporter.write_line(ROW.format(*row))
    if not set(terminalreporter.stats).isdisjoint({"failed", "error"}):
        terminalreporter.write_line(places.header())  # the head of the run is far away, or left out


def rows_of(reports: Iterable[object]) -> list[tuple[str, str, str, str, str]]:
    """One for each folder, the longest first; a test is what it took to prepare, run and clear away."""
    seconds: dict[PurePosixPath, dict[str, float]] = {}
    processor_s: dict[PurePosixPath, float] = {}
    tests: dict[PurePosixPath, set[str]] = {}
    for report in reports:
        if isinstance(report, pytest.TestReport):
            path = PurePosixPath(report.nodeid.partition("::")[0])
            files = seconds.setdefault(path.parent, {})
            files[path.name] = files.get(path.name, 0.0) + report.duration
            spent_s = getattr(report, "processor_s", 0.0)
            processor_s[path.parent] = processor_s.get(path.parent, 0.0) + spent_s
            tests.setdefault(path.parent, set()).add(report.nodeid)
    order = sorted(seconds, key=lambda folder: -sum(seconds[folder].values()))
    return [
        (
            str(folder),
            f"{sum(seconds[folder].values()):.1f}",
            f"{processor_s[folder]:.1f}",
            str(len(tests[folder])),
            "{} {:.1f}".format(*max(seconds[folder].items(), key=lambda item: item[1])),
        )
        for folder in order
    ]
