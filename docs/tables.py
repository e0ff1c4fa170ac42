"""Fills the tables of a page from runs of the benchmark that lie beside its pictures.

    <!-- table: bench.json | contender | fsync = fsync | durable, GB/s = persist -->
    <!-- end of table -->

A column is `heading, unit = figure`: the name of the figure in what `ckpt-core bench --json` writes, and
the unit to show it in; `fsync` is whether a contender syncs. `python docs/tables.py` fills docs/benchmarks.md
anew; a test says whether the page is what its runs say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS / "benchmarks.md"
_TABLE = re.compile(r"(?<=<!-- table: )(.*?)( -->\n)(?:.*?)(?=<!-- end of table -->)", re.DOTALL)
_UNITS = {
    ("bytes/s", "GB/s"): 1e-9,
    ("bytes", "MB"): 1e-6,
    ("s", "ms"): 1e3,
    ("%", "%"): 1e2,
}


def filled(text: str, folder: Path) -> str:
    """The page with every table as the runs in the folder have it.

    Raises:
        ValueError: a table asks for a unit that its figure cannot be shown in.
        KeyError: no contender has such a figure.
    """

    def table(found: re.Match[str]) -> str:
        return found[1] + found[2] + "\n" + "\n".join(_lines(found[1], folder)) + "\n\n"

    return _TABLE.sub(table, text)


def _lines(wanted: str, folder: Path) -> Iterator[str]:
    name, first, *rest = (part.strip() for part in wanted.split("|"))
    run = json.loads((folder / name).read_text())
    pairs = [
        (heading.strip(), key.strip()) for heading, _, key in (one.rpartition("=") for one in rest)
    ]
    cells = [_column(run, *pair) for pair in pairs]
    yield "| " + " | ".join([first, *(heading for heading, _ in pairs)]) + " |"
    yield "|---" * (len(pairs) + 1) + "|"
    for way, contender in run["contenders"].items():
        row = [column.get(way, "") for column in cells]
        if any(text for text, (_, key) in zip(row, pairs, strict=True) if key != "fsync"):
            yield "| " + " | ".join([contender["title"], *row]) + " |"


def _column(run: dict[str, Any], heading: str, key: str) -> dict[str, str]:
    if key == "fsync":
        rows = run["contenders"].items()
        return {way: contender["fsyncs"] for way, contender in rows}
    figure = run["results"][key]
    unit = heading.rpartition(", ")[2]
    scale = _UNITS.get((figure["unit"], unit))
    if scale is None:
        if figure["unit"] not in (unit, "x"):
            raise ValueError(f"{key} is in {figure['unit']}: {heading!r} says nothing of it")
        scale = 1.0
    return {way: _text(stats, scale) for way, stats in figure["contenders"].items()}


def _text(stats: dict[str, Any], scale: float) -> str:
    low, middle, high = (stats[name] * scale for name in ("min", "median", "max"))
    digits = 0 if abs(middle) >= 100 else 1 if abs(middle) >= 10 else 2
    middle_text, *ends = (f"{value:.{digits}f}" for value in (middle, low, high))
    return middle_text if len(set(stats["values"])) == 1 else f"{middle_text} ({'–'.join(ends)})"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), DOCS / "img"))
