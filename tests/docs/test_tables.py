"""The tables of docs/benchmarks.md are what the runs say that lie beside its pictures."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
filled = runpy.run_path(str(DOCS / "tables.py"))["filled"]

RUN = {
    "contenders": {
        "ours": {"title": "ckpt-core", "fsyncs": "yes"},
        "peer": {"title": "a peer", "fsyncs": "no"},
    },
    "results": {
        "call": {
            "unit": "s",
            "contenders": {
                "ours": {"min": 0.0012, "median": 0.0015, "max": 0.02, "values": [1, 2]}
            },
        },
    },
}


def page(columns: str, rows: str = "") -> str:
    return (
        f"before\n<!-- table: run.json | who | {columns} -->\n{rows}<!-- end of table -->\nafter\n"
    )


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text(json.dumps(RUN))
    return tmp_path


def test_the_page_is_what_its_runs_say() -> None:
    text = (DOCS / "benchmarks.md").read_text()
    assert filled(text, DOCS / "img") == text, "run: python docs/tables.py"


def test_a_table_has_a_row_for_each_contender_with_a_figure(runs: Path) -> None:
    found = filled(page("fsync = fsync | call, ms = call", "old\n"), runs)
    rows = (
        "\n| who | fsync | call, ms |\n|---|---|---|\n| ckpt-core | yes | 1.50 (1.20–20.00) |\n\n"
    )
    assert found == page("fsync = fsync | call, ms = call", rows)
    assert filled(found, runs) == found


def test_a_figure_is_not_shown_in_a_unit_that_it_does_not_have(runs: Path) -> None:
    with pytest.raises(ValueError, match="call is in s: 'call, GB' says nothing of it"):
        filled(page("call, GB = call"), runs)
