"""The suite `transformers`: the ways that are compared. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.fits import BASE, FitSettings, suite_of_fits
from ckpt_core.bench.results import Setup

TRAINER = "trainer"

WAYS = {
    OURS: Setup("ckpt-core", "yes", "AsyncCheckpoint, save_total_limit=1"),
    TRAINER: Setup("Trainer", "no", "checkpoint-*, save_total_limit=1"),
    BASE: Setup("no saves", "", 'save_strategy="no"'),
}
"""In the order of the report."""

NAMES = tuple(WAYS)


@dataclass(frozen=True, kw_only=True)
class TransformersSettings(FitSettings):
    """One run under Trainer."""

    contenders: tuple[str, ...] = NAMES

    suite: ClassVar = "transformers"
    ways: ClassVar = WAYS
    worker: ClassVar = "ckpt_transformers_tools.bench.worker:TransformersWorker"


SUITE = suite_of_fits(TransformersSettings)
