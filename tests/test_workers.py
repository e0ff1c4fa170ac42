"""Where several processes run the tests, each long preparation is made in one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.workers import prepared_together

TOP = Path(__file__).parents[1]
TESTS = """
import os, pathlib, pytest

@pytest.mark.parametrize("number", range(5))
def test_something(number):
    with pathlib.Path(__file__).with_suffix(".told").open("a") as told:
        told.write(os.environ["PYTEST_XDIST_WORKER"] + "\\n")
"""


def test_all_tests_of_a_file_run_in_one_process_and_both_processes_have_some(
    tmp_path: Path,
) -> None:
    hook = "from tests.workers import pytest_xdist_make_scheduler\n"
    (tmp_path / "conftest.py").write_text(hook)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    known = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadscope"],
        cwd=tmp_path,
        env=known | {"PYTHONPATH": str(TOP)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [(tmp_path / f"test_{name}.told").read_text().split() for name in "abcd"]
    assert [(len(lines), len(set(lines))) for lines in told] == [(5, 1)] * 4
    assert {lines[0] for lines in told} == {"gw0", "gw1"}


def test_launches_that_several_files_look_at_are_made_once() -> None:
    place = "tests/integrations/horovod"
    assert prepared_together(f"{place}/test_bits.py::test_x[1]") == place
    assert prepared_together(f"{place}/test_crash.py::test_y") == place
    for alone in (f"{place}/test_elastic.py", "tests/crash/test_kill.py"):
        assert prepared_together(f"{alone}::test_z[a::b]") == alone
