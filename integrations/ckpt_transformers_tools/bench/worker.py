"""The process of one way to save under Trainer."""

from __future__ import annotations

from typing import ClassVar

from ckpt_core.bench.fit_worker import Fitting, FitWorker


class TransformersWorker(FitWorker):
    """See `FitWorker`."""

    framework: ClassVar = "transformers"
    ours: ClassVar = "ckpt_transformers"
    extra: ClassVar = "transformers"

    def fitting(self) -> Fitting:
        """Imported here alone: it needs Transformers."""
        from ckpt_transformers_tools.bench import fitting

        return fitting
