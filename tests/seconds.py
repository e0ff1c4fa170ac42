"""Told at the end of a run: how long each folder took, so that growth is seen, and where it struck."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

import pytest

from tests import places

ROW = "{:34}{:>8}{:>8}  {}"
"""Folder, seconds, tests, and the file that took longest."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The seconds of all processes are added up: with `-n 2` they are about twice those of a clock."""
    stats = terminalreporter.stats.values()
    rows = rows_of(report for reports in stats for report in reports)
    if len(rows) > 1:
        terminalreporter.section("seconds of each folder")
        for row in rows:
            terminalreporter.write_line(ROW.format(*row))
    if not set(terminalreporter.stats).isdisjoint({"failed", "error"}):
        terminalreporter.write_line(places.header())  # the head of the run is far away, or left out


def rows_of(reports: Iterable[object]) -> list[tuple[str, str, str, str]]:
    """One for each folder, the longest first; a test is what it took to prepare, run and clear away."""
    seconds: dict[PurePosixPath, dict[str, float]] = {}
    tests: dict[PurePosixPath, set[str]] = {}
    for report in reports:
        if isinstance(report, pytest.TestReport):
            path = PurePosixPath(report.nodeid.partition("::")[0])
            files = seconds.setdefault(path.parent, {})
            files[path.name] = files.get(path.name, 0.0) + report.duration
            tests.setdefault(path.parent, set()).add(report.nodeid)
    order = sorted(seconds, key=lambda folder: -sum(seconds[folder].values()))
    return [
        (
            str(folder),
            f"{sum(seconds[folder].values()):.1f}",
            str(len(tests[folder])),
            "{} {:.1f}".format(*max(seconds[folder].items(), key=lambda item: item[1])),
        )
        for folder in order
    ]
