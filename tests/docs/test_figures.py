"""The commands of the docs that measure, each in small: they run as they are named there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.levels.servers.moto import needs_store

TOP = Path(__file__).parents[2]
IN_SMALL = {
    "tests.levels.parity.figures": ["--mib", "1", "--times", "1"],
    "tests.levels.receiving_figures": ["--files", "1", "--times", "1"],
    "tests.levels.serving.figures": ["--files", "1", "--times", "1"],
    "tests.multirank.level_figures": ["--mib", "1", "--times", "1"],
    "tests.multirank.losing_nodes": ["docs", "1", "--nodes", "3"],
}
"""Module -> what makes it short."""


@needs_store
@pytest.mark.parametrize("module", IN_SMALL)
def test_a_command_that_measures_runs(module: str) -> None:
    command = [sys.executable, "-m", module, *IN_SMALL[module]]
    made = subprocess.run(command, cwd=TOP, capture_output=True, text=True, timeout=200)
    assert made.returncode == 0, made.stderr
    assert re.search(r"\d", made.stdout)


def test_each_of_them_is_tried() -> None:
    texts = [path.read_text() for path in (*TOP.glob("docs/**/*.md"), TOP / "README.md")]
    named = {name for text in texts for name in re.findall(r"python -m (tests[\w.]*\w)", text)}
    assert named == set(IN_SMALL)
