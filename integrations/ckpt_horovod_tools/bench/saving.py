"""The ways to save, each for the length of one window. Needs torch and Horovod.

Call order on every rank alike, on its main thread: construct -> `before_step`, `optimizer.step()`,
`after_step` for each iteration -> `settle`, `restore` where it saves -> `close`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import ckpt_horovod
from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.contenders.base import StepPaths, sync_path
from ckpt_core.bench.window import Window
from ckpt_core.checkpointer import Checkpointer
from ckpt_core.observe import Event, EventName
from ckpt_core.options import Options
from ckpt_core.policy import EveryNSteps
from ckpt_horovod_tools.bench import ways


@dataclass(frozen=True, slots=True)
class WaySettings:
    """What one way works with in one window.

    Attributes:
        name: of the way.
        root: directory that all ranks share; missing or empty.
        window: which iterations are saved.
        staging_bytes: bound of staging memory for ways that have one; None is their default.
        timeout_s: deadline of any wait.
    """

    name: str
    root: Path
    window: Window
    staging_bytes: int | None
    timeout_s: float


class Stock:
    """Horovod as it is; nothing is saved.

    Attributes:
        optimizer: the wrapped one.
    """

    def __init__(
        self, settings: WaySettings, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._settings = settings
        self._model = model
        self._stalled_s = 0.0
        self.optimizer = self._wrapped(optimizer)

    def _wrapped(self, optimizer: torch.optim.Optimizer) -> Any:
        return hvd.DistributedOptimizer(optimizer, named_parameters=self._model.named_parameters())

    def before_step(self) -> None:
        """Called after backward, before anything changes."""

    def after_step(self, iteration: int) -> None:
        """Called at the end of each iteration, counted from 1."""

    def settle(self) -> None:
        """Wait until all that was saved is durable."""

    def restore(self) -> None:
        """Fill model and optimizer from the newest save."""
        raise LookupError(f"{self._settings.name} saves nothing")

    def close(self) -> None:
        """Release everything; every rank calls it."""

    def start_clock(self) -> None:
        """Forget the stalls so far."""
        self._stalled_s = 0.0

    def stalled_s(self) -> float | None:
        """Time that training has spent in saves since `start_clock`; None where that cannot be told."""
        return self._stalled_s

    def remarks(self) -> list[str]:
        """What a reader of the figures must know: that the way did not do what its name says."""
        return []

    @contextmanager
    def _stall(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._stalled_s += time.perf_counter() - began


class NoSpin(Stock):
    """The same steps with a wait that sleeps; base of all ways that save."""

    def _wrapped(self, optimizer: torch.optim.Optimizer) -> Any:
        return self._ours(optimizer, checkpointer=None)

    def _ours(self, optimizer: torch.optim.Optimizer, **arguments: Any) -> Any:
        wrapped = ckpt_horovod.DistributedOptimizer(
            optimizer, named_parameters=self._model.named_parameters(), **arguments
        )
        wrapped.attach(model=self._model)
        return wrapped


class TorchSaveRank0(NoSpin):
    """Rank 0 writes one file and makes it durable; the others meet it at the next all-reduce."""

    def __init__(
        self, settings: WaySettings, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        super().__init__(settings, model, optimizer)
        settings.root.mkdir(exist_ok=True)
        self._paths = StepPaths(settings.root)

    def after_step(self, iteration: int) -> None:
        """Write, wait for the disk, and remove the file before."""
        if not self._settings.window.due(iteration):
            return
        with self._stall():
            path = self._paths.next(iteration)
            if hvd.rank() == 0:
                self._write(path)
                self._paths.tidy()
        self._paths.older.clear()

    def _write(self, path: Path) -> None:
        state = {"model": self._model.state_dict(), "optimizer": self.optimizer.state_dict()}
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        sync_path(path.parent)

    def settle(self) -> None:
        """Rank 0 has written when all have come here."""
        hvd.barrier()

    def restore(self) -> None:
        """Every rank loads the file."""
        loaded = torch.load(self._paths.current(), weights_only=True)
        self._model.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])


class Engine(NoSpin):
    """With a `Checkpointer` that all ranks share, each of which writes a slice."""

    def __init__(
        self, settings: WaySettings, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        options = Options(
            keep_last=1,
            staging_bytes=settings.staging_bytes,
            timeout=settings.timeout_s,
            on_error="raise",
        )
        coordination = ckpt_horovod.coordination()
        self._checkpointer = Checkpointer(settings.root, options, coordination=coordination)
        super().__init__(settings, model, optimizer)

    def settle(self) -> None:
        """Nothing is in flight afterwards."""
        self._checkpointer.wait()

    def restore(self) -> None:
        """The tree that was saved, in place."""
        if self._checkpointer.restore(self.optimizer.checkpoint_tree()) is None:
            raise LookupError("no committed step to restore")

    def close(self) -> None:
        """Waits for what is in flight."""
        self._checkpointer.close()


class CheckFreqStyle(Engine):
    """The whole state is copied in the background; no parameter changes before all of it is."""

    def before_step(self) -> None:
        """The barrier."""
        with self._stall():
            self._checkpointer.wait_staged()

    def after_step(self, iteration: int) -> None:
        """Start the copy."""
        if self._settings.window.due(iteration):
            with self._stall():
                self._checkpointer.save(iteration, self.optimizer.checkpoint_tree())


class MonolithicCopy(Engine):
    """The whole state is copied while training waits, and written behind it."""

    def after_step(self, iteration: int) -> None:
        """Copy."""
        if self._settings.window.due(iteration):
            with self._stall():
                self._checkpointer.save(iteration, self.optimizer.checkpoint_tree())
                self._checkpointer.wait_staged()


class LayerWise(Engine):
    """`ckpt_horovod`: each layer's next update waits for that layer's copy alone."""

    def _wrapped(self, optimizer: torch.optim.Optimizer) -> Any:
        self._mode = ways.WAYS[self._settings.name].layerwise
        self._warnings = _Warnings()
        logging.getLogger("ckpt_horovod").addHandler(self._warnings)
        self._checkpointer.events.subscribe(self._note)
        return self._ours(
            optimizer,
            checkpointer=self._checkpointer,
            policy=_Scheduled(self._settings.window),
            layerwise=self._mode,
        )

    def _note(self, event: Event) -> None:
        # Of the barriers inside `step()`; told on the training thread.
        if event.name == EventName.WAITED:
            self._stalled_s += event.seconds

    def after_step(self, iteration: int) -> None:
        """End the iteration, which saves when the schedule says so."""
        with self._stall():
            self.optimizer.end_iteration()

    def stalled_s(self) -> float | None:
        """Not told apart from the step where layers are enqueued inside it."""
        return super().stalled_s() if self._mode == "lazy" else None

    def restore(self) -> None:
        """As a user would."""
        if self.optimizer.restore() is None:
            raise LookupError("no committed step to restore")

    def remarks(self) -> list[str]:
        """Such as that it fell back from one form to the other."""
        return list(self._warnings.texts)

    def close(self) -> None:
        """Waits for what is in flight."""
        logging.getLogger("ckpt_horovod").removeHandler(self._warnings)
        super().close()


class _Warnings(logging.Handler):
    """Keeps what the integration warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging."""
        self.texts.append(record.getMessage())


class _Scheduled(EveryNSteps):
    """The schedule of a window; one that counts steps, so that ranks need not tell each other."""

    def __init__(self, window: Window) -> None:
        super().__init__(window.every)
        self._window = window

    def due(self, step: int) -> bool:
        return self._window.due(step)

    def saved(self, step: int) -> None:
        pass


CLASSES: dict[str, type[Stock]] = {
    OURS: LayerWise,
    ways.IN_STEP: LayerWise,
    ways.CHECKFREQ: CheckFreqStyle,
    ways.MONOLITHIC: MonolithicCopy,
    ways.TORCH_SAVE: TorchSaveRank0,
    ways.NO_SPIN: NoSpin,
    ways.BASE: Stock,
}
