"""What is copied at once, what later, and that neither changes under a save."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

import ckpt_core
from ckpt_core import committed_steps, step_path
from ckpt_lightning.capture import Owned, frozen, protected
from tests.integrations.lightning import models
from tests.integrations.lightning.running import differences, fit, saver, trainer_of


@pytest.fixture
def trained() -> tuple[models.Net, torch.optim.Optimizer]:
    module = models.Net()
    optimizer = torch.optim.AdamW(module.parameters())
    module.loss((torch.randn(4, models.FEATURES), torch.randn(4, 1))).backward()
    optimizer.step()
    return module, optimizer


def test_what_an_optimizer_owns_stays_a_reference_and_the_rest_is_copied(trained: Any) -> None:
    module, optimizer = trained
    tree = {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    made = protected(tree, Owned([optimizer]), above_bytes=0)
    live, kept = tree["state_dict"], made["state_dict"]
    same = {name for name in live if live[name].data_ptr() == kept[name].data_ptr()}
    assert same == {name for name, _ in module.named_parameters()}
    assert not differences(dict(live), dict(kept))
    assert type(kept) is OrderedDict and kept._metadata == live._metadata
    assert made["optimizer_states"] is tree["optimizer_states"]


def test_small_tensors_are_left_to_the_save(trained: Any) -> None:
    module, optimizer = trained
    tree = {"state_dict": module.state_dict()}
    made = protected(tree, Owned([optimizer]), above_bytes=1 << 20)
    assert all(
        tree["state_dict"][name].data_ptr() == value.data_ptr()
        for name, value in made["state_dict"].items()
    )


def test_a_parameter_that_no_optimizer_has_is_copied() -> None:
    module = models.Net()
    optimizer = torch.optim.SGD(module.net[0].parameters())
    made = protected({"state_dict": module.state_dict()}, Owned([optimizer]), above_bytes=0)
    last = made["state_dict"]["net.4.weight"]
    assert last.data_ptr() != module.net[4].weight.data_ptr()


def test_memory_that_two_names_share_is_copied_once() -> None:
    buffer = torch.arange(4.0)
    made = protected({"a": buffer, "b": {"c": buffer.detach()}}, Owned([]), above_bytes=0)
    assert made["a"].data_ptr() == made["b"]["c"].data_ptr() != buffer.data_ptr()


def test_a_frozen_tree_keeps_python_values_as_they_were() -> None:
    live: dict[str, Any] = {"rates": [0.1], "deep": {"set": {1}}, "pair": (1, [2])}
    kept = frozen(live, Owned([]))
    live["rates"][0] = 0.2
    live["deep"]["set"].add(2)
    live["pair"][1].append(3)
    assert kept == {"rates": [0.1], "deep": {"set": {1}}, "pair": (1, [2])}


class Shadow(Callback):
    """Keeps a copy of everything as of each step, for comparison with what was saved."""

    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        optimizer = trainer.optimizers[0].state_dict()
        self.seen[trainer.global_step] = {
            "state_dict": {name: value.clone() for name, value in module.state_dict().items()},
            "optimizer": frozen(optimizer, Owned([])),
            "rates": list(trainer.lr_scheduler_configs[0].scheduler._last_lr),
        }


def test_each_step_holds_the_values_of_that_step_and_no_later_one(root: Path) -> None:
    shadow = Shadow()
    fit(models.Net, models.train_loader, shadow, saver(root, every_n_steps=1))
    assert committed_steps(root) == tuple(range(1, 16))
    for step in committed_steps(root):
        tree = ckpt_core.load(step_path(root, step))
        saved = {
            "state_dict": dict(tree["state_dict"]),
            "optimizer": tree["optimizer_states"][0],
            "rates": tree["lr_schedulers"][0]["_last_lr"],
        }
        assert not differences(shadow.seen[step], saved)


class AsLateAsMayBe(Callback):
    """Saves copy nothing before training waits for them."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._jobs: list[Any] = []

    def on_train_start(self, *_: Any) -> None:
        checkpointer = self._callback._recorder.session.checkpointer
        stager, wait = checkpointer._engine.pipeline.stager, checkpointer.wait_staged
        self._submit, stager.submit = stager.submit, self._jobs.append

        def release_and_wait(**options: Any) -> None:
            self._release()
            wait(**options)

        checkpointer.wait_staged = release_and_wait

    def _release(self) -> None:
        while self._jobs:
            self._submit(self._jobs.pop())

    def on_fit_end(self, *_: Any) -> None:
        self._release()


class SwapsBetweenEpochs(models.ScheduleFree):
    def on_validation_end(self) -> None:
        pass

    def on_train_epoch_start(self) -> None:
        self.optimizers().optimizer.train()


_CHECKS = {models.ScheduleFree: {"val_check_interval": 2}, SwapsBetweenEpochs: {}}


@pytest.mark.parametrize("make", [models.ScheduleFree, SwapsBetweenEpochs])
@pytest.mark.parametrize("saving", [{"every_n_steps": 1}, {}], ids=["steps", "epochs"])
def test_weights_that_an_optimizer_swaps_in_a_hook_are_saved_before(
    root: Path, make: Any, saving: Any
) -> None:
    callback = saver(root, **saving)
    val = models.val_loader()
    late = AsLateAsMayBe(callback)
    fit(make, models.train_loader, late, callback, val=val, **_CHECKS[make])
    assert len(committed_steps(root)) == (15 if saving else 3)


def test_what_a_failure_would_save_is_no_other_when_an_optimizer_swaps_weights(
    root: Path,
) -> None:
    class Fails(models.ScheduleFree):
        """With the other weights."""

        def on_train_batch_start(self, *_: Any) -> None:
            if self.global_step == 3:
                self.seen = {name: value.clone() for name, value in self.state_dict().items()}
                self.optimizers().optimizer.eval()
                raise ValueError

    callback = saver(root, every_n_epochs=9, save_on_exception=True)
    module = Fails()
    with pytest.raises(ValueError):
        trainer_of(callback).fit(module, models.train_loader())
    saved = ckpt_core.load(step_path(root, 3))["state_dict"]
    assert not differences(module.seen, dict(saved))


def test_without_the_barrier_before_the_update_the_engine_finds_the_torn_step(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: the barrier is what keeps saves whole."""
    callback = saver(root, every_n_steps=1)
    monkeypatch.setattr(callback, "on_before_optimizer_step", lambda *_: None)

    class Slow(Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            checkpointer = callback._recorder.session.checkpointer
            for optimizer in trainer.optimizers:
                checkpointer.leave_barrier_to_owner(optimizer)
            stager = checkpointer._engine.pipeline.stager
            submit = stager.submit

            def late(job: Any) -> None:
                self.jobs.append((submit, job))

            self.jobs: list[Any] = []
            stager.submit = late

        def on_train_batch_end(self, *_: Any) -> None:
            while self.jobs:
                do, job = self.jobs.pop()
                do(job)

        on_train_epoch_end = on_train_end = on_train_batch_end

    with pytest.warns(UserWarning, match="changed during staging"):
        fit(models.Net, models.train_loader, Slow(), callback, max_steps=4)
