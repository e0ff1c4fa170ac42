"""What several ranks are told, and save together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forks import Forks
from tests.integrations.transformers.ranks import Program

PROGRAM = "tests.integrations.transformers.ranks_program"


def _told(forks: Forks, folder: Path, kind: str) -> list[str]:
    """What each rank was warned of."""
    assert Program(forks, PROGRAM, ranks=2, KIND=kind).run(folder) == [0, 0]
    return [(folder / f"told-{rank}.json").read_text() for rank in range(2)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "warned"), [("dispatched", True), ("split", False)])
def test_a_loader_that_skips_too_little_in_a_resume_is_told_of_once(
    kind: str, warned: bool, forks: Forks, tmp_path: Path
) -> None:
    told = _told(forks, tmp_path, kind)
    assert ["dispatch_batches=True: a run" in texts for texts in told] == [warned, False]
