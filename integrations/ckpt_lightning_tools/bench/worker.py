"""The process of one way: fits of one model after the other, each from scratch, on request.

Requests: hello -> fit, check. What a fit has written is removed, and dirty pages are written, before the
answer goes out and after the clock has stopped.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckpt_core.bench.contenders import OURS
from ckpt_core.bench.contenders.base import missing, release
from ckpt_core.bench.serving import Answer
from ckpt_core.bench.window import Window

_INSTALL = "install it with: pip install 'ckpt-core[lightning]'"


class FitWorker:
    """One way; keeps the model of the last size between fits."""

    def __init__(self, name: str, root: Path) -> None:
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        self._name = name
        self._root = root
        self._size: dict[str, Any] = {}
        self._module: Any = None
        self._fits = 0

    def hello(self) -> Answer:
        """Whether it can run here."""
        reason = missing("lightning.pytorch", *(["ckpt_lightning"] if self._name == OURS else []))
        if reason is not None:
            return {"reason": f"{reason}; {_INSTALL}"}
        return {"version": release("lightning")}

    def fit(
        self, size: dict[str, Any], window: dict[str, int], staging_bytes: int | None
    ) -> Answer:
        """One fit: its times, and by how much memory grew at its worst moment."""
        from ckpt_lightning_tools.bench import fitting

        module = self._module_of(size)
        with self._new_root() as root:
            before = _settle()
            measured = _forget_peak()
            found = fitting.fit(self._name, module, size, Window(**window), root, staging_bytes)
            peak = _memory("VmHWM")
            answer = {
                "fit_s": found.fit_s,
                "step_s": found.step_s,
                "longest_step_s": found.longest_step_s,
                "stall_s": found.stall_s,
                "processor_s": found.processor_s,
                "grown_bytes": peak - before if measured else None,
                "state_bytes": sum(tensor.nbytes for tensor in found.state.values()),
                "leaves": len(found.state),
            }
            del found
            module.zero_grad(set_to_none=True)
        return answer

    def check(self, size: dict[str, Any]) -> Answer:
        """A fit that saves its last step: what was saved must be what training ended with."""
        from ckpt_core.bench import workloads
        from ckpt_lightning_tools.bench import fitting

        module = self._module_of(size)
        with self._new_root() as root:
            window = Window(every=2, lead=0, steps=4)
            found = fitting.fit(self._name, module, size, window, root, None)
            live = workloads.digest(found.state)
            saved = workloads.digest(fitting.saved_state(self._name, root))
        return {"live": live, "saved": saved}

    def _module_of(self, size: dict[str, Any]) -> Any:
        from ckpt_lightning_tools.bench import fitting

        if size != self._size:
            self._module = None  # never two of them
            self._module = fitting.LanguageModel(size)
            self._size = size
        return self._module

    @contextmanager
    def _new_root(self) -> Iterator[Path]:
        self._fits += 1
        root = self._root / f"fit-{self._fits}"
        yield root
        shutil.rmtree(root, ignore_errors=True)
        os.sync()


def _settle() -> int:
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
