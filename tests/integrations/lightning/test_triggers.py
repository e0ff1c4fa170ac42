"""When a save starts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from ckpt_core import (
    Auto,
    Checkpointer,
    ConfigError,
    EveryNSteps,
    Level,
    Options,
    committed_steps,
    step_path,
)
from ckpt_core.cli.listing import survey
from ckpt_core.cli.ranking import Score
from ckpt_lightning import AsyncCheckpoint, FabricCheckpoint
from ckpt_lightning.ranking import Ranking
from ckpt_lightning.triggers import Schedule, Triggers
from tests.integrations.lightning import models
from tests.integrations.lightning.running import SMALL, fit, saver, trainer_of

ALWAYS = 1e-6


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, (5, 10, 15)),
        ({"every_n_steps": 4}, (4, 8, 12, 15)),
        ({"every_n_steps": 4, "save_last": False}, (4, 8, 12)),
        ({"every_n_steps": 5}, (5, 10, 15)),
        ({"every_n_epochs": 2}, (10, 15)),
        ({"every_n_epochs": 2, "every_n_steps": 6}, (6, 10, 12, 15)),
        ({"every_n_steps": 100, "save_last": False}, ()),
        ({"policy": EveryNSteps(7)}, (7, 14, 15)),
        ({"policy": EveryNSteps(7) & EveryNSteps(2)}, (7, 14, 15)),
        ({"train_time_interval": timedelta(days=1)}, (15,)),
        ({"train_time_interval": ALWAYS, "save_last": False}, tuple(range(2, 16))),
    ],
    ids=str,
)
def test_steps_are_saved_when_they_were_asked_for(
    root: Path, options: dict[str, Any], steps: tuple[int, ...]
) -> None:
    fit(models.Net, models.train_loader, saver(root, **options))
    found = committed_steps(root)
    assert found == steps or found == (1, *steps)


def test_a_policy_that_measures_is_shown_the_engine(root: Path) -> None:
    fit(models.Net, models.train_loader, saver(root, policy=Auto(cache=False), save_last=False))
    # Eight iterations are timed before the first save.
    assert committed_steps(root)[0] == 9


@pytest.mark.parametrize(("every", "warns"), [(50, False), (None, True)])
def test_a_level_that_gets_the_multiples_beside_auto_is_not_warned_of(
    root: Path, tmp_path: Path, every: int | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    triggers = Triggers(every_n_steps=every, policy=Auto(cache=False))
    with Checkpointer(root, levels=[Level(str(tmp_path / "far"), every=50)]) as ck:
        triggers.schedule(monitors=False).watch(ck)
    assert ("hardly any will" in caplog.text) is warns


def _saves(schedule: Schedule, step: int) -> bool:
    due = schedule.after_step(step)
    if due:
        schedule.saved(step)
    return due


def test_a_policy_of_another_make_is_asked_beside_the_others() -> None:
    class Own:
        def due(self, step: int) -> bool:
            return step == 3

        def saved(self, step: int) -> None:
            pass

    schedule = Triggers(every_n_steps=2, policy=Own()).schedule(monitors=False)
    due = [step for step in range(1, 6) if _saves(schedule, step)]
    assert due == [2, 3, 4]


def test_a_step_that_lies_within_a_batch_of_several_is_made_up_for(root: Path) -> None:
    fit(models.TwoManual, models.train_loader, saver(root, every_n_steps=3, save_last=False))
    # The steps of this module go 2, 3, 5, 6, 8 | 10, 11, 13, 14, 16 | 18, 19, 21, 22, 24.
    assert committed_steps(root) == (3, 6, 10, 13, 16, 18, 21, 24)


def test_old_steps_go_and_the_newest_stay(root: Path) -> None:
    options = Options(keep_last=2, chunk_bytes="64KiB", staging_bytes="2MiB", writers=2)
    fit(models.Net, models.train_loader, saver(root, every_n_steps=1, options=options))
    assert committed_steps(root) == (14, 15)


def test_a_state_is_saved_once_though_several_triggers_want_it(root: Path) -> None:
    callback = saver(root, every_n_steps=5, every_n_epochs=1)
    seen: list[int] = []
    fit(models.Net, models.train_loader, callback, _Counting(seen))
    assert seen == [5, 10, 15]


class _Counting(AsyncCheckpoint):
    """A second, idle one, whose on_load and state are its own; it counts what the first one logs."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__("unused", every_n_epochs=99)
        self.seen = seen

    @property
    def state_key(self) -> str:
        return "counting"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        first = trainer.checkpoint_callbacks[0]
        if stage == "fit":
            log = first._recorder.session.checkpointer.events
            log.subscribe(lambda event: event.name == "begin" and self.seen.append(event.step))


# -- the best ------------------------------------------------------------------------------------


class Scripted(models.Net):
    """Logs these values, one for each validation."""

    def __init__(self, values: list[float]) -> None:
        super().__init__()
        self.values = list(values)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        self.log("score", self.values[self.trainer.current_epoch])


def _scores(values: list[float]) -> Callable[[], Scripted]:
    return lambda: Scripted(values)


def _best(root: Path, values: list[float], **options: Any) -> AsyncCheckpoint:
    small = Options(keep_last=1, chunk_bytes="64KiB", staging_bytes="2MiB", writers=2)
    callback = AsyncCheckpoint(root, monitor="score", options=small, **options)
    fit(
        _scores(values),
        models.train_loader,
        callback,
        val=models.val_loader(),
        max_epochs=len(values),
    )
    return callback


def test_the_best_steps_stay_beside_the_newest(root: Path) -> None:
    callback = _best(root, [0.5, 0.1, 0.9, 0.3, 0.7], save_top_k=2)
    assert committed_steps(root) == (10, 20, 25)
    assert callback.best_model_path == str(step_path(root, 10))
    assert callback.kth_best_model_path == str(step_path(root, 20))
    assert callback.last_model_path == str(step_path(root, 25))
    assert callback.best_model_score is not None and callback.current_score is not None
    assert float(callback.best_model_score) == pytest.approx(0.1)
    assert float(callback.current_score) == pytest.approx(0.7)
    assert list(callback.best_k_models) == [str(step_path(root, step)) for step in (10, 20)]
    scores = {row.step: row.score for row in survey(root).steps}
    assert scores[10] == Score("score", pytest.approx(0.1), best=True)
    assert scores[20] == Score("score", pytest.approx(0.3), best=False)
    assert scores[25] is None


def test_the_largest_is_best_when_mode_is_max(root: Path) -> None:
    callback = _best(root, [0.5, 0.1, 0.9, 0.3], mode="max")
    assert callback.best_model_path == str(step_path(root, 15))
    assert committed_steps(root) == (15, 20)


def test_all_validated_steps_stay_when_top_k_is_all(root: Path) -> None:
    _best(root, [0.5, 0.1, 0.9, 0.3], save_top_k=-1)
    assert committed_steps(root) == (5, 10, 15, 20)


def test_nothing_is_kept_for_its_score_when_top_k_is_zero(root: Path) -> None:
    _best(root, [0.5, 0.1, 0.9], save_top_k=0)
    assert committed_steps(root) == (15,)


def test_a_score_that_is_no_number_is_the_worst(root: Path) -> None:
    callback = _best(root, [float("nan"), 0.4, float("nan")])
    assert callback.best_model_path == str(step_path(root, 10))


def test_the_best_of_an_earlier_process_gives_way_to_a_better_one(root: Path) -> None:
    _best(root, [0.5, 0.1])
    assert committed_steps(root) == (10,)
    _best(root, [0.5, 0.1, 0.3])
    assert committed_steps(root) == (10, 15)
    callback = _best(root, [0.5, 0.1, 0.3, 0.05])
    assert callback.best_model_path == str(step_path(root, 20))
    assert committed_steps(root) == (20,)


def test_a_dethroned_step_goes_when_its_successor_is_committed_and_not_before(root: Path) -> None:
    callback = AsyncCheckpoint(
        root,
        monitor="score",
        options=Options(keep_last=1, chunk_bytes="64KiB", staging_bytes="2MiB"),
    )
    watch = _Retirements()
    fit(
        _scores([0.5, 0.1, 0.05]),
        models.train_loader,
        callback,
        watch,
        val=models.val_loader(),
        max_epochs=3,
    )
    # At the time of each, the step that takes its place was there.
    assert watch.retired == [(5, (10,)), (10, (15,))]


class _Retirements(Callback):
    """Notes each retired step, with those that are there."""

    def __init__(self) -> None:
        self.retired: list[tuple[int, tuple[int, ...]]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        checkpointer = trainer.checkpoint_callback._recorder.session.checkpointer

        def hear(event: Any) -> None:
            if event.name == "retired":
                self.retired.append((event.step, checkpointer.steps()))

        checkpointer.events.subscribe(hear)


def test_a_metric_of_training_can_be_monitored(root: Path) -> None:
    class LogsTraining(models.Net):
        def on_train_epoch_end(self) -> None:
            self.log("score", [3.0, 1.0, 2.0][self.trainer.current_epoch])

    callback = saver(root, monitor="score")
    fit(LogsTraining, models.train_loader, callback)
    assert callback.best_model_path == str(step_path(root, 10))


def test_validations_within_an_epoch_count(root: Path) -> None:
    callback = saver(root, monitor="val_loss", save_top_k=-1)
    fit(models.Net, models.train_loader, callback, val=models.val_loader(), val_check_interval=2)
    assert committed_steps(root) == (2, 4, 5, 7, 9, 10, 12, 14, 15) or committed_steps(root) == (
        2, 4, 7, 9, 12, 14, 15,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({"val": models.val_loader()}, 5),
        ({"val": models.val_loader(), "val_check_interval": 2}, 2),
        ({}, 5),
    ],
    ids=["validation", "within the epoch", "training alone"],
)
def test_a_monitor_that_is_not_logged_ends_training_at_once_with_the_names_that_are(
    root: Path, options: dict[str, Any], step: int
) -> None:
    trainer = trainer_of(saver(root, monitor="val_los"), max_epochs=3, **_without(options, "val"))
    logged = "val_loss" if options else "none"
    with pytest.raises(ConfigError, match=rf"monitor='val_los' was never logged.*are: {logged}"):
        trainer.fit(models.Net(), models.train_loader(), options.get("val"))
    assert trainer.global_step == step


def test_a_monitor_of_training_may_come_after_validations_within_the_epoch(root: Path) -> None:
    class LogsLoss(models.Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

    for number, monitor in enumerate(("loss", "loss_epoch")):
        callback = saver(root / str(number), monitor=monitor)
        options = {"val": models.val_loader(), "val_check_interval": 2, "max_epochs": 1}
        fit(LogsLoss, models.train_loader, callback, **options)
        assert callback.best_model_path


def _without(options: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}


def test_a_ranking_puts_back_what_gave_way_to_a_save_that_failed() -> None:
    ranking = Ranking("score", "min", 1)
    assert ranking.enter(5, 0.5).pin == (5,)
    change = ranking.enter(10, 0.1)
    assert (change.pin, dict(change.unpin)) == ((10,), {5: 0.5})
    ranking.undo(10, change)
    assert ranking.kept == {5: 0.5}


def test_the_best_step_of_a_root_that_was_lost_gives_way_to_a_better_one_alone() -> None:
    ranking = Ranking("score", "min", 1)
    assert ranking.restore({1: 0.3, 5: 0.4}, existing=[5]) == ()
    assert ranking.kept == {5: 0.4} and ranking.away == {1: 0.3}
    change = ranking.enter(10, 0.35)
    assert (change.pin, dict(change.unpin), dict(change.unpin_away)) == ((10,), {5: 0.4}, {})
    change = ranking.enter(15, 0.2)
    assert (dict(change.unpin), dict(change.unpin_away)) == ({10: 0.35}, {1: 0.3})
    ranking.undo(15, change)
    assert ranking.kept == {10: 0.35} and ranking.away == {1: 0.3}


# -- wrong arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every_n_steps": 0}, "every_n_steps=0 must be an int of at least 1"),
        ({"every_n_steps": 2.5}, "every_n_steps=2.5"),
        ({"every_n_epochs": -1}, "every_n_epochs=-1"),
        ({"train_time_interval": 0}, "above zero"),
        ({"train_time_interval": "1h"}, "timedelta or seconds"),
        ({"policy": "auto-ish"}, "is no policy"),
        ({"mode": "least"}, "use 'min' or 'max'"),
        ({"save_top_k": -2}, "at least -1"),
        ({"save_last": "link"}, "True or False"),
        ({"resume": "always"}, "use 'auto' or 'never'"),
        ({"on_error": "ignore"}, "on_error='ignore'"),
        ({"options": {"keep_last": 3}}, "pass ckpt_core.Options"),
        ({"every_n_train_steps": 5}, "it is every_n_steps here"),
        ({"dirpath": "x"}, "the first argument"),
        ({"save_top_k": 3}, "save_top_k=3 without monitor: .*keep_last=3"),
        ({"save_top_k": -1}, "save_top_k=-1 without monitor: .*keep_last=None"),
        ({"save_top_k": 0}, "save_top_k=0 without monitor"),
        ({"nonsense": 1}, "no argument 'nonsense'"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named_with_what_to_do(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        AsyncCheckpoint("ckpts", **options)


def test_a_mistyped_argument_is_told_with_what_it_is_like() -> None:
    with pytest.raises(
        ConfigError, match=r"no argument 'every_n_step': did you mean every_n_steps\?"
    ):
        AsyncCheckpoint("ckpts", every_n_step=5)


def test_the_name_that_modelcheckpoint_gives_the_root_is_told_when_it_stands_alone() -> None:
    with pytest.raises(ConfigError, match="no argument 'dirpath': it is the first argument"):
        AsyncCheckpoint(dirpath="ckpts")


@pytest.mark.parametrize("root", ["", 5, None])
def test_a_root_must_be_a_path(root: Any) -> None:
    with pytest.raises(ConfigError, match="is no path"):
        AsyncCheckpoint(root)


@pytest.mark.parametrize("root", ["s3://bucket/run", Path("s3://bucket/run")])
def test_a_url_is_no_root_and_makes_no_directory(
    root: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="s3://bucket/run"):
        AsyncCheckpoint(root)
    with pytest.raises(ConfigError, match="s3://bucket/run"):
        FabricCheckpoint(root)
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_before_training(root: Path) -> None:
    AsyncCheckpoint(root, options=SMALL)
    assert not root.exists()


def test_a_schedule_without_any_wish_saves_every_epoch() -> None:
    assert Triggers().schedule(monitors=False).every_n_epochs == 1
    assert Triggers().schedule(monitors=True).every_n_epochs is None
    assert Triggers(every_n_steps=3).schedule(monitors=False).every_n_epochs is None
