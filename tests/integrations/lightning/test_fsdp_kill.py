"""FSDP1's parameters are saved where they lie: ranks are killed in the middle of saves, and go on alike."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import committed_steps, verify
from tests import places
from tests.forks import Forks
from tests.integrations.lightning.ddp_crew import Crew
from tests.integrations.lightning.running import differences

FSDP = {"fsdp": {}}
EVERY = {"every_n_steps": 1}
KILLS, STEPS, LIMIT_S = 2, 12, 200.0

pytestmark = pytest.mark.timeout(900)


def _kill_in_a_save(crew: Crew, root: Path, dice: random.Random) -> None:
    """Let it train on, and kill one rank or both at some moment of a save that is drawn."""
    begun = _newest(root)
    reached = begun + dice.randint(1, 3)
    # It never ends by itself: it is killed in its fit, however slow the one who kills is.
    seed = 99 if begun else 7  # of no use to a run that goes on
    crew.begin(root=root, saving=EVERY, seed=seed, pause_at=reached + 2, **FSDP)
    deadline = time.monotonic() + LIMIT_S
    while _newest(root) < reached or not (_is_saving(root) or _newest(root) == reached + 2):
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    time.sleep(dice.random() * 0.02)
    for rank in dice.choice([(0,), (1,), (0, 1)]):
        crew.processes[rank].kill()
    crew.kill()


def _newest(root: Path) -> int:
    return max(committed_steps(root), default=0) if root.exists() else 0


def _is_saving(root: Path) -> bool:
    return any((root / ".inflight").glob("*"))


def test_ranks_killed_in_saves_again_and_again_end_like_those_that_were_not(
    forks: Forks, root: Path, tmp_path: Path
) -> None:
    dice = random.Random(places.run_number())
    expected: list[dict[str, Any]] = []
    begun = 0
    for number in range(KILLS):
        with Crew(forks, 2, tmp_path) as crew:
            if not expected:
                undisturbed = crew.fit(**FSDP)
                expected = [undisturbed.tensors(rank)["last"] for rank in range(2)]
            _kill_in_a_save(crew, root, dice)
        begun = _newest(root)
        assert begun > number
        assert verify(root).ok, "what is visible is whole, whenever the kill came"
    with Crew(forks, 2, tmp_path) as crew:
        resumed = crew.fit(root=root, saving=EVERY, seed=99, **FSDP)
    assert resumed.steps() == list(range(begun, STEPS))
    assert [row["cut"] for row in resumed.rows] == [[True, True]] * 2, "without FSDP's collectives"
    for rank in range(2):
        assert not differences(expected[rank], resumed.tensors(rank)["last"]), rank
