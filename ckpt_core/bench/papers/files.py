"""A run as files: for each figure a picture and its points, and all tables as markdown."""

from __future__ import annotations

import csv
from pathlib import Path

from ckpt_core.bench.papers.drawing import draw_part
from ckpt_core.bench.papers.tables import Plain, markdown
from ckpt_core.bench.results import Report

_COLUMNS = ("quantity", "unit", "line", "x", "median", "min", "max", "values")


def write(report: Report, folder: Path) -> None:
    """Write `<paper>-<figure>.png` and `.csv` for each figure, and `tables.md`; existing ones are replaced.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    folder.mkdir(exist_ok=True)
    for part in report.more["papers"].values():
        _write_csv(part, folder / f"{part['file']}.csv")
        draw_part(report, part, folder / f"{part['file']}.png")
    (folder / "tables.md").write_text(markdown(report))


def _write_csv(part: Plain, path: Path) -> None:
    """A row for each point; its values, one for each round, are separated by spaces."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(_COLUMNS)
        for row in part["rows"]:
            values = " ".join(f"{value:.6g}" for value in row["values"])
            rows.writerow([*(row[column] for column in _COLUMNS[:-1]), values])
