"""DeepSpeedStrategy: two ranks, of which DeepSpeed keeps the states; killed, and resumed to the same bits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning.pytorch")
pytest.importorskip("deepspeed")

import ckpt_core
from ckpt_core import committed_directories
from ckpt_core.bench.meeting import free_port
from tests.forks import Forks
from tests.integrations.lightning.deepspeed_program import DIES_AT, EVERY, STEPS, STOPS_AT

HERE = Path(__file__).parents[3]
PROGRAM = "tests.integrations.lightning.deepspeed_program"
RANKS = 2

pytestmark = pytest.mark.timeout(600)


def run(forks: Forks, folder: Path, what: str) -> list[int]:
    """Both ranks, to their ends."""
    arguments = [RANKS, free_port(), folder, what]
    ranks = [
        forks.popen([sys.executable, "-m", PROGRAM, rank, *arguments], cwd=HERE)
        for rank in range(RANKS)
    ]
    try:
        return [process.wait(timeout=500) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two lives of a job have left; the first one was killed in its last fit."""
    found = tmp_path_factory.mktemp("deepspeed")
    with Forks(
        "lightning.pytorch", "ckpt_lightning", "deepspeed", "torch._dynamo.eval_frame"
    ) as forks:
        assert all(run(forks, found, "begin"))
        (found / "killed").write_text(" ".join(committed_directories(found / "root3")))
        assert not any(run(forks, found, "go_on"))
    return found


def ended(folder: Path, what: str, stage: int, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / f"{what}{stage}-{rank}.pt", weights_only=True)
    return found


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize(
    ("what", "stage"), [("resumed", 2), ("resumed", 3), ("by_path", 2)], ids=str
)
def test_a_run_that_stopped_or_was_killed_ends_in_the_bits_of_one_that_was_not(
    folder: Path, what: str, stage: int, rank: int
) -> None:
    whole, resumed = (ended(folder, one, stage, rank) for one in ("undisturbed", what))
    assert whole.keys() == resumed.keys() and resumed["step"] == STEPS
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=0, msg=name)


def test_a_kill_left_whole_tags_and_latest_names_the_newest(folder: Path) -> None:
    names = (folder / "killed").read_text().split()
    assert names and all(int(name.removeprefix("global_step")) % EVERY == 0 for name in names)
    assert max(int(name.removeprefix("global_step")) for name in names) < DIES_AT
    for root in (folder / "root2", folder / "root3"):
        assert (root / "latest").read_text() == f"global_step{STEPS}"
        assert ckpt_core.verify(root / f"global_step{STEPS}").ok
    assert f"global_step{STOPS_AT}" in committed_directories(folder / "root2")


def test_deepspeeds_own_tools_read_the_root(folder: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    for stage in (2, 3):
        weights = get_fp32_state_dict_from_zero_checkpoint(str(folder / f"root{stage}"))
        expected = ended(folder, "undisturbed", stage, 0)
        assert torch.equal(weights["layers.0.weight"], expected["layers.0.weight"])


def test_a_save_by_hand_is_durable_at_once_and_lightning_alone_goes_on_from_it(
    folder: Path,
) -> None:
    assert ended(folder, "by_hand", 2, 0)["step"] == 2 * EVERY + 1
    assert (folder / "by_hand.ckpt" / "latest").read_text() == "checkpoint"


def test_what_cannot_be_is_refused_on_every_rank_with_a_reason(folder: Path) -> None:
    for rank in range(RANKS):
        never, monitored = (folder / f"refused-{rank}").read_text().splitlines()
        assert "resume='never'" in never and "holds 3 steps (newest 5)" in never
        assert "monitor='loss' does not go with DeepSpeedStrategy" in monitored
