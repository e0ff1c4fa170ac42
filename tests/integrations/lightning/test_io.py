"""Every way in which Lightning names a checkpoint."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

import ckpt_lightning
from ckpt_core import ConfigError, NotCommitted, UntrustedData, committed_steps, step_path
from ckpt_core.cli import main
from ckpt_core.data import ResumableLoader
from ckpt_lightning import AsyncCheckpoint, CheckpointWarning, StepIO
from tests.integrations.lightning import models
from tests.integrations.lightning.running import (
    QUIET,
    SMALL,
    differences,
    ending,
    fit,
    saver,
    trainer_of,
)


class Odd:
    """A hyper-parameter that only its own class can load."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd)

    __hash__ = None  # type: ignore[assignment]


class WithHparams(models.Net):
    def __init__(self, width: int = 3, extra: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def _val_loss(trainer: Trainer, module: Any, path: str) -> float:
    return trainer.validate(module, models.val_loader(), ckpt_path=path, verbose=False)[0][
        "val_loss"
    ]


def test_validate_test_and_predict_take_a_root_a_step_or_best(root: Path) -> None:
    trainer, module = fit(models.Net, models.train_loader, saver(root))
    expected = trainer.validate(module, models.val_loader(), verbose=False)[0]["val_loss"]
    for path in (str(root), str(step_path(root, 15)), "best"):
        with torch.no_grad():
            module.net[0].weight.zero_()
        assert _val_loss(trainer, module, path) == expected
    assert _val_loss(trainer, module, str(step_path(root, 5))) != expected


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_fresh_process_validates_with_the_callback_or_with_the_plugin_alone(root: Path) -> None:
    trainer, module = fit(models.Net, models.train_loader, saver(root))
    expected = trainer.validate(module, models.val_loader(), verbose=False)[0]["val_loss"]
    assert _val_loss(trainer_of(saver(root)), models.Net(), str(root)) == expected
    alone = Trainer(plugins=[StepIO()], enable_checkpointing=False, **QUIET)
    assert _val_loss(alone, models.Net(), str(root)) == expected


def test_the_command_exports_the_weights_for_a_fresh_module(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, module = fit(models.Net, models.train_loader, saver(root))
    monkeypatch.setattr(sys, "argv", ["", "export", str(root), f"{tmp_path}/w.pt", "--weights"])
    with pytest.raises(SystemExit, match="0"):
        main()
    fresh = models.Net()
    fresh.load_state_dict(torch.load(tmp_path / "w.pt"), strict=True)
    assert not differences(dict(module.state_dict()), dict(fresh.state_dict()))


def test_load_gives_the_weights_and_the_hyper_parameters(root: Path) -> None:
    _, module = fit(lambda: WithHparams(width=5), models.train_loader, saver(root))
    tree = ckpt_lightning.load(root)
    assert tree["hyper_parameters"] == {"width": 5, "extra": None}
    fresh = WithHparams(**tree["hyper_parameters"])
    fresh.load_state_dict(tree["state_dict"])
    assert not differences(dict(module.state_dict()), dict(fresh.state_dict()))


def test_hyper_parameters_that_could_run_code_need_trust(root: Path) -> None:
    def make() -> Any:
        return WithHparams(extra=Odd())

    fit(make, models.train_loader, saver(root), max_epochs=1)
    with pytest.raises(UntrustedData, match="trusted=True"):
        ckpt_lightning.load(root)
    with pytest.raises(UntrustedData):
        fit(make, models.train_loader, saver(root), max_epochs=1)
    assert ckpt_lightning.load(root, trusted=True)["hyper_parameters"]["extra"] == Odd()
    fit(make, models.train_loader, saver(root, trusted=True), max_epochs=2)


def test_save_checkpoint_writes_a_root_of_our_own_or_a_file_of_lightnings(
    root: Path, tmp_path: Path
) -> None:
    trainer, module = fit(models.Net, models.train_loader, saver(root))
    expected = trainer.validate(module, models.val_loader(), verbose=False)[0]["val_loss"]
    trainer.save_checkpoint(tmp_path / "by-hand")
    trainer.save_checkpoint(tmp_path / "by-hand.ckpt")
    assert committed_steps(tmp_path / "by-hand") == (15,)
    assert (tmp_path / "by-hand.ckpt").is_file()
    for path in (tmp_path / "by-hand", tmp_path / "by-hand.ckpt"):
        with torch.no_grad():
            module.net[0].weight.zero_()
        assert _val_loss(trainer, module, str(path)) == expected
    with pytest.raises(ConfigError, match="storage_options"):
        trainer.save_checkpoint(tmp_path / "by-hand", storage_options={"a": 1})


def test_save_checkpoint_of_the_open_root_adds_a_step_that_resumes_exactly(root: Path) -> None:
    class SavesByHand(models.Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 7:
                self.trainer.save_checkpoint(root)
                assert committed_steps(root) == (5, 7)

    fit(SavesByHand, models.train_loader, saver(root))
    assert committed_steps(root) == (5, 7, 10, 15)


def test_weights_alone_are_no_step(root: Path, tmp_path: Path) -> None:
    def save(trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
            trainer.save_checkpoint(root, weights_only=True)

    saves = LambdaCallback(on_train_batch_end=save)
    with pytest.raises(ConfigError, match=r"holds the whole state.*suffix \.ckpt"):
        fit(models.Net, models.train_loader, saver(root, every_n_steps=2), saves)
    assert committed_steps(root) == (2,)
    assert (tmp_path / "weights.ckpt").is_file()
    trainer, _ = fit(models.Net, models.train_loader, saver(root))
    assert trainer.global_step == 15


def _saved_by_hand(make: Any, hook: str, at: int, root: Path, copy: Path, **options: Any) -> Any:
    """How a run ends whose step `at` was saved in that hook; `copy` gets the root as it was right then."""

    def save(trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == at and not copy.exists():
            trainer.save_checkpoint(root)
            shutil.copytree(root, copy)

    callbacks = (LambdaCallback(**{hook: save}), saver(root))
    return ending(*fit(make, models.train_loader, *callbacks, **options))


@pytest.mark.parametrize("by", [{}, {"max_epochs": None, "max_steps": 15}], ids=["epochs", "steps"])
@pytest.mark.parametrize(
    ("make", "hook", "at"),
    [
        (models.StepPlateau, "on_train_batch_end", 3),
        (models.StepPlateau, "on_validation_end", 2),
        (models.Net, "on_train_batch_end", 5),
        (models.StepPlateau, "on_train_epoch_end", 5),
        (models.Plateau, "on_train_epoch_start", 5),
    ],
)
def test_a_step_that_was_saved_by_hand_between_two_batches_or_epochs_resumes_exactly(
    root: Path, tmp_path: Path, make: Any, hook: str, at: int, by: dict[str, Any]
) -> None:
    options = by | {"val": models.val_loader(), "val_check_interval": 2}
    undisturbed = ending(*fit(make, models.train_loader, **options))
    at_once = tmp_path / "at-once"
    assert not differences(undisturbed, _saved_by_hand(make, hook, at, root, at_once, **options))
    assert committed_steps(root) == tuple(sorted({at, 5, 10, 15}))
    for number, origin in enumerate((at_once, root)):
        beside = saver(tmp_path / f"beside-{number}")
        path = str(step_path(origin, at))
        resumed = fit(make, models.train_loader, beside, seed=8, ckpt_path=path, **options)
        assert not differences(undisturbed, ending(*resumed)), origin


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_start"])
def test_a_step_that_was_saved_to_another_root_within_a_fit_resumes_exactly(
    root: Path, tmp_path: Path, hook: str
) -> None:
    undisturbed = ending(*fit(models.StepPlateau, models.train_loader))
    at, other = 5 if hook == "on_train_epoch_start" else 7, tmp_path / "other"

    def save(trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == at:
            trainer.save_checkpoint(other)

    saves = LambdaCallback(**{hook: save})
    assert not differences(
        undisturbed, ending(*fit(models.StepPlateau, models.train_loader, saves, saver(root)))
    )
    assert committed_steps(other) == (at,) and committed_steps(root) == (5, 10, 15)
    assert _resumed_differs(models.StepPlateau, models.train_loader, other, undisturbed) == []


def _resumed_differs(make: Any, loaders: Any, path: Path, expected: Any) -> list[str]:
    """Where a run that goes on from there, and saves elsewhere, ends otherwise."""
    beside = saver(path.parent / "beside")
    resumed = fit(make, loaders, beside, seed=8, ckpt_path=str(path))
    return differences(expected, ending(*resumed))


def _resumable() -> Any:
    return ResumableLoader(models.Noisy(), batch_size=models.BATCH_SIZE, shuffle=True, seed=3)


@pytest.mark.parametrize("loaders", [models.train_loader, _resumable], ids=["plain", "resumable"])
@pytest.mark.parametrize("until", [{"max_epochs": 2}, {"max_steps": 7}], ids=["epoch", "within"])
@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
def test_what_is_saved_by_hand_after_a_fit_resumes_exactly_like_its_last_step(
    root: Path, tmp_path: Path, loaders: Any, until: dict[str, Any], again: bool
) -> None:
    undisturbed = ending(*fit(models.StepPlateau, loaders))
    for _ in range(1 + again):  # the second run trains nothing
        trainer, module = fit(models.StepPlateau, loaders, saver(root), **until)
        trainer.validate(module, models.val_loader(), verbose=False)
        for path in (root, tmp_path / "other"):
            trainer.save_checkpoint(path)
    for path in (root, tmp_path / "other"):
        assert committed_steps(path)[-1] == trainer.global_step
        assert _resumed_differs(models.StepPlateau, loaders, path, undisturbed) == []
        shutil.rmtree(tmp_path / "beside")


class _Second(AsyncCheckpoint):
    state_key = "second"


@pytest.mark.parametrize("way", ["two callbacks", "a plugin beside", "the callback of a later fit"])
def test_each_root_that_a_fit_has_open_takes_what_is_saved_by_hand(
    root: Path, tmp_path: Path, way: str
) -> None:
    def save(trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 8:
            trainer.save_checkpoint(root)

    saves, before = LambdaCallback(on_train_batch_end=save), saver(tmp_path / "before")
    callback = _Second(root, options=SMALL)
    if way == "a plugin beside":
        fit(models.Net, models.train_loader, callback, saves, plugins=[StepIO()])
    elif way == "two callbacks":
        fit(models.Net, models.train_loader, before, callback, saves)
    else:
        trainer, module = fit(models.Net, models.train_loader, before, max_epochs=1)
        trainer.callbacks = [callback, saves]
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, models.train_loader())
    assert 8 in committed_steps(root)
    assert "ckpt_lightning" in ckpt_lightning.load(step_path(root, 8))


def test_a_callback_that_trusts_does_so_beside_a_plugin_too(root: Path, tmp_path: Path) -> None:
    def make() -> Any:
        return WithHparams(extra=Odd())

    fit(make, models.train_loader, saver(root), max_epochs=1)
    beside = saver(tmp_path / "beside", trusted=True)
    path = str(root)
    trainer, _ = fit(make, models.train_loader, beside, ckpt_path=path, plugins=[StepIO()])
    assert trainer.global_step == 15


def test_saving_by_hand_within_a_batch_is_told(root: Path) -> None:
    class Saves(models.Net):
        def on_before_optimizer_step(self, *_: Any) -> None:
            if self.global_step == 3:
                self.trainer.save_checkpoint(root)

    with pytest.warns(CheckpointWarning, match=r"leaves that batch out.*on_train_batch_end"):
        fit(Saves, models.train_loader, saver(root))
    assert committed_steps(root) == (3, 5, 10, 15)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
def test_a_step_that_was_saved_by_hand_as_its_epoch_ended_is_saved_again_when_it_is_over(
    root: Path, tmp_path: Path, hook: str
) -> None:
    options = {"val": models.val_loader(), "max_epochs": 2}
    undisturbed = ending(*fit(models.Plateau, models.train_loader, **options))

    def save(trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 5:
            trainer.save_checkpoint(root)

    callbacks = (LambdaCallback(**{hook: save}), saver(root, every_n_epochs=100))
    fit(models.Plateau, models.train_loader, *callbacks, **options)
    path = str(step_path(root, 5))
    beside = saver(tmp_path / "beside")
    resumed = fit(models.Plateau, models.train_loader, beside, seed=8, ckpt_path=path, **options)
    assert not differences(undisturbed, ending(*resumed))


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_an_old_checkpoint_file_still_starts_a_run(root: Path, tmp_path: Path) -> None:
    theirs = ModelCheckpoint(tmp_path / "theirs", filename="{step}")
    fit(models.Net, models.train_loader, theirs, max_epochs=1)
    path = tmp_path / "theirs" / "step=5.ckpt"
    trainer, _ = fit(models.Net, models.train_loader, saver(root), ckpt_path=str(path))
    assert trainer.global_step == 15
    assert committed_steps(root) == (10, 15)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_run_that_began_from_an_old_file_resumes_exactly_from_steps_of_ours(
    root: Path, tmp_path: Path
) -> None:
    theirs = ModelCheckpoint(tmp_path / "theirs", filename="{step}")
    fit(models.Net, models.train_loader, theirs, max_epochs=1)
    path = str(tmp_path / "theirs" / "step=5.ckpt")
    first = ending(
        *fit(models.Net, models.train_loader, saver(root, every_n_steps=1), ckpt_path=path)
    )
    wrong = {}
    for step in committed_steps(root):
        other = saver(tmp_path / f"from-{step}")
        again = fit(models.Net, models.train_loader, other, ckpt_path=str(step_path(root, step)))
        if found := differences(first, ending(*again)):
            wrong[step] = found
    assert not wrong


@pytest.mark.parametrize("name", ["missing", "empty", "missing/step-000000000003"])
def test_a_directory_without_a_committed_step_is_named_in_the_error(
    root: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotCommitted, match=r"missing|empty"):
        fit(models.Net, models.train_loader, saver(root), ckpt_path=str(tmp_path / name))


def test_a_half_written_directory_is_refused(root: Path, tmp_path: Path) -> None:
    fit(models.Net, models.train_loader, saver(root), max_epochs=1)
    attempt = root / ".inflight" / "000000000005-abc"
    attempt.mkdir(parents=True)
    with pytest.raises(NotCommitted, match="not committed"):
        fit(models.Net, models.train_loader, saver(tmp_path / "new"), ckpt_path=str(attempt))
