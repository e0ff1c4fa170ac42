"""A run that is cut short and run again ends in the bits of one that was not: whatever Trainer is told."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback

from ckpt_core import Checkpointer, ConfigError, StateMismatch, committed_steps, load, step_path
from ckpt_core.store.pins import pinned_steps
from ckpt_transformers import AsyncCheckpoint, CheckpointWarning
from tests import places
from tests.integrations.transformers.jobs import (
    SMALL,
    DiesAt,
    Stream,
    ending,
    own,
    plain,
    run,
    run_stock,
    trainer_of,
)

STEPS = 18
BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "metric_for_best_model": "loss",
    "load_best_model_at_end": True,
    "greater_is_better": True,  # of a loss: the first evaluation is the best, and stays so
    "save_total_limit": 1,
}
STREAM = {
    **{"data": Stream(), "collator": plain, "eval_strategy": "epoch", "max_steps": 14},
    **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
}
WAYS: dict[str, dict[str, Any]] = {
    "validated after each epoch": {"eval_strategy": "epoch"},
    "saved after each epoch": {"save_strategy": "epoch", "eval_strategy": "epoch"},
    "a stream that is saved after each epoch": STREAM | {"save_strategy": "epoch"},
    "a stream": STREAM,
    "the best is loaded": BEST,
    "the best alone is saved": BEST | {"save_strategy": "best"},
    "ends within an epoch": {"max_steps": 16, "save_steps": 5},
    "an order that the generators make": {"train_sampling_strategy": "group_by_length"},
    "workers": {"dataloader_num_workers": 2, "collator": plain, "num_train_epochs": 2},
    "no accumulation": {"gradient_accumulation_steps": 1, "num_train_epochs": 1},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_is_cut_short_ends_like_one_that_is_not(way: str, tmp_path: Path) -> None:
    arguments = WAYS[way]
    expected = run(tmp_path / "whole", **arguments)
    dice = random.Random(f"{way} {places.run_number()}")
    for death in sorted(dice.sample(range(2, 10), 2)):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "cut", DiesAt(death), **arguments)
    assert run(tmp_path / "cut", **arguments) == expected
    assert not list((tmp_path / "cut" / "out").glob("checkpoint-*")), (
        "Trainer saves nothing besides"
    )


def test_a_run_that_is_done_trains_nothing_more(tmp_path: Path) -> None:
    expected = run(tmp_path, max_steps=8)
    assert run(tmp_path, DiesAt(9), max_steps=8) == expected


def test_states_of_callbacks_go_on(tmp_path: Path) -> None:
    arguments = BEST | {"restore_callback_states_from_checkpoint": True}
    expected = run(tmp_path / "whole", EarlyStoppingCallback(4), **arguments)
    assert expected["step"] < STEPS, "it stops early"
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", EarlyStoppingCallback(4), DiesAt(expected["step"] - 1), **arguments)
    assert run(tmp_path / "cut", EarlyStoppingCallback(4), **arguments) == expected


@pytest.mark.parametrize("when", ["epoch", "steps"])
def test_a_run_that_early_stopping_ended_trains_nothing_more(when: str, tmp_path: Path) -> None:
    arguments = BEST | {"restore_callback_states_from_checkpoint": True, "save_total_limit": None}
    arguments |= {"eval_strategy": when, "save_strategy": when}
    expected = run(tmp_path, EarlyStoppingCallback(1), **arguments)
    assert expected["step"] < STEPS, "it stops early"
    assert run(tmp_path, EarlyStoppingCallback(1), **arguments) == expected
    arguments["restore_callback_states_from_checkpoint"] = False
    assert run(tmp_path, EarlyStoppingCallback(1), **arguments)["step"] > expected["step"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run with all its steps, and how it ended."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder)


def _copy(whole: tuple[Path, Any], tmp_path: Path) -> Path:
    shutil.copytree(whole[0] / "ckpts", tmp_path / "ckpts")
    return tmp_path / "ckpts"


def test_a_damaged_step_is_passed_over_for_the_next_older_one(
    whole: tuple[Path, Any], tmp_path: Path
) -> None:
    root = _copy(whole, tmp_path)
    (shard,) = step_path(root, STEPS).glob("*.safetensors")
    good = shard.read_bytes()
    shard.write_bytes(good[: len(good) // 2] + bytes(byte ^ 1 for byte in good[len(good) // 2 :]))
    with (
        pytest.warns(CheckpointWarning, match="step 18 is not whole"),
        pytest.warns(match="step 18 was not restored"),
    ):
        assert run(tmp_path) == whole[1]


def test_a_step_of_the_root_or_the_root_may_be_named(
    whole: tuple[Path, Any], tmp_path: Path
) -> None:
    root = _copy(whole, tmp_path)
    assert run(tmp_path, resume=str(root)) == whole[1]
    assert run(tmp_path, resume=str(step_path(root, 6))) == whole[1]
    with pytest.raises(ConfigError, match="neither a step of"):
        run(tmp_path, resume=str(tmp_path / "elsewhere"))
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert run(link, resume=str(root)) == whole[1]
    assert run(link, resume=str(step_path(root, 6))) == whole[1]


def test_a_run_that_begins_anew_does_not_mix_its_steps_with_others(
    whole: tuple[Path, Any],
) -> None:
    with pytest.raises(ConfigError, match=r"holds 9 steps .newest 18.*resume_from_checkpoint=True"):
        run(whole[0], resume=None)


def test_what_trainer_saved_by_itself_is_gone_on_from(tmp_path: Path) -> None:
    expected = run(tmp_path / "whole", eval_strategy="no", logging_steps=2)
    stock = trainer_of(tmp_path / "moved", DiesAt(9), logging_steps=2)
    stock.pop_callback(AsyncCheckpoint)
    own = type(stock).train
    for name in ("train", "_inner_training_loop", "_init_training_state", "_prepare_for_training"):
        vars(stock).pop(name)
    for name in ("_run_epoch", "_load_rng_state", "_save_checkpoint", "_load_best_model"):
        vars(stock).pop(name)
    with pytest.raises(KeyboardInterrupt):
        own(stock)
    moved = run(tmp_path / "moved", logging_steps=2)
    assert moved["step"] == expected["step"]
    assert committed_steps(tmp_path / "moved" / "ckpts") == (10, 12, 14, 16, 18)


def test_as_many_steps_stay_as_trainer_is_told(tmp_path: Path) -> None:
    run(tmp_path, save_total_limit=2)
    assert committed_steps(tmp_path / "ckpts") == (16, 18)


def test_the_best_step_stays_beside_the_newest(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, **BEST)
    trainer.train()
    best = trainer.state.best_global_step
    assert best is not None and best < STEPS
    assert committed_steps(tmp_path / "ckpts") == (best, STEPS)
    assert trainer.state.best_model_checkpoint == str(step_path(tmp_path / "ckpts", best))


@pytest.mark.parametrize("dies_at", [None, 5])
def test_the_best_step_of_those_that_are_saved_is_loaded_where_one_between_was_better(
    dies_at: int | None, tmp_path: Path
) -> None:
    scores = {1: 0.1, 2: 0.8, 3: 0.9, 4: 0.2, 5: 0.1, 6: 0.2}

    def train(*callbacks: TrainerCallback) -> Any:
        trainer: Any = trainer_of(
            tmp_path,
            *callbacks,
            **BEST | {"metric_for_best_model": "score", "eval_steps": 1, "max_steps": 6},
        )
        trainer.compute_metrics = lambda _: {"score": scores[trainer.state.global_step]}
        trainer.train(resume_from_checkpoint=True)
        return trainer

    if dies_at is not None:
        with pytest.raises(KeyboardInterrupt):
            train(DiesAt(dies_at))
    trainer = train()
    best = step_path(tmp_path / "ckpts", 2)
    assert trainer.state.best_model_checkpoint == str(best)
    saved, live = load(best, only=["model"])["model"], trainer.model.state_dict()
    assert all(torch.equal(live[name], tensor) for name, tensor in saved.items())


def test_a_resume_leaves_pins_of_other_people(tmp_path: Path) -> None:
    scores = {2: 0.5, 4: 0.9, 6: 0.1, 8: 0.2}

    def train(steps: int) -> None:
        trainer: Any = trainer_of(
            tmp_path,
            **BEST
            | {"metric_for_best_model": "score", "save_total_limit": None, "max_steps": steps},
        )
        trainer.compute_metrics = lambda _: {"score": scores[trainer.state.global_step]}
        trainer.train(resume_from_checkpoint=True)

    train(6)
    assert pinned_steps(tmp_path / "ckpts") == {4}
    with Checkpointer(tmp_path / "ckpts") as checkpointer:
        checkpointer.pin(2)
    train(8)
    assert pinned_steps(tmp_path / "ckpts") == {2, 4}


def test_a_callback_that_is_added_later_is_attached(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=2)
    late = AsyncCheckpoint(tmp_path / "late", options=SMALL)
    trainer.pop_callback(AsyncCheckpoint)
    trainer.add_callback(late)
    with pytest.raises(ConfigError, match="attach"):
        trainer.train()


def test_a_run_that_had_no_scaler_goes_on_with_a_new_one(tmp_path: Path) -> None:
    run(tmp_path, max_steps=2)
    trainer = trainer_of(tmp_path, max_steps=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    trainer.accelerator.scaler = scaler
    trainer.train(resume_from_checkpoint=True)
    saved = load(tmp_path / "ckpts", only=["scaler"])["scaler"]
    assert saved["scale"] == scaler.get_scale() == 8.0

    other = trainer_of(tmp_path, model=own(), max_steps=6)
    other.accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(StateMismatch, match="model"):
        other.train(resume_from_checkpoint=True)
    again = trainer_of(tmp_path, max_steps=6)
    again.accelerator.scaler = torch.amp.GradScaler("cpu")
    again.train(resume_from_checkpoint=True)
    assert again.accelerator.scaler.get_scale() == 8.0


@pytest.mark.parametrize("by", ["class", "object"])
def test_a_trainer_from_which_the_callback_is_taken_saves_by_itself(
    by: str, tmp_path: Path
) -> None:
    expected = run_stock(tmp_path / "stock", max_steps=4)
    saver = AsyncCheckpoint(tmp_path / "ckpts", options=SMALL)
    trainer = trainer_of(tmp_path, saver=saver, max_steps=4)
    trainer.remove_callback(AsyncCheckpoint if by == "class" else saver)
    trainer.train()
    assert ending(trainer) == expected
    assert not (tmp_path / "ckpts").exists()
    assert len([*(tmp_path / "out").glob("checkpoint-*")]) == 2
    saver.attach(trainer)
    trainer.train()
    assert committed_steps(tmp_path / "ckpts") == (2, 4)


def test_another_callback_may_take_the_place_of_one_that_is_taken_away(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=2)
    trainer.pop_callback(AsyncCheckpoint)
    AsyncCheckpoint(tmp_path / "other", options=SMALL).attach(trainer)
    trainer.train()
    assert committed_steps(tmp_path / "other") == (2,)
    assert not (tmp_path / "ckpts").exists()


def test_the_end_of_a_streams_epoch_is_not_come_to_twice(tmp_path: Path) -> None:
    arguments = WAYS["a stream that is saved after each epoch"]
    expected = run(tmp_path / "whole", **arguments)
    assert committed_steps(tmp_path / "whole" / "ckpts") == (6, 12, 14)
    assert len([row for row in expected["log"] if "eval_loss" in row]) == 3
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", DiesAt(9), **arguments)
    assert committed_steps(tmp_path / "cut" / "ckpts") == (6,)
    assert run(tmp_path / "cut", **arguments) == expected
