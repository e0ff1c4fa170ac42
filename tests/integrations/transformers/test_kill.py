"""Real processes are killed, alone and as one of two ranks, run again, and end as if nothing had happened."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from ckpt_core import committed_steps
from ckpt_transformers import CheckpointWarning
from tests import places
from tests.forks import Forks
from tests.integrations.transformers.jobs import ending, trainer_of
from tests.integrations.transformers.ranks import Program

LOOP = "tests.integrations.transformers.accelerate_program"


def _last(folder: Path) -> list[Any]:
    """How the ranks ended that came to their end there."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("last-*.json"))]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """One for a run that nothing happens to, and one for another."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    return whole, cut


@pytest.mark.timeout(900)
def test_a_process_that_is_killed_and_stopped_ends_bit_for_bit_the_same(
    forks: Forks, folders: tuple[Path, Path]
) -> None:
    whole, cut = folders
    program, dice = Program(forks), random.Random(places.run_number())
    program.kill(whole, cut, after=dice.randint(6, 12))
    reached = committed_steps(cut / "ckpts")[-1]
    assert program.run(cut, STOP_AT=5) == [0]
    assert not _last(cut), "the script does not go on behind train()"
    assert committed_steps(cut / "ckpts")[-1] == reached + 5, "the step that had begun is saved"
    assert program.run(cut) == [0]
    assert len(_last(cut)) == 1
    assert _last(cut) == _last(whole)


@pytest.mark.timeout(900)
def test_two_ranks_are_killed_and_stopped_and_change_over_and_end_bit_for_bit_the_same(
    forks: Forks, folders: tuple[Path, Path]
) -> None:
    whole, cut = folders
    program, dice = Program(forks, ranks=2), random.Random(places.run_number())
    program.kill(whole, cut, after=dice.randint(6, 8))
    assert program.run(cut, STOP_AT=3) == [0, 0]
    assert not _last(cut)
    assert program.run(cut, CHANGE_OVER=1) == [0, 0]
    assert len(_last(cut)) == 2
    assert _last(cut) == _last(whole)
    changed = cut.with_name("changed")  # from Trainer alone, by an import
    assert committed_steps(changed / "ckpts") == (4, 6)
    for here, there in _last(changed):
        assert here == there
    _check_goes_on_alone(changed, _last(changed)[0][0])


def _check_goes_on_alone(folder: Path, last: dict[str, Any]) -> None:
    """One rank takes up what two have left: weights, optimizer and scheduler are exact."""
    begin: dict[str, Any] = {}

    class Looks(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            begin.update(ending(trainer))

    trainer = trainer_of(folder, Looks(), max_steps=8)
    with (
        pytest.warns(CheckpointWarning, match="goes on with other batches"),
        pytest.warns(match="private values of 1 rank"),  # generators of the rank that is no more
    ):
        trainer.train(resume_from_checkpoint=True)
    exact = ("step", "model", "optimizer", "scheduler")
    assert [begin[name] for name in exact] == [last[name] for name in exact]
    assert committed_steps(folder / "ckpts")[-1] == 8


@pytest.mark.timeout(900)
def test_two_ranks_of_fsdp_are_killed_and_end_bit_for_bit_the_same(
    forks: Forks, folders: tuple[Path, Path]
) -> None:
    whole, cut = folders
    program, dice = Program(forks, ranks=2, FSDP="1"), random.Random(places.run_number())
    program.kill(whole, cut, after=dice.randint(6, 9))
    assert program.run(cut) == [0, 0]
    assert len(_last(cut)) == 2
    assert _last(cut) == _last(whole)


@pytest.mark.timeout(900)
def test_two_ranks_of_a_loop_with_accelerate_are_killed_and_end_bit_for_bit_the_same(
    forks: Forks, folders: tuple[Path, Path]
) -> None:
    whole, cut = folders
    program, dice = Program(forks, LOOP, ranks=2), random.Random(places.run_number())
    program.kill(whole, cut, after=dice.randint(5, 7))
    assert committed_steps(cut / "ckpts")[0] == 1, "an epoch"
    assert program.run(cut) == [0, 0]
    assert len(_last(cut)) == 2
    assert _last(cut) == _last(whole)
    assert _last(cut)[0]["rng"] != _last(cut)[1]["rng"], "each rank has its own generators"
