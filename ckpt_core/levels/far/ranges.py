"""`FarFiles`: the files of far steps, for readers that know files: whatever is read is fetched as a range.

A read of more than 1 MiB is one request: parallel readers make such ones, several at once. Smaller reads
come one after another, and of each chunk twice (hashed, then handed out): for them whole pieces are fetched
and kept for a while, the larger the longer a file is read on, the large ones by several requests at once.
"""

from __future__ import annotations

import errno
import mmap
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ckpt_core.levels.far.door import Away, Copy, Far
from ckpt_core.system.files import Buffer, Files
from ckpt_core.system.threads import own_lock

_MIB = 1024 * 1024
_DIRECT_BYTES = _MIB
"""Reads of more than this are a request of their own."""

_FIRST_BYTES, _MOST_BYTES = 256 * 1024, 32 * _MIB
"""The first piece of a file, or behind a jump, and the largest one; each that goes on is twice as long."""

_PART_BYTES = 8 * _MIB
"""One request: what S3 and its like advise."""

_PARTS = 4
_KEPT_BYTES = 96 * _MIB
"""Of pieces in all: a piece that is read twice, as tools do with a chunk, is fetched once."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a file of the stand-in stands for."""

    copy: Copy
    name: str
    nbytes: int


class FarFiles(Files):
    """Reads files that stand for far ones from their level, and all others as they are. Thread-safe.

    Attributes:
        away: why reading ended, once a range could not be fetched: all that is read after it fails at once,
            so that whoever reads on in spite of errors does not wait for each anew.
        away_at: the target whose range that was.
    """

    best_read_bytes = _PART_BYTES

    def __init__(self, far: Far) -> None:
        self.away: Away | None = None
        self.away_at: str | None = None
        self._gone: set[str] = set()
        self._far = far
        self._origins: dict[str, Origin] = {}
        self._open: dict[int, Origin] = {}
        self._pieces: OrderedDict[tuple[int, int], memoryview] = OrderedDict()
        self._lock = own_lock()
        self._scratch = threading.local()
        self._pool = ThreadPoolExecutor(_PARTS, thread_name_prefix="ckpt-ranges")

    def stand_in(self, path: Path, origin: Origin) -> None:
        """From now on, what is read of this file comes from there."""
        self._origins[str(path.__fspath__())] = origin

    def forget(self, path: Path) -> None:
        """The file has its bytes now."""
        self._origins.pop(str(path.__fspath__()), None)

    def leave_out(self, target: str) -> None:
        """It was that target which has gone, not the level: others are read on."""
        self._gone.add(target)
        self.away = self.away_at = None

    def end(self) -> None:
        """Let the threads go."""
        self._pool.shutdown(cancel_futures=True)

    def open_read(self, path: Path, *, direct: bool = False) -> int:
        """As ever; past the page cache there is no way to a far file."""
        origin = self._origins.get(str(path.__fspath__()))
        if origin is not None and direct:
            raise OSError(errno.EINVAL, "a far file", str(path))
        fd = super().open_read(path, direct=direct)
        if origin is not None:
            self._open[fd] = origin
        return fd

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        # Order matters: once it is closed, another thread may have its number.
        if self._open.pop(fd, None) is not None:
            with self._lock:
                for key in [key for key in self._pieces if key[0] == fd]:
                    del self._pieces[key]
        super().close(fd)

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """One scatter read; it may give less than is there, as any read."""
        origin = self._open.get(fd)
        if origin is None:
            return super().preadv(fd, buffers, offset)
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        nbytes = min(sum(map(len, views)), origin.nbytes - offset)
        if nbytes <= 0:
            return 0
        if nbytes <= _DIRECT_BYTES:
            return _scatter(self._piece(fd, origin, offset, nbytes), views)
        if len(views) == 1:
            self._fetch(origin, views[0][:nbytes], offset)
            return nbytes
        data = self._scratch_of(nbytes)
        self._fetch(origin, data, offset)
        return _scatter(data, views)

    def preadv_cached(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Nothing of a far file is in the page cache."""
        return 0 if fd in self._open else super().preadv_cached(fd, buffers, offset)

    def map_private(self, fd: int, size: int) -> mmap.mmap:
        """A far file cannot be mapped."""
        if fd in self._open:
            raise OSError(errno.ENODEV, "a far file")
        return super().map_private(fd, size)

    # -- inside ----------------------------------------------------------------------------------

    def _fetch(self, origin: Origin, into: memoryview, offset: int) -> None:
        away, target = self.away, origin.copy.target
        if away is None and target not in self._gone:
            try:
                self._far.read_into(origin.copy, origin.name, into, offset)
                return
            except Away as exc:
                away = exc
                # One of several requests for what has gone may end behind `leave_out`.
                if target not in self._gone:
                    self.away, self.away_at = exc, target
        # The readers know what to do with an OSError; `look_at` tells the user of `away`.
        raise OSError(errno.EIO, str(away or f"{target} has gone")) from away

    def _piece(self, fd: int, origin: Origin, offset: int, nbytes: int) -> memoryview:
        """The bytes of a small read, or the first of them."""
        before = 0
        with self._lock:
            for start, data in [
                (key[1], data) for key, data in self._pieces.items() if key[0] == fd
            ]:
                if start <= offset < start + len(data):
                    self._pieces.move_to_end((fd, start))
                    return data[offset - start :]
                if start + len(data) == offset:
                    before = len(data)
        size = max(nbytes, min(2 * before, _MOST_BYTES), _FIRST_BYTES)
        data = memoryview(bytearray(min(size, origin.nbytes - offset)))
        self._fetch_parts(origin, data, offset)
        with self._lock:
            self._pieces[fd, offset] = data
            kept = sum(map(len, self._pieces.values()))
            while kept > _KEPT_BYTES:
                kept -= len(self._pieces.popitem(last=False)[1])
        return data

    def _fetch_parts(self, origin: Origin, data: memoryview, offset: int) -> None:
        starts = range(0, len(data), _PART_BYTES)
        if len(starts) == 1:
            self._fetch(origin, data, offset)
            return
        parts = [
            self._pool.submit(self._fetch, origin, data[at : at + _PART_BYTES], offset + at)
            for at in starts
        ]
        for part in parts:
            part.result()

    def _scratch_of(self, nbytes: int) -> memoryview:
        data: memoryview | None = getattr(self._scratch, "data", None)
        if data is None or len(data) < nbytes:
            data = self._scratch.data = memoryview(bytearray(nbytes))
        return data[:nbytes]


def _scatter(data: memoryview, views: Sequence[memoryview]) -> int:
    done = 0
    for view in views:
        part = data[done : done + len(view)]
        view[: len(part)] = part
        done += len(part)
    return done
