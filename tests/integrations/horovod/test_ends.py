"""An iteration ends where it is said, or where the next one begins; that is what is saved."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from pathlib import Path

import horovod.torch as hvd
import pytest
import torch

import ckpt_horovod
from ckpt_core import Checkpointer, ConfigError, RestoreError
from tests.integrations.horovod.cases import ENDS, MODES
from tests.integrations.horovod.jobs_ends import Breaking
from tests.integrations.horovod.launch import Outcome
from tests.integrations.horovod.test_consistency import check


@pytest.mark.parametrize("name", ENDS)
def test_what_is_saved_is_what_holds_at_the_end(pair: Outcome, name: str) -> None:
    check(pair, f"end-{name}", 1)


@pytest.mark.parametrize("name", ENDS)
def test_closing_the_checkpointer_ends_the_last_iteration(pair: Outcome, name: str) -> None:
    implicit = not name.startswith(("call", "block"))
    for found in pair.of(f"end-{name}"):
        assert found["ended_before_close"] == (5 if implicit else 6)
        assert found["ended"] == 6
        assert found["checkpointer"] == "None"


@pytest.mark.parametrize("mode", MODES)
def test_an_end_that_comes_too_late_is_refused_and_says_who_was_earlier(
    pair: Outcome, mode: str
) -> None:
    for found in pair.of(f"late_end-{mode}"):
        assert "after zero_grad() had ended the iteration" in found["problem"]
        assert found["ended"] == 2
        assert found["steps"] == [1, 2]


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_saved_of_a_block_that_ends_in_an_exception(pair: Outcome, mode: str) -> None:
    for found in pair.of(f"broken-off-{mode}"):
        assert found == {"ended": 2, "steps": [1, 2]}


@pytest.mark.parametrize("mode", MODES)
def test_training_that_goes_on_after_an_exception_takes_the_next_block_for_that_iteration(
    pair: Outcome, mode: str
) -> None:
    for found in pair.of(f"broken-on-{mode}"):
        assert found == {"ended": 4, "steps": [1, 2, 3, 4]}


@pytest.mark.parametrize("mode", MODES)
def test_a_forward_for_evaluation_ends_nothing(pair: Outcome, mode: str) -> None:
    for found in pair.of(f"evaluated-{mode}"):
        assert found == {"before": 0, "after": 1}


def test_a_block_without_a_step_is_an_iteration(pair: Outcome) -> None:
    for found in pair.of("skipped_block"):
        assert found == {"ended": 3, "steps": [1, 2, 3]}


@pytest.mark.parametrize("mode", MODES)
def test_a_block_that_went_back_and_made_no_step_since_is_no_iteration(
    pair: Outcome, mode: str
) -> None:
    for found in pair.of(f"gone_back-{mode}"):
        assert found == {"counts": [1, 2, 2, 2, 2, 3], "steps": [1, 2, 3], "same": True}


@pytest.mark.parametrize("mode", MODES)
def test_an_end_behind_a_restore_with_no_step_since_is_no_iteration(
    pair: Outcome, mode: str
) -> None:
    for found in pair.of(f"gone_back_by_call-{mode}"):
        assert found == {"counts": [1, 2, 2, 2, 3, 3, 4], "steps": [1, 2, 3, 4]}


@pytest.mark.parametrize("mode", MODES)
def test_a_restore_that_finds_nothing_leaves_the_iteration_to_be_counted_and_saved(
    pair: Outcome, mode: str
) -> None:
    for found in pair.of(f"found_nothing-{mode}"):
        assert "optimizer=: this name is taken" in found.pop("problem")
        assert found == {"found": False, "left_open": False, "ended": 2, "steps": [1, 2]}


@pytest.mark.parametrize("mode", MODES)
def test_what_a_restore_that_fails_has_left_is_no_step(pair: Outcome, mode: str) -> None:
    for found in pair.of(f"failed_back-{mode}"):
        assert "broken" in found.pop("problem")
        assert found == {"ended": 1, "steps": [1]}


@pytest.mark.parametrize("mode", MODES)
def test_no_checkpoint_is_made_between_the_passes_of_one_step(pair: Outcome, mode: str) -> None:
    for found in pair.of(f"accumulated-{mode}"):
        assert found["same"]
        assert found["steps"] == [4, 6, 10]
        assert len(found["warnings"]) == 1
        assert "iteration 3 is due, and gradients are being accumulated" in found["warnings"][0]
        assert "Save after step()" in found["problem"]


@pytest.mark.parametrize("mode", MODES)
def test_nor_between_those_of_another_optimizer_that_is_attached(pair: Outcome, mode: str) -> None:
    for found in pair.of(f"accumulated_beside-{mode}"):
        assert found["same"]
        assert found["began"] == 2
        assert found["steps"] == [2, 4, 6, 8]
        assert len(found["warnings"]) == 1
        assert "iteration 1 is due, and gradients are being accumulated" in found["warnings"][0]
        assert len(found["problems"]) == 1
        assert "Save after step(), of each optimizer" in found["problems"][0]


def test_a_save_that_one_rank_alone_makes_beside_such_an_optimizer_fails_there_alone(
    pair: Outcome, trio: Outcome
) -> None:
    for first, *others in (pair.of("saved_alone"), trio.of("saved_alone-members")):
        assert "step 2 is not committed" in first.pop("problem")
        assert first == {"ended": 4}
        for other in others:
            assert other == {"ended": 4, "problem": ""}


@pytest.mark.parametrize("asked", [1, 2])
def test_a_save_by_hand_between_passes_or_after_them_neither_loses_nor_doubles_one_that_is_due(
    tmp_path: Path, asked: int
) -> None:
    hvd.init()
    model = torch.nn.Linear(8, 8)
    with Checkpointer(tmp_path) as ck:
        optimizer = ckpt_horovod.DistributedOptimizer(
            torch.optim.SGD(model.parameters()),
            named_parameters=model.named_parameters(),
            checkpointer=ck,
            policy=Once(),
            backward_passes_per_step=2,
        )
        for number in range(1, 5):
            with suppress(ConfigError), optimizer.iteration(save=number == asked or None):
                model(torch.ones(2, 8)).sum().backward()
                if number % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        ck.wait()
        assert ck.steps() == (2,)
    hvd.shutdown()


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("fails", [False, True])
def test_going_back_behind_a_backward_waits_for_its_reductions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool, sparse: bool
) -> None:
    """Horovod looks for work every 0.2 s: without the wait the second backward comes before that."""
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "200")
    hvd.init()
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")  # one rank reduces as well
    model = torch.nn.Embedding(8, 8, sparse=True) if sparse else torch.nn.Linear(8, 8)
    batch = torch.arange(8) if sparse else torch.ones(2, 8)
    with Checkpointer(tmp_path) as ck:
        optimizer = ckpt_horovod.DistributedOptimizer(
            torch.optim.SGD(model.parameters()),
            named_parameters=model.named_parameters(),
            checkpointer=ck,
            every_n_steps=1,
        )
        breaking = Breaking()
        breaking.breaks = fails
        optimizer.attach(breaking=breaking)
        with optimizer.iteration():
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ck.wait()
        with optimizer.iteration():
            model(batch).sum().backward()
            with pytest.raises(RestoreError) if fails else nullcontext():
                optimizer.restore()
            model(batch).sum().backward()
            optimizer.step()
        ck.wait()
        assert ck.steps() == (1, 2)
    hvd.shutdown()


class Once:
    """Says yes to the first iteration alone."""

    def should_save(self, step: int) -> bool:
        return step == 1


def test_a_compiled_forward_ends_nothing_and_has_no_save_in_its_graph(tmp_path: Path) -> None:
    hvd.init()
    model = torch.nn.Linear(8, 8)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with Checkpointer(tmp_path) as ck:
        optimizer = ckpt_horovod.DistributedOptimizer(
            torch.optim.SGD(model.parameters()),
            named_parameters=model.named_parameters(),
            checkpointer=ck,
            every_n_steps=2,
        )
        optimizer.attach(model=model)
        ended = []
        for _ in range(5):
            loss = compiled(torch.ones(2, 8)).sum()
            ended.append(optimizer.iterations)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ck.wait()
        assert ended == [0, 0, 1, 2, 3]
        assert ck.steps() == (2, 4)
    hvd.shutdown()
