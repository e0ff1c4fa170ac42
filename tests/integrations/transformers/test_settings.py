"""What cannot be kept is refused before training, with what to do instead."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import ConfigError, Options, PersistError, committed_steps
from ckpt_transformers import AsyncCheckpoint, CheckpointWarning
from tests.integrations.transformers.jobs import SMALL, trainer_of


@pytest.mark.parametrize(
    ("argument", "match"),
    [
        ({"save_only_model": True}, r"save_only_model=True.*ckpt_transformers\.export"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True.*per_device_train_batch_size"),
    ],
)
def test_an_argument_of_trainer_is_refused(
    argument: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=match):
        trainer_of(tmp_path, **argument).train()
    assert not (tmp_path / "ckpts").exists()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"root": ""}, "root='' is no path"),
        ({"root": "s3://bucket/run"}, "root='s3://bucket/run' is a URL"),
        ({"options": 3}, "options=3 is no Options"),
        ({"on_sigterm": "leave"}, "on_sigterm='leave' is unknown"),
        ({"on_error": "shout"}, "shout"),
    ],
)
def test_an_argument_of_the_callback_is_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        AsyncCheckpoint(**({"root": "ckpts"} | arguments))


def test_a_callback_is_that_of_one_trainer(tmp_path: Path) -> None:
    saver = AsyncCheckpoint(tmp_path / "ckpts", options=SMALL)
    trainer_of(tmp_path, saver=saver)
    with pytest.raises(ConfigError, match="one Trainer"):
        trainer_of(tmp_path, saver=saver)


def test_a_callback_that_was_taken_out_may_be_attached_again(tmp_path: Path) -> None:
    saver = AsyncCheckpoint(tmp_path / "ckpts", options=SMALL)
    trainer = trainer_of(tmp_path, saver=saver, max_steps=2)
    trainer.remove_callback(saver)
    saver.attach(trainer)
    trainer.train()
    assert committed_steps(tmp_path / "ckpts") == (2,)
    trainer.remove_callback(saver)
    other = trainer_of(tmp_path, saver=saver, max_steps=4)
    other.train(True)
    assert committed_steps(tmp_path / "ckpts")[-1] == 4


def test_a_trainer_has_one_callback(tmp_path: Path) -> None:
    other = AsyncCheckpoint(tmp_path / "other", options=SMALL)
    with pytest.raises(ConfigError, match="two AsyncCheckpoints"):
        trainer_of(tmp_path, other)
    trainer = trainer_of(tmp_path)
    with pytest.raises(ConfigError, match="two AsyncCheckpoints"):
        other.attach(trainer)


def test_another_thread_trains_where_sigterm_is_left_alone(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=2)
    with ThreadPoolExecutor(1) as pool, pytest.raises(ConfigError, match=r"on_sigterm=None\)"):
        pool.submit(trainer.train).result(60)
    saver = AsyncCheckpoint(tmp_path / "ckpts", options=SMALL, on_sigterm=None)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(trainer_of(tmp_path, saver=saver, max_steps=2).train).result(60)
    assert committed_steps(tmp_path / "ckpts") == (2,)


def test_a_root_that_cannot_be_made_ends_training_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    saver = AsyncCheckpoint(tmp_path / "file" / "ckpts")
    with pytest.raises(PersistError):
        trainer_of(tmp_path, saver=saver).train()


def test_a_save_that_fails_is_a_warning_and_training_goes_on(tmp_path: Path) -> None:
    small = Options(staging_bytes="64KiB", pipelined=False)
    saver = AsyncCheckpoint(tmp_path / "ckpts", options=small)
    trainer = trainer_of(tmp_path, saver=saver, max_steps=2)
    with pytest.warns(CheckpointWarning, match="the save of step 2 failed, and training goes on"):
        trainer.train()
    assert trainer.state.global_step == 2


def test_or_it_ends_training(tmp_path: Path) -> None:
    small = Options(staging_bytes="64KiB", pipelined=False)
    saver = AsyncCheckpoint(tmp_path / "ckpts", options=small, on_error="raise")
    with pytest.raises(ConfigError, match="staging_bytes"):
        trainer_of(tmp_path, saver=saver).train()
