"""The same script, run again: where it goes on, what it says, and when it refuses."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader, default_collate

from ckpt_core import (
    ConfigError,
    CorruptCheckpoint,
    RootBusy,
    StateMismatch,
    committed_steps,
    step_path,
)
from ckpt_lightning import AsyncCheckpoint, CheckpointWarning
from ckpt_lightning.session import Session
from tests.integrations.lightning import models
from tests.integrations.lightning.running import differences, ending, fit, saver, trainer_of


class Stop(Exception):
    pass


class StopsAt(models.Net):
    """Fails in the step after `at`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.at:
            raise Stop
        return super().training_step(batch, batch_idx)


def _interrupted(root: Path, at: int, **options: Any) -> None:
    options = {"every_n_steps": 2, **options}
    with pytest.raises(Stop):
        fit(lambda: StopsAt(at), models.train_loader, saver(root, **options))


def _break(step_dir: Path) -> None:
    shard = next(step_dir.glob("*.safetensors"))
    with shard.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 64)


def test_a_run_that_failed_goes_on_by_itself_and_says_so_in_one_line(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed = ending(*fit(models.Net, models.train_loader))
    _interrupted(root, 9)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        resumed = ending(
            *fit(models.Net, models.train_loader, saver(root, every_n_steps=2), seed=1)
        )
    assert not differences(undisturbed, resumed)
    said = [r.getMessage() for r in caplog.records if "resumed from" in r.getMessage()]
    assert said == [f"resumed from step 8 (epoch 1, mid-epoch) of {root}"]


@pytest.mark.parametrize("saving", [{"every_n_steps": 2}, {"every_n_epochs": 1}])
def test_a_run_that_had_a_validation_goes_on_without_its_loader(root: Path, saving: Any) -> None:
    val = models.val_loader()
    with pytest.raises(Stop):
        fit(lambda: StopsAt(9), models.train_loader, saver(root, **saving), val=val)
    resumed = ending(*fit(models.Net, models.train_loader, saver(root, **saving), seed=1))
    assert (resumed["global_step"], resumed["batches"]) == (15, 15)


def test_a_run_that_had_ended_trains_nothing_more(root: Path) -> None:
    first = ending(*fit(models.Net, models.train_loader, saver(root)))
    again = ending(*fit(models.Net, models.train_loader, saver(root), seed=1))
    assert not differences(first, again)


def test_a_run_that_had_ended_goes_on_when_it_is_given_more_epochs(root: Path) -> None:
    undisturbed = ending(*fit(models.Net, models.train_loader, max_epochs=4))
    fit(models.Net, models.train_loader, saver(root))
    longer = ending(*fit(models.Net, models.train_loader, saver(root), seed=1, max_epochs=4))
    assert not differences(undisturbed, longer)


@pytest.mark.parametrize("val", [False, True], ids=["no validation", "validation"])
def test_a_run_that_ended_by_steps_mid_epoch_goes_on_when_it_is_given_more(
    root: Path, val: bool
) -> None:
    loader = models.val_loader() if val else None
    undisturbed = ending(
        *fit(models.Net, models.train_loader, val=loader, max_epochs=-1, max_steps=13)
    )
    options = {"val": loader, "max_epochs": -1}
    fit(models.Net, models.train_loader, saver(root), max_steps=7, **options)
    longer = ending(
        *fit(models.Net, models.train_loader, saver(root), seed=1, max_steps=13, **options)
    )
    assert not differences(undisturbed, longer)


class StopsItself(models.OwnHook):
    """Ends training in its own hook after the seventh step."""

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.trainer.should_stop = self.global_step == 7


@pytest.mark.parametrize("saving", [{}, {"every_n_steps": 2}], ids=["at the end", "every 2"])
@pytest.mark.parametrize("make", [models.OwnHook, StopsItself], ids=["by steps", "by itself"])
def test_a_run_that_ended_mid_epoch_goes_on_though_the_module_has_an_own_hook_after_batches(
    root: Path, saving: Any, make: Any
) -> None:
    undisturbed = ending(*fit(models.OwnHook, models.train_loader, max_epochs=-1, max_steps=13))
    most = 7 if make is models.OwnHook else 13
    fit(make, models.train_loader, saver(root, **saving), max_epochs=-1, max_steps=most)
    assert committed_steps(root)[-1] == 7
    longer = saver(root, **saving)
    resumed = fit(models.OwnHook, models.train_loader, longer, seed=1, max_epochs=-1, max_steps=13)
    assert not differences(undisturbed, ending(*resumed))


@pytest.mark.parametrize("val", [False, True], ids=["no validation", "validation"])
def test_an_epoch_that_was_stopped_in_its_middle_is_saved_as_such_when_only_epochs_are(
    root: Path, val: bool
) -> None:
    options = {"val": models.val_loader() if val else None, "max_epochs": -1}
    undisturbed = ending(*fit(models.Net, models.train_loader, max_steps=13, **options))
    fit(models.Net, models.train_loader, saver(root, save_last=False), max_steps=7, **options)
    resumed = fit(models.Net, models.train_loader, saver(root), seed=1, max_steps=13, **options)
    assert committed_steps(root) == (5, 7, 10, 13)
    assert not differences(undisturbed, ending(*resumed))


class Asks(models.Net):
    """Asks training to end after the third step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trainer.should_stop = self.trainer.should_stop or self.global_step == 2
        return super().training_step(batch, batch_idx)


class AsksInItsHook(models.OwnHook):
    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.trainer.should_stop = self.trainer.should_stop or self.global_step == 3


@pytest.mark.parametrize("make", [Asks, AsksInItsHook])
@pytest.mark.parametrize("least", [{"min_steps": 7}, {"min_epochs": 2}], ids=["steps", "epochs"])
def test_a_stop_that_is_held_back_is_not_forgotten(
    root: Path, tmp_path: Path, make: Any, least: dict[str, int]
) -> None:
    undisturbed = fit(make, models.train_loader, saver(root, every_n_steps=1), **least)
    assert committed_steps(root)[-1] == (7 if "min_steps" in least else 10)
    for step in (3, 5, 6):
        beside = saver(tmp_path / f"from-{step}")
        path = str(step_path(root, step))
        resumed = fit(make, models.train_loader, beside, seed=8, ckpt_path=path, **least)
        assert not differences(ending(*undisturbed), ending(*resumed)), step


def _stopped_early(root: Path, seed: int, *, interval: int = 5, **settings: Any) -> Any:
    """How a run ends, and its step."""
    early = [EarlyStopping("val_loss", **settings)] if settings else []
    options = {"val": models.val_loader(), "val_check_interval": interval, "seed": seed}
    found = fit(models.Net, models.train_loader, *early, saver(root), **options)
    return found[0].global_step, ending(*found)["state_dict"]


@pytest.mark.parametrize(
    ("ended_at", "settings"),
    [
        (10, {"patience": 1, "min_delta": 10.0}),
        (4, {"patience": 1, "min_delta": 10.0, "interval": 2}),
        (5, {"stopping_threshold": 1e9}),
        (5, {"divergence_threshold": 1e-9}),
    ],
    ids=["patience", "patience within an epoch", "threshold", "divergence"],
)
def test_a_run_that_early_stopping_ended_trains_nothing_more(
    root: Path, ended_at: int, settings: dict[str, Any]
) -> None:
    first = _stopped_early(root, 7, **settings)
    assert first[0] == ended_at
    for seed in (8, 9):
        assert not differences(first, _stopped_early(root, seed, **settings))
    assert committed_steps(root)[-1] == ended_at


@pytest.mark.parametrize(
    "settings",
    [{}, {"patience": 2, "min_delta": 10.0}, {"patience": 1, "min_delta": 0.0}],
    ids=["without it", "more patience", "another min_delta"],
)
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_run_that_early_stopping_ended_goes_on_where_the_one_of_now_would_not_have_ended_it(
    root: Path, settings: dict[str, Any]
) -> None:
    assert _stopped_early(root, 7, patience=1, min_delta=10.0)[0] == 10
    assert _stopped_early(root, 8, **settings)[0] == 15


def test_a_second_fit_of_one_process_goes_on_with_what_is_in_memory(root: Path) -> None:
    torch.manual_seed(7)
    module, callback = models.Net(), saver(root, resume="never")
    trainer = trainer_of(callback, max_epochs=1)
    trainer.fit(module, models.train_loader())
    with torch.no_grad():
        module.net[0].weight.fill_(0.5)
    trainer.fit_loop.max_epochs = 1
    trainer.fit(module, models.train_loader())
    assert (module.net[0].weight == 0.5).all()


class FailsOnce(models.Net):
    """Fails once in one of its methods: its data is not there yet, or its first batch is too large."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.fails_at = at

    def _begin(self, method: str) -> None:
        if method == self.fails_at:
            self.fails_at = ""
            raise Stop

    def train_dataloader(self) -> Any:
        self._begin("train_dataloader")
        return models.train_loader()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self._begin("training_step")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("anew", [False, True], ids=["same trainer", "new trainer"])
@pytest.mark.parametrize("at", ["train_dataloader", "training_step"])
def test_a_second_fit_resumes_where_the_first_failed_before_it_trained(
    root: Path, at: str, anew: bool
) -> None:
    undisturbed = ending(*fit(models.Net, models.train_loader))
    _interrupted(root, 9)
    torch.manual_seed(8)
    module, callback = FailsOnce(at), saver(root, every_n_steps=2)
    trainer = trainer_of(callback)
    with pytest.raises(Stop):
        trainer.fit(module)
    if anew:
        module, trainer = FailsOnce(""), trainer_of(callback)
    trainer.fit(module)
    assert not differences(undisturbed, ending(trainer, module))


def test_steps_are_refused_again_where_the_first_fit_failed_before_it_trained(root: Path) -> None:
    module, callback = FailsOnce("train_dataloader"), saver(root, resume="never")
    trainer = trainer_of(callback)
    with pytest.raises(Stop):
        trainer.fit(module)
    _interrupted(root, 5)
    with pytest.raises(ConfigError, match=r"resume='never'.*2 steps"):
        trainer.fit(module)


def _two_fits(*callbacks: Any, seed: int) -> Any:
    """How a program ends that trains one epoch, and then two more with the same trainer."""
    torch.manual_seed(seed)
    module, trainer = models.Net(), trainer_of(*callbacks, max_epochs=1)
    trainer.fit(module, models.train_loader())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, models.train_loader())
    return ending(trainer, module)


@pytest.mark.parametrize("at", [4, 5, 7, 9, 10, 11, 13])
def test_a_program_of_two_fits_that_was_killed_in_one_of_them_ends_as_if_it_had_not(
    root: Path, at: int
) -> None:
    def fail(trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == at:
            raise Stop

    undisturbed = _two_fits(seed=7)
    with pytest.raises(Stop):
        _two_fits(saver(root, every_n_steps=1), LambdaCallback(on_train_batch_start=fail), seed=7)
    assert committed_steps(root)[-1] == at
    assert not differences(undisturbed, _two_fits(saver(root, every_n_steps=1), seed=8))
    assert not differences(undisturbed, _two_fits(saver(root, every_n_steps=1), seed=9))


def _two_fits_by_steps(*callbacks: Any, seed: int, fits: int = 2) -> Any:
    """How a program ends whose first fit ends by its steps within an epoch."""
    torch.manual_seed(seed)
    module, trainer = models.Net(), trainer_of(*callbacks, max_epochs=-1, max_steps=7)
    trainer.fit(module, models.train_loader(), models.val_loader())
    if fits == 2:
        trainer.fit_loop.epoch_loop.max_steps = 13
        trainer.fit(module, models.train_loader(), models.val_loader())
    return ending(trainer, module)


@pytest.mark.parametrize("saving", [{}, {"every_n_steps": 1}], ids=["at the end", "every step"])
def test_a_second_fit_begins_an_epoch_where_the_first_had_ended_within_one_in_another_process(
    root: Path, saving: Any
) -> None:
    undisturbed = _two_fits_by_steps(seed=7)
    _two_fits_by_steps(saver(root, **saving), seed=7, fits=1)
    assert committed_steps(root)[-1] == 7
    assert not differences(undisturbed, _two_fits_by_steps(saver(root, **saving), seed=8))


def test_a_step_behind_the_end_of_the_fit_is_refused_by_lightning_when_it_is_asked_for(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(models.Net, models.train_loader, saver(root))
    with pytest.raises(MisconfigurationException, match=r"current_epoch=3.*max_epochs=1"):
        fit(models.Net, models.train_loader, saver(root), max_epochs=1, ckpt_path=str(root))
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        trainer, _ = fit(models.Net, models.train_loader, saver(root), max_epochs=1)
    assert "step 15 lies behind the end of this fit: nothing was trained" in caplog.text
    assert (trainer.global_step, trainer.current_epoch, trainer.max_epochs) == (15, 3, 1)


def test_a_root_that_holds_steps_is_refused_when_resume_is_never(root: Path) -> None:
    _interrupted(root, 5)
    with pytest.raises(ConfigError, match=r"resume='never'.*2 steps .newest 4.*another root"):
        fit(models.Net, models.train_loader, saver(root, resume="never"))


def test_an_explicit_ckpt_path_wins(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    _interrupted(root, 9)
    undisturbed = ending(*fit(models.Net, models.train_loader))
    path = str(step_path(root, 4))
    with caplog.at_level(logging.INFO, logger="lightning.pytorch"):
        resumed = ending(*fit(models.Net, models.train_loader, saver(root), ckpt_path=path))
    assert f"resumed from step 4 (epoch 0, mid-epoch) of {path}" in caplog.text
    assert not differences(undisturbed, resumed)


def test_an_explicit_ckpt_path_wins_over_never_too(root: Path) -> None:
    _interrupted(root, 9)
    undisturbed = ending(*fit(models.Net, models.train_loader))
    path, callback = str(step_path(root, 4)), saver(root, resume="never")
    resumed = ending(*fit(models.Net, models.train_loader, callback, ckpt_path=path))
    assert not differences(undisturbed, resumed)


def test_last_goes_on_from_the_newest_step(root: Path) -> None:
    _interrupted(root, 9)
    undisturbed = ending(*fit(models.Net, models.train_loader))
    resumed = ending(*fit(models.Net, models.train_loader, saver(root), ckpt_path="last"))
    assert not differences(undisturbed, resumed)


def test_a_corrupt_newest_step_is_passed_over_with_a_warning(root: Path) -> None:
    undisturbed = ending(*fit(models.Net, models.train_loader))
    _interrupted(root, 9)
    _break(step_path(root, 8))
    with pytest.warns(CheckpointWarning, match="step 8 is corrupt, going back"):
        resumed = ending(*fit(models.Net, models.train_loader, saver(root, every_n_steps=3)))
    assert not differences(undisturbed, resumed)


def test_a_root_without_any_whole_step_is_an_error_not_a_fresh_start(root: Path) -> None:
    _interrupted(root, 5)
    for step in committed_steps(root):
        _break(step_path(root, step))
    with pytest.warns(CheckpointWarning), pytest.raises(CorruptCheckpoint):
        fit(models.Net, models.train_loader, saver(root))


def test_a_root_of_another_model_is_refused_before_anything_is_changed(root: Path) -> None:
    class Wider(models.Net):
        def __init__(self) -> None:
            super().__init__()
            self.net[4] = torch.nn.Linear(8, 2)
            self.extra = torch.nn.Linear(2, 2)

    _interrupted(root, 5)
    before = committed_steps(root)
    with pytest.raises(
        StateMismatch, match=r"another model.*extra.weight is missing.*root of its own"
    ):
        fit(Wider, models.train_loader, saver(root))
    assert committed_steps(root) == before


def test_a_root_that_another_run_writes_to_is_refused(root: Path) -> None:
    class Second(models.Net):
        def on_train_start(self) -> None:
            with pytest.raises(RootBusy):
                fit(models.Net, models.train_loader, saver(root))
            self.tried = True

    _, module = fit(Second, models.train_loader, saver(root), max_epochs=1)
    assert module.tried


def test_the_newest_step_is_known_without_a_trainer(root: Path) -> None:
    assert AsyncCheckpoint.latest(root) is None
    _interrupted(root, 5)
    assert AsyncCheckpoint.latest(root) == str(step_path(root, 4))


def test_no_model_checkpoint_is_made_beside_and_one_of_the_users_own_works(
    root: Path, tmp_path: Path
) -> None:
    trainer = trainer_of(saver(root))
    assert [type(c).__name__ for c in trainer.checkpoint_callbacks] == ["AsyncCheckpoint"]
    theirs = ModelCheckpoint(tmp_path / "theirs", every_n_epochs=1, save_top_k=-1)
    fit(models.Net, models.train_loader, theirs, saver(root))
    assert len(list((tmp_path / "theirs").glob("*.ckpt"))) == 3
    assert committed_steps(root) == (5, 10, 15)


def test_the_callback_changes_nothing_when_it_may_not_leave_anything_behind(root: Path) -> None:
    fit(models.Net, models.train_loader, saver(root), fast_dev_run=True)
    assert not root.exists()


def test_a_moved_root_is_as_good_as_the_old_one(root: Path, tmp_path: Path) -> None:
    undisturbed = ending(*fit(models.Net, models.train_loader))
    _interrupted(root, 9)
    moved = Path(shutil.move(root, tmp_path / "elsewhere"))
    resumed = ending(*fit(models.Net, models.train_loader, saver(moved)))
    assert not differences(undisturbed, resumed)


def test_save_on_exception_keeps_the_last_whole_step(root: Path) -> None:
    undisturbed = ending(*fit(models.Net, models.train_loader))
    _interrupted(root, 8, every_n_steps=None, every_n_epochs=50, save_on_exception=True)
    assert committed_steps(root) == (8,)
    resumed = ending(*fit(models.Net, models.train_loader, saver(root)))
    assert not differences(undisturbed, resumed)


@pytest.mark.parametrize(("accumulated", "at"), [(1, 8), (2, 4)])
def test_save_on_exception_keeps_it_though_the_module_has_an_own_hook_after_batches(
    root: Path, accumulated: int, at: int
) -> None:
    class Fails(models.OwnHook):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.global_step == at and batch_idx == 3:
                raise Stop
            return super().training_step(batch, batch_idx)

    options = {"accumulate_grad_batches": accumulated}
    undisturbed = ending(*fit(models.OwnHook, models.train_loader, **options))
    rare = {"every_n_epochs": 50, "save_on_exception": True}
    with pytest.raises(Stop):
        fit(Fails, models.train_loader, saver(root, **rare), **options)
    assert committed_steps(root) == (at,)
    resumed = ending(*fit(models.OwnHook, models.train_loader, saver(root), **options))
    assert not differences(undisturbed, resumed)


class Shrinks(models.OwnHook):
    """Changes weights once more at each call."""

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        with torch.no_grad():
            self.net[4].weight.mul_(0.99)


class ShrinksByHand(Shrinks):
    """Steps in odd batches alone."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class Third(models.Noisy):
    """Samples in their order; the third batch is None, or fails when it is fetched."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__(augment=False)
        self.fails = fails

    def __getitem__(self, index: int) -> Any:
        if index // models.BATCH_SIZE == 2:
            if self.fails:
                raise Stop
            return None
        return super().__getitem__(index)

    def loader(self) -> Any:
        return DataLoader(self, models.BATCH_SIZE, collate_fn=_none_if_any_is)


def _none_if_any_is(samples: list[Any]) -> Any:
    return None if None in samples else default_collate(samples)


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None")
@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.parametrize("make", [Shrinks, ShrinksByHand])
def test_what_is_kept_for_a_failure_is_whole_behind_batches_without_a_step_too(
    root: Path, make: type[Shrinks], validated: bool
) -> None:
    class Fails(make):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if (self.current_epoch, batch_idx) == (1, 3):
                raise Stop
            return super().training_step(batch, batch_idx)

    def ran(make: Any, *callbacks: Any) -> dict[str, Any]:
        val = models.val_loader() if validated else None
        found = ending(
            *fit(make, Third().loader, *callbacks, val=val, max_epochs=2, val_check_interval=2)
        )
        return {name: value for name, value in found.items() if name != "batches"}

    undisturbed = ran(make)
    with pytest.raises(Stop):
        ran(Fails, saver(root, every_n_epochs=50, save_on_exception=True))
    assert committed_steps(root) == ((3,) if make is ShrinksByHand else (6,))
    assert not differences(undisturbed, ran(make, saver(root)))


@pytest.mark.parametrize("make", [models.Net, models.OwnHook])
@pytest.mark.parametrize(
    "when", [{"every_n_steps": 1}, {"every_n_epochs": 50, "save_on_exception": True}]
)
def test_the_last_whole_step_is_saved_when_the_loader_fails(
    root: Path, make: type[models.Net], when: dict[str, Any]
) -> None:
    def loader() -> Any:
        return DataLoader(models.Noisy(augment=False), models.BATCH_SIZE)

    undisturbed = ending(*fit(make, loader))
    with pytest.raises(Stop):
        fit(make, Third(fails=True).loader, saver(root, **when))
    assert committed_steps(root)[-1:] == (2,)
    assert not differences(undisturbed, ending(*fit(make, loader, saver(root))))


def test_a_step_is_not_saved_when_the_modules_own_hook_behind_it_fails(root: Path) -> None:
    class Fails(models.OwnHook):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            if self.global_step == 3:
                raise Stop

    with pytest.raises(Stop):
        fit(Fails, models.train_loader, saver(root, every_n_steps=1, save_on_exception=True))
    assert committed_steps(root) == (1, 2)


def test_without_save_on_exception_a_failure_saves_nothing(root: Path) -> None:
    _interrupted(root, 8, every_n_steps=None, every_n_epochs=50)
    assert committed_steps(root) == ()


def test_an_own_hook_after_batches_waits_for_a_snapshot_also_where_gradients_are_added_up(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[str, int]] = []
    wait_staged = Session.wait_staged

    def waits(session: Session) -> None:
        wait_staged(session)
        called.append(("waited", session.ranks.trainer.fit_loop.epoch_loop.batch_idx))

    class Hooked(models.OwnHook):
        def on_train_batch_end(self, *args: Any) -> None:
            called.append(("changes", args[-1]))
            super().on_train_batch_end(*args)

    monkeypatch.setattr(Session, "wait_staged", waits)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 1}
    fit(Hooked, models.train_loader, saver(root, every_n_steps=1), **options)
    for batch in range(models.BATCHES):
        assert called.index(("waited", batch)) < called.index(("changes", batch)), called
