"""Memory for bytes on their way to a disk or from it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path

from ckpt_core.system.machine import filesystem_of

_MADV_WIPEONFORK = 18
"""linux/mman.h; Linux 4.14."""
_MADV_POPULATE_WRITE = 23
"""linux/mman.h; Linux 5.14."""
_STEP_BYTES = 2 * 2**20
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


_HUGE = frozenset({"huge=always", "huge=within_size"})
"""Of a tmpfs whose files get huge pages unasked. With "advise" those that are reserved first do not."""


def in_huge_pages(path: Path) -> bool:
    """Whether a path is on a filesystem in memory that is mounted with huge pages. Raises OSError."""
    kind, options = filesystem_of(path)
    return kind == "tmpfs" and not _HUGE.isdisjoint(options.split(","))


def page_memory(nbytes: int) -> mmap.mmap:
    """Memory of zeros, page-aligned; in huge pages where the kernel has some to give.

    A direct write must pin every page and name it to the device: of 4 KiB each, that takes as long as the
    transfer on a fast disk.
    """
    mapping = mmap.mmap(-1, nbytes, flags=_PRIVATE)
    try:
        # A child (a worker that loads data) would else make this process copy each page that it writes to.
        mapping.madvise(_MADV_WIPEONFORK)
    except OSError:
        mapping.close()
        return mmap.mmap(-1, nbytes)  # shared: no page is copied, and none is huge
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def address_of(memory: memoryview | mmap.mmap) -> int:
    """Of the first byte of memory that may be written to."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def touch(address: int, nbytes: int) -> None:
    """Take the page faults of whole pages now, without the GIL; their bytes stay as they are.

    Where the kernel cannot, whoever writes there first takes them.
    """
    # In steps: whoever maps or unmaps memory of this process waits for each.
    for start in range(0, nbytes, _STEP_BYTES):
        _madvise(address + start, min(_STEP_BYTES, nbytes - start), _MADV_POPULATE_WRITE)


def touch_view(memory: memoryview) -> None:
    """The same for all pages that a part of a writable mapping lies in."""
    if not memory:
        return
    begin = address_of(memory)
    first = begin - begin % mmap.PAGESIZE
    touch(first, begin - first + len(memory))
