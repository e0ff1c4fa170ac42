"""The process of one way to save under Lightning."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import ClassVar

from ckpt_core.bench.fit_worker import Fitting, FitWorker


class LightningWorker(FitWorker):
    """See `FitWorker`."""

    framework: ClassVar = "lightning.pytorch"
    ours: ClassVar = "ckpt_lightning"
    extra: ClassVar = "lightning"

    def __init__(self, name: str, root: Path) -> None:
        super().__init__(name, root)
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def fitting(self) -> Fitting:
        """Imported here alone: it needs Lightning."""
        from ckpt_lightning_tools.bench import fitting

        return fitting
