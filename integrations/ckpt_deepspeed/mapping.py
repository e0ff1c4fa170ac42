"""The model's file of a tag that nobody else changes is mapped while DeepSpeed copies from it.

DeepSpeed fills parameters from it, and lets go of them: read into memory first, each page of that would be
made for one copy. Of optimizer states it keeps the tensors that it is given. What is kept of a mapping would
follow the file, and end the process where that is cut or cannot be read any more; so nothing is.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_MAPS = Path("/proc/self/maps")
_MODEL = "model_states.pt"
_SMALL_BYTES = 1024 * 1024
"""What is shorter is copied at once: it may be anything, and what is kept is mostly short."""


@dataclass(slots=True)
class Mappings:
    """How the files of one load are read; used on the training thread.

    Attributes:
        allowed: nobody changes them meanwhile.
    """

    allowed: bool = False
    _paths: set[str] = field(default_factory=set)

    @contextmanager
    def while_loading(self, *, allowed: bool) -> Iterator[None]:
        """Within it, `load` may map files; what is kept of them at the end is memory of this process."""
        self.allowed = allowed and _MAPS.exists()
        try:
            yield
        finally:
            self.allowed = False
            paths, self._paths = self._paths, set()
            _make_own(paths)

    def load(self, path: str | os.PathLike[str], map_location: Any = None) -> Any:
        """As `torch.load`, which trusts the file."""
        how: dict[str, Any] = {"map_location": map_location, "weights_only": False}
        if self._maps(path) and callable(map_location):
            self._paths.add(os.path.realpath(path))
            how |= {"mmap": True, "map_location": _copying_small(map_location)}
        return torch.load(path, **how)

    def _maps(self, path: str | os.PathLike[str]) -> bool:
        is_model = self.allowed and os.fspath(path).endswith(_MODEL)
        return is_model and _is_private() and zipfile.is_zipfile(path)


def _copying_small(place: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def placed(storage: Any, location: str) -> Any:
        return place(storage.clone() if storage.nbytes() < _SMALL_BYTES else storage, location)

    return placed


def _is_private() -> bool:
    """Whether torch maps files so that what is written stays in this process: users may choose otherwise."""
    return torch.serialization.get_default_mmap_options() == mmap.MAP_PRIVATE


def _make_own(paths: set[str]) -> None:
    """Put memory of this process where one of these files is still mapped. Nobody writes there meanwhile."""
    # By name: on an overlay, the numbers of device and file are those of the layer below.
    # What else is mapped may have a name of any bytes but an end of line.
    for line in os.fsdecode(_MAPS.read_bytes()).split("\n")[:-1] if paths else ():
        place, mode, _, _, _, *named = line.split(maxsplit=5)
        if mode == "rw-p" and named and named[0].removesuffix(" (deleted)") in paths:
            start, stop = (int(part, 16) for part in place.split("-"))
            _replace(start, stop - start)


def _replace(address: int, nbytes: int) -> None:
    # Written to, pages of a private mapping are copied; but a file that is cut takes those with it, too.
    fresh = _LIBC.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, _ANONYMOUS, -1, 0)
    if fresh == _FAILED:
        raise MemoryError(f"no memory for {nbytes} bytes that were loaded and are kept")
    ctypes.memmove(fresh, address, nbytes)
    moved = _LIBC.mremap(fresh, nbytes, nbytes, _MOVE_TO, ctypes.c_void_p(address))
    if moved != address:
        _LIBC.munmap(ctypes.c_void_p(fresh), ctypes.c_size_t(nbytes))
        raise MemoryError(f"{nbytes} bytes that were loaded and are kept cannot be moved")


_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MOVE_TO = 1 | 2  # MREMAP_MAYMOVE | MREMAP_FIXED, which Python has no names for
_FAILED = ctypes.c_void_p(-1).value
_LIBC = ctypes.CDLL(None)
_LIBC.mmap.restype = _LIBC.mremap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_longlong,
)
_LIBC.mremap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int),
    ctypes.c_void_p,
)
