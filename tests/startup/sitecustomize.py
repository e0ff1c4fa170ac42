"""Read by every process of a run as it starts: a framework is imported without looking for garbage meanwhile.

A run starts hundreds of processes that import torch, and a sixth of that time is Python's search among what
was imported so far, none of which is garbage. What a framework brings is never looked at again.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FRAMEWORKS = ("torch", "lightning", "deepspeed", "horovod")
LATER = ("torch._dynamo", "torch._inductor.compile_fx")
"""Imported in the middle of the work, by the first optimizer; what is there by then may be garbage."""


class _Calm(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a framework as Python would, and stands between it and its loader."""

    def __init__(self) -> None:
        self._loaders: dict[str, Any] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in FRAMEWORKS + LATER or name in self._loaders:
            return None
        self._loaders[name] = None  # the search below comes here again
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self._loaders[name], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loaders[spec.name].create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        loader = self._loaders[module.__name__]
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = loader
        outermost = gc.isenabled()
        gc.disable()
        try:
            loader.exec_module(module)
        finally:
            if outermost:
                if module.__name__ in FRAMEWORKS:
                    gc.freeze()
                gc.enable()


sys.meta_path.insert(0, _Calm())
