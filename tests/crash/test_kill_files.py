"""kill -9 at any file operation of a save of named files: the pointer names a whole directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.directories import DIRECTORIES
from tests.crash.killing import check_killed_everywhere, check_killed_twice
from tests.crash.warm import Warm

_ELSEWHERE = {
    "after": ("files_first", "files_again", "files_over_others_by_two_renames"),
    "torn": ("files_next",),
}
CASES = [(name, "before") for name in DIRECTORIES]
CASES += [(name, point) for point, names in _ELSEWHERE.items() for name in names]


@pytest.mark.parametrize(("scenario", "point"), CASES)
def test_a_kill_at_any_file_operation_leaves_whole_directories_and_a_true_pointer(
    scenario: str, point: str, warm: Warm, tmp_path: Path
) -> None:
    check_killed_everywhere(warm, scenario, point, tmp_path)


@pytest.mark.parametrize(
    "scenario", ["files_again_by_two_renames", "files_over_others_by_two_renames"]
)
def test_a_kill_during_the_repair_after_a_kill_loses_nothing_either(
    scenario: str, warm: Warm, tmp_path: Path
) -> None:
    check_killed_twice(warm, scenario, tmp_path)
