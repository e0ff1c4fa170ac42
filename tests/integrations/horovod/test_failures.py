"""A disk that fails on one rank is told at the end of a later iteration; training is never touched."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import horovod.torch as hvd
import pytest
import torch

import ckpt_horovod
from ckpt_core import Checkpointer, PersistError, committed_steps, verify
from tests.faults.layers import FaultAt
from tests.integrations.horovod.cases import FAILURES, MODES
from tests.integrations.horovod.launch import Outcome

RAISING = [name for name in FAILURES if name.startswith("raise")]


@pytest.mark.parametrize("name", FAILURES)
def test_training_has_the_bits_of_horovod_alone(pair: Outcome, name: str) -> None:
    for rank, found in enumerate(pair.of(f"failing-{name}")):
        assert found["found"] == found["stock"]
        assert (found["struck"] > 0) == (rank == 1)
        assert (found["in_layers"] > 0) or "lazy" in name


@pytest.mark.parametrize("name", RAISING)
def test_it_is_raised_on_both_ranks_where_an_iteration_ends(pair: Outcome, name: str) -> None:
    where = FAILURES[name]["ends"].replace("call", "end")
    for found in pair.of(f"failing-{name}"):
        assert found["raised"]
        assert {place for _, place, _ in found["raised"]} == {where}
        # What was saved in the third iteration failed, and the end of the next one says so.
        first = min(number for number, *_ in found["raised"])
        # A step that ends an iteration opens its own save right behind it, perhaps before that one fails.
        assert first == 3 or (first == 4 and name == "raise-step-in_step")


@pytest.mark.parametrize("name", [name for name in FAILURES if name not in RAISING])
def test_nothing_is_raised_where_warnings_are_asked_for(pair: Outcome, name: str) -> None:
    for found in pair.of(f"failing-{name}"):
        assert found["raised"] == []


@pytest.mark.parametrize("name", FAILURES)
def test_saving_goes_on_once_the_disk_is_mended(pair: Outcome, name: str) -> None:
    pair.of(f"failing-{name}")
    root = pair.folder / f"failing-{name}.root"
    assert verify(root).ok
    steps = committed_steps(root)
    assert 8 in steps
    lost = {3} if FAILURES[name]["ends"] == "call" else {2}
    assert lost.isdisjoint(steps)


def test_a_parameter_that_one_rank_alone_touched_costs_that_step_and_no_other(
    pair: Outcome,
) -> None:
    for found in pair.of("edited"):
        assert found["ended"] == [1, 2, 3, 4, 5]
        assert found["steps"] == [1, 3, 4, 5]


def test_a_commit_that_fails_on_one_rank_is_told_there_and_both_train_on(pair: Outcome) -> None:
    """The other rank stands in the look for hosts, which is a part of the commit."""
    first, second = pair.of("commit_failing")
    assert first["raised"] == [[3, "commit", "PersistError"]]
    assert second["raised"] == []
    for found in (first, second):
        assert found["steps"] == [1, 2, 5, 6, 7, 8]


def test_a_commit_in_which_an_object_of_the_users_raises_is_told_there_and_both_train_on(
    pair: Outcome,
) -> None:
    first, second = pair.of("commit_interrupted")
    assert first["raised"] == [[2, "commit", "RuntimeError"]]
    assert second["raised"] == []
    for found in (first, second):
        assert found["steps"] == [1, 2, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("what", "at", "lost"), [("state", 2, 2), ("policy", 3, 4)])
def test_what_belongs_to_the_user_and_raises_is_told_once_the_step_is_made_and_both_train_on(
    pair: Outcome, what: str, at: int, lost: int, mode: str
) -> None:
    """Each iteration is ended by the next step(); on the first rank alone something raises there."""
    first, second = pair.of(f"interrupted-{what}-{mode}")
    assert first["raised"] == [[at, "step", "RuntimeError"]]
    assert second["raised"] == []
    for found in (first, second):
        assert found["same"]
        assert found["steps"] == [step for step in range(1, 9) if step != lost]


def test_parts_of_attributes_that_belong_to_each_rank_come_back_to_it(pair: Outcome) -> None:
    for rank, found in enumerate(pair.of("own_parts")):
        assert found == {"stats": {"mine": rank, "all": 7}, "whole": rank, "object": rank}


def test_a_worker_that_joins_behind_a_loss_counts_iterations_as_the_one_that_was_left_does(
    pair: Outcome,
) -> None:
    """Ranks that differ there ask different collectives, and none of them ends."""
    for found in pair.of("joined"):
        assert found["counts"] == [1, 2, 3]


def test_between_passes_no_rank_commits_or_leaves_whichever_of_them_has_gradients(
    pair: Outcome,
) -> None:
    for found in pair.of("between_passes"):
        assert found["raised"] == [
            [0, "commit", "ConfigError"],
            [1, "commit", "HostsUpdatedInterrupt"],
        ]
        assert found["steps"] == [1]


def test_gradients_that_are_reduced_for_a_step_are_kept_for_it_where_hosts_change(
    pair: Outcome,
) -> None:
    """And where that step was left out, a commit is not refused, and a look is not put off for long."""
    for found in pair.of("before_the_step"):
        assert found == {"raised": [[2, "look", "HostsUpdatedInterrupt"]], "held": False}


@pytest.mark.parametrize("how", ["not wanted", "broken"])
def test_what_is_refused_in_a_step_is_told_with_its_iteration_and_with_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """The save of iteration 1 fails behind training, so that of 2 is refused inside of step()."""
    hvd.init()
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")  # one rank reduces as well
    model = torch.nn.Linear(40, 40)
    fault = FaultAt(0, errno.ENOSPC, lasting=True, names=("pwrite",))
    with Checkpointer(tmp_path, files=fault.files()) as ck:
        optimizer = ckpt_horovod.DistributedOptimizer(
            torch.optim.Adam(model.parameters()),
            named_parameters=model.named_parameters(),
            checkpointer=ck,
            every_n_steps=1,
            layerwise="in_step",
        )

        def iterate(*, save: bool | None = None, breaks: bool = False) -> None:
            with optimizer.iteration(save=save):
                optimizer.zero_grad()
                model(torch.ones(2, 40)).sum().backward()
                optimizer.step()
                if breaks:
                    raise KeyError("a bad batch")

        iterate()
        while ck._engine.flights.active():
            time.sleep(0.002)
        fault.mend()
        if how == "broken":
            with pytest.raises(KeyError):
                iterate(breaks=True)
            assert "iteration 2 could not be saved" in caplog.text
        else:
            with pytest.raises(PersistError, match="No space left"):
                iterate(save=False)
        iterate()
    assert committed_steps(tmp_path) == (optimizer.iterations,)
    hvd.shutdown()
