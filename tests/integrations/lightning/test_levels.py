"""Further roots under the callback: an empty disk is no fresh start."""

from __future__ import annotations

import json
import random
import shutil
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ckpt_core import ConfigError, Level, Options, committed_steps, step_path
from ckpt_core.levels import LEVELS
from ckpt_core.store import pinned_steps
from ckpt_lightning import AsyncCheckpoint
from tests import places
from tests.forks import Forks
from tests.integrations.lightning import killed_program, models
from tests.integrations.lightning.running import differences, ending, fit, saver
from tests.integrations.lightning.test_kill import Program
from tests.levels.trainers import end_agent, until, wait_for_agent


@pytest.fixture
def far(root: Path, tmp_path: Path) -> Iterator[Path]:
    """A level."""
    yield tmp_path / "far"
    end_agent(root)


def test_levels_are_given_to_the_callback_in_its_options_or_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKPT_CORE_LEVELS", '["/environment"]')
    given = {"url": "/argument", "every": 100}
    options = Options(levels=["/options"])
    assert AsyncCheckpoint(tmp_path).options.levels == (Level("/environment"),)
    assert AsyncCheckpoint(tmp_path, options=options).options.levels == (Level("/options"),)
    both = AsyncCheckpoint(tmp_path, levels=[given], options=options)
    assert both.options.levels == (Level("/argument", every=100),)


def test_a_level_that_is_none_is_refused_where_the_callback_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="levels: number 1: 'often' is no field of a level"):
        AsyncCheckpoint(tmp_path, levels=[{"url": "/far", "often": 1}])


def test_a_process_that_is_killed_and_loses_its_disk_goes_on_from_the_level_bit_for_bit(
    root: Path, far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: Forks
) -> None:
    with warnings.catch_warnings(action="ignore"):
        expected = killed_program.run(tmp_path / "undisturbed", tmp_path / "log.txt")
    monkeypatch.setenv("CKPT_CORE_LEVELS", json.dumps([{"url": str(far), "every": 8}]))
    program = Program(forks, root, tmp_path / "killed.txt", tmp_path / "last.pt")
    dice = random.Random(places.run_number())
    assert program.run(kill_after=dice.randint(6, 20)) == -signal.SIGKILL
    wait_for_agent(root)
    newest = committed_steps(far)[-1]
    assert newest == committed_steps(root)[-1], "the agent outlives the process"
    shutil.rmtree(root)
    begun = len(program.lines())
    assert program.run() == 0
    first = int(program.lines()[begun].split()[1])
    assert first == newest, "no step is done again that the level has"
    assert not differences(expected, torch.load(program.last, weights_only=False))


def _loader() -> Any:
    return DataLoader(models.Noisy(), batch_size=4, shuffle=True)


def _levelled(root: Path, far: Path) -> AsyncCheckpoint:
    return saver(root, every_n_steps=2, levels=[{"url": str(far), "keep_last": None, "backlog": 9}])


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_only_the_level_has_may_be_the_ckpt_path(root: Path, far: Path) -> None:
    expected = ending(*fit(models.Net, _loader, _levelled(root, far)))
    wait_for_agent(root)
    steps = committed_steps(far)
    assert len(steps) > 2
    shutil.rmtree(root)
    path = str(step_path(root, steps[1]))
    found = fit(models.Net, _loader, _levelled(root, far), ckpt_path=path, seed=8)
    assert not differences(expected, ending(*found))
    assert steps[1] in committed_steps(root)
    wait_for_agent(root)


@pytest.mark.filterwarnings("ignore")
def test_another_root_that_the_trainer_saves_to_has_no_levels(
    root: Path, far: Path, tmp_path: Path
) -> None:
    trainer, _ = fit(models.Net, _loader, _levelled(root, far))
    wait_for_agent(root)
    trainer.save_checkpoint(str(tmp_path / "aside"))
    assert committed_steps(tmp_path / "aside")
    assert not (tmp_path / "aside" / LEVELS).exists()


class Scored(models.Net):
    """The first epoch is the best one until the fifth."""

    def on_train_epoch_end(self) -> None:
        self.log("score", [0.2, 4.0, 3.0, 2.0, 0.1][self.trainer.current_epoch])


@pytest.mark.filterwarnings("ignore")
def test_the_best_step_outlives_the_root_at_the_level_until_there_is_a_better_one(
    root: Path, far: Path
) -> None:
    def train(epochs: int) -> None:
        level = {"url": str(far), "keep_last": 1, "backlog": 9}
        callback = saver(root, monitor="score", levels=[level])
        fit(Scored, _loader, callback, max_epochs=epochs)
        until(lambda: 5 * epochs in committed_steps(far))
        wait_for_agent(root)

    train(3)
    assert {5, 15} <= {*committed_steps(far)} and 5 in pinned_steps(far)
    shutil.rmtree(root)
    train(4)
    assert 5 in committed_steps(far) and 5 in pinned_steps(far)
    train(5)
    until(lambda: committed_steps(far) == (25,) and pinned_steps(far) == {25})
