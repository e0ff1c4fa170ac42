"""kill -9 at any file operation: the newest committed step comes back, or the one before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.scenarios import SCENARIOS
from tests.crash.warm import Warm

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
    writers = SCENARIOS[scenario].options.get("writers", 1)
    count = warm.call(
        "tests.crash.killing:kill_everywhere",
        scenario=scenario,
        point=point,
        place=str(tmp_path),
        writers=writers,
    )
    print(f"{scenario}: {count} kills {point} an operation")
    assert count >= 3, "next to nothing was killed"


@pytest.mark.parametrize("scenario", ["replace_by_two_renames", "retire_and_recycle"])
def test_a_kill_during_the_repair_after_a_kill_loses_nothing_either(
    scenario: str, warm: Warm, tmp_path: Path
) -> None:
    count = warm.call("tests.crash.killing:kill_twice", scenario=scenario, place=str(tmp_path))
    print(f"{scenario}: {count} second kills")
    assert count > 12
