"""The process of one way to save under a framework: fits of one model after the other, each from scratch.

Requests: hello -> fit, check; stop -> resume. What a fit has written is removed, and dirty pages are written,
before the answer goes out and after the clock has stopped.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ckpt_core.bench.contenders import OURS, State
from ckpt_core.bench.contenders.base import missing, release
from ckpt_core.bench.fit_clock import Fitted
from ckpt_core.bench.serving import Answer
from ckpt_core.bench.window import Window


class Fitting(Protocol):
    """A module that fits under a framework, in one of its ways to save. Imported when it is first asked."""

    def model(self, size: dict[str, Any]) -> Any:
        """The model of a `ModelSize`."""

    def fit(
        self,
        name: str,
        model: Any,
        *,
        size: dict[str, Any],
        window: Window,
        root: Path,
        staging_bytes: int | None = None,
    ) -> Fitted:
        """Train through a window of steps, saving below `root` in the way of that name."""

    def resume(self, name: str, model: Any, *, size: dict[str, Any], root: Path) -> float:
        """Go on from what that way has in `root`: seconds until the first step begins, which is not taken."""

    def saved_state(self, name: str, root: Path) -> State:
        """Weights and optimizer from the newest file or step of a way."""


class FitWorker(ABC):
    """One way; keeps the model of the last size between fits.

    Attributes:
        framework: the package without which nothing goes; its release is told.
        ours: that of our way.
        extra: of this distribution, which brings both.
    """

    framework: ClassVar[str]
    ours: ClassVar[str]
    extra: ClassVar[str]

    def __init__(self, name: str, root: Path) -> None:
        warnings.simplefilter("ignore")
        self._name = name
        self._root = root
        self._size: dict[str, Any] = {}
        self._module: Any = None
        self._fits = 0
        self._stopped = root / "stopped"

    @abstractmethod
    def fitting(self) -> Fitting:
        """The module that trains."""

    def hello(self) -> Answer:
        """Whether it can run here."""
        reason = missing(self.framework, *([self.ours] if self._name == OURS else []))
        if reason is not None:
            return {"reason": f"{reason}; install it with: pip install 'ckpt-core[{self.extra}]'"}
        return {"version": release(self.framework.partition(".")[0])}

    def fit(
        self, size: dict[str, Any], window: dict[str, int], staging_bytes: int | None
    ) -> Answer:
        """One fit: its times, and by how much memory grew at its worst moment."""
        module = self._module_of(size)
        with self._new_root() as root:
            before = settle()
            measured = _forget_peak()
            found = self.fitting().fit(
                self._name,
                module,
                size=size,
                window=Window(**window),
                root=root,
                staging_bytes=staging_bytes,
            )
            peak = _memory("VmHWM")
            answer = {
                "fit_s": found.fit_s,
                "step_s": found.step_s,
                "longest_step_s": found.longest_step_s,
                "stall_s": found.stall_s,
                "processor_s": found.processor_s,
                "grown_bytes": peak - before if measured else None,
                **_size_of(found.state),
            }
            del found
            module.zero_grad(set_to_none=True)
        return answer

    def check(self, size: dict[str, Any]) -> Answer:
        """A fit that saves its last step: what was saved must be what training ended with."""
        from ckpt_core.bench import workloads

        with self._new_root() as root:
            found = self._short(size, root)
            live = workloads.digest(found.state)
            saved = workloads.digest(self.fitting().saved_state(self._name, root))
        return {"live": live, "saved": saved}

    def stop(self, size: dict[str, Any]) -> Answer:
        """A fit whose last step is what `resume` goes on from."""
        found = self._short(size, self._stopped)
        return _size_of(found.state)

    def resume(self, size: dict[str, Any]) -> Answer:
        """A model made anew goes on from there: the time from the call until its first step begins."""
        self._size, self._module = {}, None
        module = self._module_of(size)
        settle()
        seconds = self.fitting().resume(self._name, module, size=size, root=self._stopped)
        return {"resume_s": seconds}

    def _short(self, size: dict[str, Any], root: Path) -> Fitted:
        window = Window(every=2, lead=0, steps=4)
        return self.fitting().fit(
            self._name, self._module_of(size), size=size, window=window, root=root
        )

    def _module_of(self, size: dict[str, Any]) -> Any:
        if size != self._size:
            self._module = None  # never two of them
            self._module = self.fitting().model(size)
            self._size = size
        return self._module

    @contextmanager
    def _new_root(self) -> Iterator[Path]:
        self._fits += 1
        root = self._root / f"fit-{self._fits}"
        yield root
        shutil.rmtree(root, ignore_errors=True)
        os.sync()


def _size_of(state: State) -> Answer:
    nbytes = sum(tensor.nbytes for tensor in state.values())
    return {"state_bytes": nbytes, "leaves": len(state)}


def settle() -> int:
    """Give back what earlier fits left; the memory that remains."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return _memory("VmRSS")


def _forget_peak() -> bool:
    """Let the kernel's record of the highest memory begin anew; whether it does."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return 0
