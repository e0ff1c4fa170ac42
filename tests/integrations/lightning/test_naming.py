""" "last", "best" and `load_from_checkpoint`, in a process that has trained nothing."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core import saving

from ckpt_core import Auto, ConfigError, NotCommitted, UntrustedData, step_path
from ckpt_lightning import AsyncCheckpoint
from tests.integrations.lightning import models
from tests.integrations.lightning.running import differences, ending, fit, saver, trainer_of
from tests.integrations.lightning.test_io import Odd

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
VALUES = (0.5, 0.1, 0.9)
BEST, LAST = 10, 15


class Scored(models.Net):
    """Logs a score for each epoch, and shows by `predict` which weights it has."""

    def __init__(self, width: int = 3, extra: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.state.fn == "fit":
            self.log("score", VALUES[self.trainer.current_epoch])

    test_step = models.Net.validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net[0].weight.detach().clone()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the best step, which is not the newest."""
    root = tmp_path_factory.mktemp("trained") / "root"
    with warnings.catch_warnings(action="ignore"):
        _train(saver(root, monitor="score"))
    return root


def _train(callback: AsyncCheckpoint, *more: Any, **options: Any) -> tuple[Trainer, Any]:
    return fit(
        lambda: Scored(width=5),
        models.train_loader,
        callback,
        *more,
        val=models.val_loader(),
        **options,
    )


def _weight(path: Path) -> torch.Tensor:
    return Scored.load_from_checkpoint(path).net[0].weight.detach()


VERBS: dict[str, Callable[[Trainer, Any, str], Any]] = {
    "validate": lambda t, m, path: t.validate(m, models.val_loader(), ckpt_path=path),
    "test": lambda t, m, path: t.test(m, models.val_loader(), ckpt_path=path, verbose=False),
    "predict": lambda t, m, path: t.predict(m, models.val_loader(), ckpt_path=path),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("name", "step"), [("best", BEST), ("last", LAST)])
@pytest.mark.parametrize("options", [{"monitor": "score"}, {}], ids=["same script", "no monitor"])
def test_a_new_process_takes_the_names_from_the_root(
    trained: Path, verb: str, name: str, step: int, options: dict[str, Any]
) -> None:
    module = Scored()
    VERBS[verb](trainer_of(saver(trained, **options)), module, name)
    assert torch.equal(module.net[0].weight, _weight(step_path(trained, step)))


def test_the_root_says_which_step_is_best_and_which_is_newest(trained: Path, root: Path) -> None:
    assert AsyncCheckpoint.best(trained) == str(step_path(trained, BEST))
    assert AsyncCheckpoint.latest(trained) == str(step_path(trained, LAST))
    fresh = saver(trained)
    assert (fresh.best_model_path, fresh.last_model_path) == (
        str(step_path(trained, BEST)),
        str(step_path(trained, LAST)),
    )
    assert AsyncCheckpoint.best(root) is None
    fit(models.Net, models.train_loader, saver(root), max_epochs=2)
    assert AsyncCheckpoint.best(root) == str(step_path(root, 10))


def test_the_best_is_found_though_the_newest_step_is_damaged_or_the_best_one_gone(
    trained: Path, root: Path
) -> None:
    shutil.copytree(trained, root)
    (step_path(root, LAST) / "rank-00000.json").write_text("{")
    assert AsyncCheckpoint.best(root) == str(step_path(root, BEST))
    shutil.rmtree(step_path(root, BEST))
    assert AsyncCheckpoint.best(root) == str(step_path(root, 5))


def test_a_subclass_with_a_state_of_its_own_name_is_asked_too(root: Path) -> None:
    class Own(AsyncCheckpoint):
        @property
        def state_key(self) -> str:
            return "own"

    options = saver(root).options
    _train(Own(root, monitor="score", options=options), max_epochs=2)
    assert AsyncCheckpoint.best(root) == str(step_path(root, 10))


@pytest.mark.parametrize("name", ["best", "last"])
def test_an_empty_root_is_named_and_no_untrained_weights_are_validated(
    root: Path, name: str
) -> None:
    trainer = trainer_of(saver(root))
    with pytest.raises(NotCommitted, match=rf"validate\(ckpt_path='{name}'\).*no committed step"):
        trainer.validate(Scored(), models.val_loader(), ckpt_path=name)


def test_another_monitor_than_that_of_the_root_is_named(trained: Path) -> None:
    trainer = trainer_of(saver(trained, monitor="acc"))
    with pytest.raises(ConfigError, match=r"monitor='acc'.*monitored 'score'"):
        trainer.validate(Scored(), models.val_loader(), ckpt_path="best")


def test_fit_goes_on_from_the_last_or_from_the_best(
    trained: Path, root: Path, tmp_path: Path
) -> None:
    undisturbed = ending(*_train(saver(tmp_path / "other")))
    shutil.copytree(trained, root)
    trainer, module = _train(saver(root, monitor="score"), ckpt_path="best", seed=1)
    assert not differences(undisturbed["state_dict"], ending(trainer, module)["state_dict"])
    trainer, module = _train(saver(root, monitor="score"), ckpt_path="last", seed=1)
    assert not differences(undisturbed, ending(trainer, module))


def test_a_fit_that_goes_on_from_the_last_begins_where_there_is_none(root: Path) -> None:
    trainer, _ = _train(saver(root), ckpt_path="last", max_epochs=1)
    assert trainer.global_step == 5


def test_a_second_fit_of_a_process_reads_the_last_step_when_it_is_told_to(root: Path) -> None:
    trainer, module = _train(saver(root), max_epochs=1)
    expected = module.net[0].weight.detach().clone()
    with torch.no_grad():
        module.net[0].weight.zero_()
    trainer.fit(module, models.train_loader(), models.val_loader(), ckpt_path="last")
    assert torch.equal(module.net[0].weight, expected)


def test_beside_a_modelcheckpoint_the_newer_of_both_is_the_last(
    trained: Path, tmp_path: Path
) -> None:
    theirs = ModelCheckpoint(tmp_path / "theirs", save_last=True)
    trainer, module = _train(saver(tmp_path / "ours"), theirs, max_epochs=1)
    expected = module.net[0].weight.detach().clone()
    last = tmp_path / "theirs" / "last.ckpt"
    for newer in (False, True):
        os.utime(last, (2e9, 2e9) if newer else (1e9, 1e9))
        with torch.no_grad():
            module.net[0].weight.zero_()
        trainer.validate(module, models.val_loader(), ckpt_path="last", verbose=False)
        assert torch.equal(module.net[0].weight, expected)
        assert trainer.ckpt_path == (str(last) if newer else str(step_path(tmp_path / "ours", 5)))
    fresh = ModelCheckpoint(tmp_path / "nothing")
    module = Scored()
    trainer_of(saver(trained), fresh).validate(module, models.val_loader(), ckpt_path="last")
    assert torch.equal(module.net[0].weight, _weight(step_path(trained, LAST)))


# -- load_from_checkpoint ------------------------------------------------------------------------


def test_load_from_checkpoint_opens_a_step_or_a_root(trained: Path) -> None:
    best = Scored.load_from_checkpoint(AsyncCheckpoint.best(trained))
    newest = Scored.load_from_checkpoint(trained, map_location="cpu", extra=4)
    assert (best.hparams.width, newest.hparams.width, newest.hparams.extra) == (5, 5, 4)
    assert not torch.equal(best.net[0].weight, newest.net[0].weight)


def test_load_from_checkpoint_moves_the_weights_to_a_device(trained: Path) -> None:
    opened = saving.pl_load(trained, map_location="meta")
    assert {value.device.type for value in opened["state_dict"].values()} == {"meta"}


def test_load_from_checkpoint_still_opens_a_file_of_lightnings(tmp_path: Path) -> None:
    theirs = ModelCheckpoint(tmp_path)
    _, module = fit(lambda: Scored(width=5), models.train_loader, theirs, max_epochs=1)
    loaded = Scored.load_from_checkpoint(theirs.best_model_path)
    assert torch.equal(loaded.net[0].weight, module.net[0].weight)


def test_load_from_checkpoint_runs_no_code_unless_it_is_told_to(root: Path) -> None:
    fit(lambda: Scored(extra=Odd()), models.train_loader, saver(root), max_epochs=1)
    with pytest.raises(UntrustedData):
        Scored.load_from_checkpoint(root)
    loaded = Scored.load_from_checkpoint(root, weights_only=False)
    assert loaded.hparams.extra == Odd()


def test_load_from_checkpoint_names_a_directory_without_steps(tmp_path: Path) -> None:
    with pytest.raises(NotCommitted):
        Scored.load_from_checkpoint(tmp_path)


# -- copies --------------------------------------------------------------------------------------


class Copies(Callback):
    """Copies all callbacks in the middle of training."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 7:
            self.made = copy.deepcopy(trainer.callbacks)  # type: ignore[attr-defined]
            self.pickled = pickle.loads(pickle.dumps(trainer.checkpoint_callback))


def test_callbacks_can_be_copied_while_training_goes_on(root: Path) -> None:
    watch, callback = Copies(), saver(root, monitor="score", policy=Auto(cache=False))
    trainer, _ = _train(callback, watch)
    for copied in (watch.made[-1], watch.pickled):
        assert type(copied) is AsyncCheckpoint
        assert copied.best_model_path == str(step_path(root, 5))
    assert callback.best_model_path == str(step_path(root, BEST))
    assert not _reaches(callback, trainer)


def _reaches(callback: AsyncCheckpoint, trainer: Trainer) -> bool:
    """Whether a pickled callback would drag the trainer along."""
    seen = []

    class Looks(pickle.Pickler):
        def persistent_id(self, obj: Any) -> None:
            seen.append(obj is trainer)

    with open(os.devnull, "wb") as nowhere:
        Looks(nowhere).dump(callback)
    return any(seen)
