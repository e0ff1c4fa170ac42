"""What a run of the tests sees of GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ASKED = """
import os
import pytest

@pytest.mark.cuda
def test_marked() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"

def test_other() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
"""


@pytest.mark.parametrize(
    ("expression", "seen"),
    [("", "hidden"), ("not cuda", "hidden"), ("cuda", "seen"), ("cuda and not timeout", "seen")],
)
def test_gpus_are_seen_where_tests_that_need_one_are_asked_for(
    expression: str, seen: str, tmp_path: Path
) -> None:
    (tmp_path / "test_asked.py").write_text(ASKED)
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "--rootdir", "."]
    command += ["-p", "tests.conftest", "-m", expression, str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"GPUs: {seen}" in done.stdout


def test_the_checks_for_gpus_say_where_there_is_none(tmp_path: Path) -> None:
    done = subprocess.run(
        [Path(__file__).parents[1] / ".ci" / "gpu", tmp_path / "results"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stdout
    assert "no GPU" in done.stderr and "docs/gpu.md" in done.stderr
    assert not (tmp_path / "results").exists()
