"""`save_on_exception` with several ranks: all of them save the last whole step, or none does, in time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import TorchStore, committed_steps
from ckpt_core.bench.meeting import free_port
from ckpt_lightning import CheckpointWarning
from ckpt_lightning.rescue import ArmedTogether
from tests.forks import Forks
from tests.integrations.lightning.ddp_crew import Answers, Crew
from tests.integrations.lightning.running import differences

RESCUE: dict[str, Any] = {"saving": {"every_n_steps": 100, "save_on_exception": True}}
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def pair(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with Crew(forks, 2, tmp_path_factory.mktemp("pair")) as crew:
        yield crew


@pytest.fixture(scope="module")
def undisturbed(pair: Crew) -> Answers:
    return pair.fit()


def _assert_goes_on(pair: Crew, root: Path, expected: Answers, step: int, **job: Any) -> None:
    resumed = pair.fit(root=root, saving={"every_n_steps": 100}, seed=99, **job)
    for rank in (0, 1):
        assert resumed.steps(rank)[0] == step
        assert not differences(expected.tensors(rank)["last"], resumed.tensors(rank)["last"]), rank


def test_when_one_rank_fails_both_save_the_last_whole_step(
    forks: Forks, pair: Crew, undisturbed: Answers, root: Path, tmp_path: Path
) -> None:
    with Crew(forks, 2, tmp_path) as crew:
        crew.begin(root=root, **RESCUE, mine={"1": {"stop_at": 5}})
        failed = crew.answer_of(1)
        assert "error" not in failed and not failed["warnings"], "it ends in its own exception"
        # Rank 0 hangs in a collective until the process of the other ends, and saved nevertheless.
        assert committed_steps(root) == (5,)
        crew.processes[1].kill()
        assert "error" in crew.answer_of(0)
    assert committed_steps(root) == (5,)
    _assert_goes_on(pair, root, undisturbed, 5)


@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_that_all_fail_save_together(
    pair: Crew, undisturbed: Answers, root: Path, sharded: bool
) -> None:
    answers = pair.fit(root=root, **RESCUE, stop_at=5, sharded=sharded)
    assert committed_steps(root) == (5,) and not answers.rows[0]["warnings"]
    expected = pair.fit(sharded=True) if sharded else undisturbed
    _assert_goes_on(pair, root, expected, 5, sharded=sharded)


# A step in each second batch, and a validation behind one without: step 1 is whole behind batches 1 and 2.
VALIDATES: dict[str, Any] = {
    "trainer": {"accumulate_grad_batches": 2, "val_check_interval": 3},
    "validates": True,
}


def _fail_apart(forks: Forks, folder: Path, root: Path, ahead: int) -> list[str]:
    """Rank 1 fails while rank 0 holds step 1 of another place, and then hangs; the warnings of rank 1."""
    with Crew(forks, 2, folder) as crew:
        crew.begin(root=root, **RESCUE, **VALIDATES, apart=ahead)
        failed = crew.answer_of(1)
        assert "error" not in failed, failed["traceback"]
        crew.processes[1].kill()
        assert "error" in crew.answer_of(0)
    told: list[str] = failed["warnings"]
    return told


def test_a_step_that_another_rank_holds_as_of_behind_a_validation_is_not_saved(
    forks: Forks, root: Path, tmp_path: Path
) -> None:
    (told,) = _fail_apart(forks, tmp_path, root, ahead=0)
    assert (
        "(rank 0: step 1 behind 3 batches and a validation, rank 1: step 1 behind 2 batches)"
        in told
    )
    assert committed_steps(root) == ()


def test_a_rank_that_is_still_before_that_validation_comes_to_it_and_both_save(
    forks: Forks, pair: Crew, root: Path, tmp_path: Path
) -> None:
    expected = pair.fit(**VALIDATES)
    assert not _fail_apart(forks, tmp_path, root, ahead=1)
    assert committed_steps(root) == (1,)
    _assert_goes_on(pair, root, expected, 1, **VALIDATES)


@pytest.fixture
def stores() -> Iterator[list[TorchStore]]:
    """Those of two ranks, here in one process."""
    port = free_port()

    def joined(rank: int) -> TorchStore:
        return TorchStore("127.0.0.1", port, rank=rank, world_size=2)

    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(joined, (0, 1)))
    yield made
    for store in reversed(made):
        store.close()


def test_a_step_that_one_rank_is_ahead_of_is_not_saved(stores: list[TorchStore]) -> None:
    saved: list[int] = []
    ahead, failing = (
        ArmedTogether(lambda step, _: saved.append(step), store=store, timeout_s=60, listens=True)
        for store in stores
    )
    for rank in (ahead, failing):
        rank.arm(3, {})
    ahead.disarm()
    ahead.arm(4, {})
    with pytest.warns(CheckpointWarning, match="rank 0: step 4, rank 1: step 3"):
        failing.fail()
    ahead.disarm()
    ahead.close()
    assert not saved


def test_a_rank_that_is_not_there_yet_is_waited_for(stores: list[TorchStore]) -> None:
    saved: list[int] = []
    behind, failing = (
        ArmedTogether(lambda step, _: saved.append(step), store=store, timeout_s=60, listens=True)
        for store in stores
    )
    failing.arm(4, {})
    behind.arm(3, {})
    behind.disarm()
    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(failing.fail)
        behind.arm(4, {})
        failed.result()
    behind.disarm()
    behind.close()
    assert saved == [4, 4]


def test_a_rank_that_holds_the_step_of_a_later_place_is_not_waited_for(
    stores: list[TorchStore],
) -> None:
    ahead, failing = (
        ArmedTogether(lambda *_: pytest.fail("saved"), store=store, timeout_s=60, listens=True)
        for store in stores
    )
    ahead.arm(1, {}, (1, 3, 1))
    failing.arm(1, {}, (1, 2, 0))
    with pytest.warns(
        CheckpointWarning,
        match="rank 0: step 1 behind 3 batches and a validation, rank 1: step 1 behind 2",
    ):
        failing.fail()
    ahead.disarm()
    ahead.close()


def test_a_rank_that_holds_the_step_of_an_earlier_place_is_waited_for(
    stores: list[TorchStore],
) -> None:
    saved: list[Any] = []
    behind, failing = (
        ArmedTogether(lambda _, tree: saved.append(tree), store=store, timeout_s=60, listens=True)
        for store in stores
    )
    failing.arm(1, {"as of": 3}, (1, 3, 1))
    behind.arm(1, {"as of": 2}, (1, 2, 0))
    with ThreadPoolExecutor(1) as pool:
        failed = pool.submit(failing.fail)
        while stores[0].told("save_on_exception", 60) is None:
            time.sleep(0.01)
        behind.outlast(dict)
        behind.arm(1, {"as of": 3}, (1, 3, 1))
        failed.result()
    behind.disarm()
    behind.close()
    assert saved == [{"as of": 3}, {"as of": 3}]


@pytest.mark.parametrize(
    "hooks", [1, 2]
)  # an update is followed by others, by its end and by a validation
def test_a_rank_that_had_begun_to_change_it_says_so(stores: list[TorchStore], hooks: int) -> None:
    well, failing = (
        ArmedTogether(lambda *_: pytest.fail("saved"), store=store, timeout_s=60, listens=True)
        for store in stores
    )
    for rank in (well, failing):
        rank.arm(3, {})
    for _ in range(hooks):
        failing.disarm()
    with pytest.warns(CheckpointWarning, match="had begun to change it"):
        failing.fail()
    well.close()


def test_a_rank_that_has_saved_it_says_nothing(stores: list[TorchStore]) -> None:
    well, failing = (
        ArmedTogether(lambda *_: pytest.fail("saved"), store=store, timeout_s=60, listens=True)
        for store in stores
    )
    failing.arm(3, {})
    failing.disarm(saved=True)
    failing.disarm()
    failing.fail()
    well.close()


@pytest.mark.parametrize("killed", [0, 1])
def test_the_rank_that_is_left_ends_in_time_with_its_own_error(
    forks: Forks, root: Path, tmp_path: Path, killed: int
) -> None:
    with Crew(forks, 2, tmp_path) as crew:
        out = crew.begin(root=root, **RESCUE, timeout=4, mine={str(killed): {"pause_at": 5}})
        deadline = time.monotonic() + 100
        while not Path(f"{out}.paused{killed}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(crew.processes[killed].pid, signal.SIGKILL)
        left = crew.answer_of(1 - killed)
    assert "Error" in left["error"] and "CommitError" not in left["error"]
    (told,) = [text for text in left["warnings"] if "save_on_exception" in text]
    assert "the last whole step was not saved: " in told
    assert committed_steps(root) == ()
