"""Published strategies, `blocking` and `pipelined` as options of the callback."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Checkpoint

import ckpt_lightning
from ckpt_core import CkptError, ConfigError, Options, committed_steps, verify
from ckpt_core.options.presets import PRESETS
from ckpt_lightning import CheckpointWarning
from tests.forks import Forks
from tests.integrations.lightning import models
from tests.integrations.lightning.ddp_crew import Crew
from tests.integrations.lightning.running import differences, ending, fit, preset, saver
from tests.integrations.lightning.test_failures import LosesItsDisk
from tests.integrations.lightning.test_resume import Stop, StopsAt

NAMES = sorted(PRESETS)
WHOLE = [name for name in NAMES if not Options.preset(name).pipelined]
"""Those that need staging memory for a whole shard."""
LITTLE = 64 * 2**10


class Large(models.Net):
    """More parameters than fit into `LITTLE`."""

    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Parameter(torch.zeros(2 * LITTLE // 4))


class Behind(Checkpoint):
    """Notes what is on storage once our callback is through.

    A Checkpoint itself: Lightning puts those last, in their order.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.seen: dict[int, int] = {}
        self.wrong: list[str] = []

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        step = trainer.global_step
        self.seen[step] = max(committed_steps(self.root), default=0)
        if self.seen[step] == step:
            stored = ckpt_lightning.load(self.root)["state_dict"]
            self.wrong += differences(dict(pl_module.state_dict()), dict(stored))


@functools.cache
def undisturbed() -> dict[str, Any]:
    """How a run that saves nothing ends."""
    return ending(*fit(models.Net, models.train_loader))


def texts_of(told: pytest.WarningsRecorder) -> list[str]:
    """What our warnings say; Lightning's own are recorded as well."""
    return [str(item.message) for item in told if item.category is CheckpointWarning]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_stops_goes_on_to_the_same_bits(root: Path, name: str) -> None:
    how: dict[str, Any] = {"every_n_steps": 2, "on_error": "raise", "options": preset(name)}
    with pytest.raises(Stop):
        fit(lambda: StopsAt(7), models.train_loader, saver(root, **how))
    assert committed_steps(root) == (2, 4, 6)
    resumed = ending(*fit(models.Net, models.train_loader, saver(root, **how), seed=1))
    assert committed_steps(root) == (2, 4, 6, 8, 10, 12, 14, 15)
    assert verify(root).ok
    assert not differences(undisturbed(), resumed)


@pytest.mark.parametrize("name", NAMES)
def test_a_blocking_save_is_on_storage_when_the_next_callback_runs(root: Path, name: str) -> None:
    behind = Behind(root)
    ours = saver(root, every_n_steps=1, on_error="raise", options=preset(name, blocking=True))
    assert not differences(
        undisturbed(), ending(*fit(models.Net, models.train_loader, ours, behind))
    )
    # The end of an epoch is saved once everything that belongs to it is over.
    assert behind.seen == {step: step - (step % models.BATCHES == 0) for step in range(1, 16)}
    assert not behind.wrong
    assert committed_steps(root) == tuple(range(1, 16))


@pytest.mark.parametrize("name", NAMES)
def test_a_blocking_save_that_fails_ends_training_there_and_is_told_once(
    root: Path, name: str
) -> None:
    behind = Behind(root)
    disk = LosesItsDisk(root, at=7, back_at=99)
    ours = saver(root, every_n_steps=1, on_error="raise", options=preset(name, blocking=True))
    # A warning at the end, which fails this test too, would tell it again.
    with pytest.raises(CkptError) as caught:
        fit(models.Net, models.train_loader, disk, ours, behind)
    assert caught.value.step == 7 and not getattr(caught.value, "__notes__", [])
    assert max(behind.seen) == 6
    root.unlink()
    root.with_name("aside").rename(root)
    assert committed_steps(root) == (1, 2, 3, 4, 5, 6)
    assert ours.state_dict()["kept"] == {}


def test_a_blocking_save_that_fails_is_one_warning_where_those_are_asked_for(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = LosesItsDisk(root, at=6, back_at=9)
    ours = saver(root, every_n_steps=1, options=preset("gpm"))
    with (
        pytest.warns(CheckpointWarning) as told,
        caplog.at_level(logging.INFO, logger="lightning.pytorch"),
    ):
        result = ending(*fit(models.Net, models.train_loader, disk, ours))
    texts = [text.partition(" failed, and")[0] for text in texts_of(told)]
    assert texts == [f"the save of step {step}" for step in (6, 7, 8)]
    assert not differences(undisturbed(), result)
    assert committed_steps(root) == (1, 2, 3, 4, 5, *range(9, 16))
    summary = [r.getMessage() for r in caplog.records if "steps saved" in r.getMessage()]
    assert len(summary) == 1 and "12 steps saved" in summary[0]
    assert summary[0].endswith("; 3 saves failed")


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("name", WHOLE)
def test_too_little_memory_for_a_preset_is_refused_at_the_first_save(
    root: Path, name: str, blocking: bool
) -> None:
    behind = Behind(root)
    sizes = {"chunk_bytes": 4096, "staging_bytes": LITTLE, "blocking": blocking}
    ours = saver(root, every_n_steps=2, on_error="raise", options=preset(name, **sizes))
    text = rf"staging_bytes={LITTLE} is too small: with pipelined=False .* raise staging_bytes"
    with pytest.raises(ConfigError, match=text):
        fit(Large, models.train_loader, ours, behind)
    assert max(behind.seen) == 1
    # Nothing is left behind: the root is free, and the same run with memory saves.
    ours = saver(root, every_n_steps=2, on_error="raise", options=preset(name))
    fit(Large, models.train_loader, ours, max_epochs=1)
    assert committed_steps(root) == (2, 4, 5)


@pytest.mark.parametrize("name", WHOLE)
def test_or_told_at_each_save_where_warnings_are_asked_for(root: Path, name: str) -> None:
    sizes = {"chunk_bytes": 4096, "staging_bytes": LITTLE}
    ours = saver(root, every_n_steps=2, options=preset(name, **sizes))
    with pytest.warns(CheckpointWarning) as told:
        trainer, _ = fit(Large, models.train_loader, ours, max_epochs=1)
    assert trainer.global_step == 5 and committed_steps(root) == ()
    assert [f"staging_bytes={LITTLE} is too small" in text for text in texts_of(told)] == [True] * 3


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(WHOLE)))
def test_other_presets_save_with_as_little(root: Path, name: str) -> None:
    sizes = {"chunk_bytes": 4096, "staging_bytes": LITTLE}
    ours = saver(root, every_n_steps=2, on_error="raise", options=preset(name, **sizes))
    fit(Large, models.train_loader, ours, max_epochs=1)
    assert committed_steps(root) == (2, 4, 5)


# -- two ranks -------------------------------------------------------------------------------------

BLOCKING = {"name": "checkfreq", "blocking": True}
SHORT = {**BLOCKING, "chunk_bytes": 4096, "staging_bytes": LITTLE}


@pytest.fixture(scope="module")
def pair(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with Crew(forks, 2, tmp_path_factory.mktemp("pair")) as crew:
        yield crew


@pytest.mark.timeout(250)
def test_two_ranks_wait_for_one_another_and_go_on_to_the_same_bits(pair: Crew, root: Path) -> None:
    job: dict[str, Any] = {"root": root, "preset": BLOCKING}
    job["saving"] = {"every_n_steps": 2, "on_error": "raise"}
    undisturbed = pair.fit()
    pair.fit(**job, stop_at=9)
    assert committed_steps(root) == (2, 4, 6, 8)
    resumed = pair.fit(**job, seed=99)
    assert resumed.steps() == [8, 9, 10, 11]
    for rank in (0, 1):
        ends = [answers.tensors(rank)["last"] for answers in (undisturbed, resumed)]
        assert not differences(*ends), rank


@pytest.mark.timeout(250)
def test_what_one_rank_cannot_save_is_told_by_both(pair: Crew, root: Path) -> None:
    job: dict[str, Any] = {"root": root, "width": 200, "preset": BLOCKING}
    job["mine"] = {"1": {"preset": SHORT}}
    told = pair.fit(**job, saving={"every_n_steps": 4})
    # The first rank tells it for both, at each save: two and that of the end.
    texts = told.rows[0]["warnings"]
    assert len(texts) == 3 and not told.rows[1]["warnings"]
    assert all("rank 1" in text and f"staging_bytes={LITTLE}" in text for text in texts)
    assert told.steps() == list(range(12)) and committed_steps(root) == ()
    pair.begin(**job, saving={"every_n_steps": 4, "on_error": "raise"})
    first, second = (pair.answer_of(rank)["error"] for rank in (0, 1))
    assert first.startswith("CommitError: step 4") and "rank 1" in first
    assert second.startswith(f"ConfigError: staging_bytes={LITTLE} is too small")
