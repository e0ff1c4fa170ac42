"""`--quick` leaves out what it says, and nothing else."""

from __future__ import annotations

import sys

import pytest

from tests.integrations.frameworks import FRAMEWORKS
from tests.quick import TESTS, is_left_out

IMPORTED = FRAMEWORKS.keys() & sys.modules.keys()
"""By the files of tests, before any test has run."""


@pytest.mark.parametrize(
    ("path", "left_out"),
    [
        ("integrations/deepspeed/test_crash.py", True),
        ("integrations/lightning", True),
        ("crash/test_kill.py", True),
        ("coordination/test_kill.py", True),
        ("state/test_distributed.py", True),
        ("faults/test_stuck.py", True),
        ("restore/test_elastic.py", True),
        ("cli/far/test_serve.py", True),
        ("levels/test_training.py", True),
        ("levels/test_objects.py", True),
        ("levels/test_reading.py", False),
        ("cli/test_doctor_root.py", True),
        ("store/test_lock.py", True),
        ("store/test_readers.py", False),
        ("integrations/test_doors.py", False),
        ("store", False),
    ],
)
def test_frameworks_ranks_kills_and_agents_are_left_out(path: str, left_out: bool) -> None:
    assert is_left_out(TESTS / path) == left_out


def test_no_framework_is_imported_by_what_is_left(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--quick"):
        assert not IMPORTED
