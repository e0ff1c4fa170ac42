"""File layers that hold a snapshot up, and how often a step was made in parts."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ckpt_core import Options
from ckpt_horovod.stepping import Stepper
from ckpt_horovod.substeps import SubSteps
from tests.crash.promises import QuickFiles


class SlowFiles(QuickFiles):
    """A disk that takes its time for each chunk, at random."""

    def __init__(self, seed: int, most_s: float = 0.01) -> None:
        self._random = random.Random(seed)
        self._most_s = most_s

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        if isinstance(data, memoryview):
            time.sleep(self._random.random() * self._most_s)
        super().pwrite(fd, data, offset)


class GatedFiles(QuickFiles):
    """A disk on which chunks stand still while the gate is shut."""

    def __init__(self) -> None:
        self._free = threading.Event()
        self._free.set()
        self._timer: threading.Timer | None = None

    def shut(self) -> None:
        """Let nothing through, whatever opening was planned."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        self._free.clear()

    def open(self) -> None:
        """Let all through."""
        self._free.set()

    def open_after(self, seconds: float) -> None:
        """Open a while from now."""
        self._timer = threading.Timer(seconds, self._free.set)
        self._timer.daemon = True
        self._timer.start()

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        if isinstance(data, memoryview):
            assert self._free.wait(60), "nobody opened the gate"
        super().pwrite(fd, data, offset)


def tiny(**changes: Any) -> Options:
    """Little staging memory, so that a snapshot is held up by the writing of its first chunks."""
    given: dict[str, Any] = {
        "chunk_bytes": 4096,
        "staging_bytes": "48KiB",
        "eager_leaf_bytes": 64,
        "mode": "host",
        "writers": 2,
        "keep_last": None,
        "timeout": 60.0,
    }
    return Options(**(given | changes))


class Counted:
    """How steps were made, counted while `counting`."""

    def __init__(self) -> None:
        self.parts = self.in_layers = self.whole = 0


@contextlib.contextmanager
def counting(on_step: Callable[[], None] = lambda: None) -> Iterator[Counted]:
    """Count steps of either kind, and their parts; `on_step` is called where one begins."""
    counted = Counted()
    kept = SubSteps.update, Stepper.in_layers, Stepper.whole

    def update(self: Any, *args: Any) -> Any:
        counted.parts += 1
        return kept[0](self, *args)

    def in_layers(self: Any, *args: Any) -> Any:
        on_step()
        counted.in_layers += 1
        SubSteps.update = update  # type: ignore[method-assign]  # the probe is no step
        try:
            return kept[1](self, *args)
        finally:
            SubSteps.update = kept[0]  # type: ignore[method-assign]

    def whole(self: Any, *args: Any) -> Any:
        on_step()
        counted.whole += 1
        return kept[2](self, *args)

    Stepper.in_layers, Stepper.whole = in_layers, whole  # type: ignore[method-assign]
    try:
        yield counted
    finally:
        Stepper.in_layers, Stepper.whole = kept[1:]  # type: ignore[method-assign]
