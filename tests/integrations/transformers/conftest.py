"""No hub is asked; warnings of transformers and torch, which are none of ours, do not fail tests."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest

from tests.forks import Forks

os.environ["HF_HUB_OFFLINE"] = "1"

_NOT_OURS = (
    ".*pin_memory.*",
    "`LRScheduler.step.*",
    "Detected call of `lr_scheduler.step",
    ".*set_vital.*",
    "`is_gradient_checkpointing` is deprecated.*",  # PEFT asks for it
)


@pytest.fixture(scope="package")
def forks() -> Iterator[Forks]:
    """Processes that have imported a Trainer, which takes five seconds."""
    with Forks("tests.integrations.transformers.jobs", "accelerate") as forks:
        yield forks


@pytest.fixture(autouse=True)
def quiet_transformers() -> Iterator[None]:
    with warnings.catch_warnings():
        for message in _NOT_OURS:
            warnings.filterwarnings("ignore", message=message)
        yield
