"""Lightning's and torch's own warnings, which are none of ours, do not fail tests; all others do."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from tests.forks import Forks

_NOT_OURS = (
    "The '.*_dataloader' does not have many workers",
    "The number of training batches",
    "`LRScheduler.step.*`",
    "Detected call of `lr_scheduler.step",
    ".*isinstance.treespec, LeafSpec.*",
    "You defined a `validation_step` but have no `val_dataloader`",
    "Starting from v1.9.0, `tensorboardX`",
    ".*does not have many workers.*",
    "`training_step` returned `None`",
    "'set_vital' is deprecated",
    "ReduceLROnPlateau conditioned on metric val_loss which is not available",
)


@pytest.fixture(scope="package")
def forks() -> Iterator[Forks]:
    """Processes that have imported Lightning."""
    with Forks("lightning.pytorch", "ckpt_lightning") as forks:
        yield forks


@pytest.fixture(autouse=True)
def quiet_lightning() -> Iterator[None]:
    with warnings.catch_warnings():
        for message in _NOT_OURS:
            warnings.filterwarnings("ignore", message=message)
        yield
