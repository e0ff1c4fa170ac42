"""One window of training on one rank, from the same seed each time. Needs torch and Horovod."""

from __future__ import annotations

import gc
import itertools
import os
import time
from typing import Any

import horovod.torch as hvd
import torch

from ckpt_core.bench import workloads
from ckpt_core.bench.contenders import State
from ckpt_core.bench.proc import processor_s
from ckpt_horovod_tools.bench.saving import CLASSES, WaySettings


class Training:
    """The language model of the other suites with AdamW, under Horovod, with one way to save.

    Attributes:
        worked_s: processor time of this rank and its children when the clock of the window was started.
    """

    def __init__(self, size: dict[str, Any], settings: WaySettings) -> None:
        """Build it anew; every rank calls it.

        Args:
            size: fields of `ModelSize`.
            settings: of the way.
        """
        self._window = settings.window
        self.worked_s = 0.0
        torch.manual_seed(0)
        model = workloads.language_model(size["width"], size["layers"], size["vocabulary"])
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.saver = CLASSES[settings.name](settings, model, optimizer)
        batches = workloads.token_batches(size, torch.Generator().manual_seed(hvd.rank()))
        self._training = workloads.Training(model, self.saver.optimizer, itertools.cycle(batches))

    def window(self) -> tuple[float, float | None]:
        """All iterations of it, the last ones under the clock.

        Returns:
            The mean of these, and the time that training spent in all saves under the clock; None where that
            cannot be told.
        """
        window = self._window
        self.iterate(1, window.lead)
        gc.collect()
        hvd.barrier()
        self.saver.start_clock()
        self.worked_s = processor_s(os.getpid())
        began = time.perf_counter()
        self.iterate(window.lead + 1, window.lead + window.steps)
        seconds = time.perf_counter() - began
        return seconds / window.steps, self.saver.stalled_s()

    def iterate(self, first: int, last: int) -> None:
        """Train through these iterations."""
        for iteration in range(first, last + 1):
            self._training.step(self.saver.before_step)
            self.saver.after_step(iteration)

    def state(self) -> State:
        """Aliases of every live parameter and optimizer tensor; the same order in every way."""
        return dict(sorted(self._training.state().items()))
