"""kill -9 at any file operation: the newest committed step comes back, or the one before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.killing import check_killed_everywhere, check_killed_twice
from tests.crash.scenarios import IN_MEMORY, SCENARIOS
from tests.crash.warm import Warm
from tests.faults.mounts import mounted

# After one operation is before the next, but for other threads; a torn write is torn alike
# everywhere. So the other two points are tried where the order of things differs most.
_ELSEWHERE = {
    "after": ("first_save", "replace_by_two_renames", "two_in_flight"),
    "torn": ("first_save", "retire_and_recycle", "layerwise", "direct"),
}
CASES = [(name, "before") for name in SCENARIOS]
CASES += [(name, point) for point, names in _ELSEWHERE.items() for name in names]


@pytest.mark.parametrize(("scenario", "point"), CASES)
def test_a_kill_at_any_file_operation_loses_no_committed_step(
    scenario: str, point: str, warm: Warm, tmp_path: Path
) -> None:
    check_killed_everywhere(warm, scenario, point, tmp_path)


@pytest.mark.parametrize("scenario", ["replace_by_two_renames", "retire_and_recycle"])
def test_a_kill_during_the_repair_after_a_kill_loses_nothing_either(
    scenario: str, warm: Warm, tmp_path: Path
) -> None:
    check_killed_twice(warm, scenario, tmp_path)


@pytest.mark.parametrize("scenario", IN_MEMORY)
def test_a_kill_while_files_in_memory_are_overwritten_loses_no_committed_step(
    scenario: str, warm: Warm, tmp_path: Path
) -> None:
    with mounted("tmpfs", tmp_path) as where:
        check_killed_everywhere(warm, scenario, "before", where)
