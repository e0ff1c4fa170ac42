"""One shard file on its way to storage: opened late, written in pieces, synced once.

Called by the writer threads (`write`), by the finisher (`sync`, `close`) and, in DIRECT mode, by the
stager (`window`). Opening is left to the first of them, since it may block on storage and neither the
training thread nor staging may wait for that.
"""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path
from typing import Any

import xxhash

from ckpt_core.errors import CkptError, PersistError
from ckpt_core.persist.held_file import HeldFile, WriteResult
from ckpt_core.persist.requests import FilePlace, PieceLike, ShardRequest
from ckpt_core.system.files import NO_DIRECT, Files, advice
from ckpt_core.system.kept_mappings import KeptMapping, KeptMappings
from ckpt_core.system.pages import touch_view
from ckpt_core.system.threads import own_lock
from ckpt_core.types import DirectIO

_log = logging.getLogger("ckpt_core")

_LOOKS, _LINE_BYTES = 8, 64


class ShardFile:
    """The file behind one ShardRequest. Thread-safe; `close` and `let_go` are idempotent.

    Attributes:
        earlier: a file of a committed step that may turn out to have the same bytes; `share` says so.
        held: this one, once it is written and synced, where later steps may share it.
    """

    def __init__(
        self, request: ShardRequest, *, files: Files, kept: KeptMappings | None = None
    ) -> None:
        self.request = request
        self._files = files
        self._kept = kept
        self._is_warm = self._is_synced = False
        self._opening = own_lock()
        self._fd: int | None = None
        self._path: Path | None = None
        self._mapping: mmap.mmap | None = None
        self._direct = False
        self._results: dict[int, tuple[WriteResult, ...]] = {}
        self._digests: dict[int, bytes] = {}
        self._looks: dict[int, bytes] = {}
        self._is_compared = False
        self._same: set[int] = set()
        self.earlier: HeldFile | None = None
        self.held: HeldFile | None = None
        self._is_shared = False

    @property
    def is_shared(self) -> bool:
        """Whether nothing is written: it is `earlier`."""
        return self._is_shared

    @property
    def expected_bytes(self) -> int:
        """How much of it is likely to be written."""
        return self.request.file_bytes if self.earlier is None else 0

    def share(self) -> None:
        """It is `earlier`: nothing of it will be written. Called before anything is."""
        assert self.earlier is not None and not self._results
        self._is_shared = True

    def compare(self) -> None:
        """Perhaps it is `earlier`: what comes is looked at, and the same is not written again."""
        assert self.earlier is not None and not self._results
        self._is_compared = True

    @property
    def looks(self) -> tuple[bytes, ...]:
        """How its pieces look, once all is written; see `ShardRequest.like`."""
        return tuple([self._looks[index] for index in sorted(self._looks)])

    @property
    def others(self) -> list[int]:
        """Once all is written: numbers of the pieces of `earlier` that this file has otherwise."""
        count = 0 if self.earlier is None else len(self.earlier.sizes)
        return [index for index in range(count) if index not in self._same]

    @property
    def path(self) -> Path | None:
        """Where the file is, once it has been opened."""
        return self._path

    def write(self, piece: PieceLike) -> None:
        """Make a piece part of the file (durable only after `sync`).

        Called from a writer thread that has waited for `piece.ready`.

        Raises:
            PersistError: the bytes could not be written.
        """
        # Hash before writing: both read the piece, and it has just been filled.
        data = piece.memory[: max(self.request.file_bytes - piece.offset, 0)]
        if self.request.show is not None:
            self.request.show(piece.offset, data)
        if self.request.shared_at is not None and self._is_there(piece, data):
            return
        results = _sums(data, self.request.sum_bytes) if self.request.checksum else None
        with self._errors("write"):
            self._put(self._open(), piece)
        self._results[piece.index] = results or (WriteResult(len(data), None),)

    def _is_there(self, piece: PieceLike, data: memoryview) -> bool:
        """Note what a piece is; whether it is that of the earlier file."""
        index, like = piece.index, self.request.like
        if like is not None:
            look = self._looks[index] = _look(data)
            if like[index : index + 1] != (look,):
                return False
        digest = self._digests[index] = xxhash.xxh3_128(data).digest()
        earlier = self.earlier
        if not self._is_compared or earlier is None:
            return False
        if not earlier.has(index, piece.offset, digest):
            return False
        self._results[index] = earlier.pieces[index]
        self._same.add(index)
        return True

    def window(self, offset: int, nbytes: int) -> memoryview:
        """Memory that is bytes offset .. offset+nbytes of the file. Called from the stager thread.

        Raises:
            PersistError: the file could not be made, or its blocks not be reserved: without that a
                full filesystem would kill the process (SIGBUS) instead of failing the save.
        """
        with self._errors("map"):
            self._open()
            assert self._mapping is not None
            memory = memoryview(self._mapping)[offset : offset + nbytes]
        if not self._is_warm:
            # One page fault for each 4 KiB takes longer than the copy that follows.
            touch_view(memory)
        return memory

    def sync(self) -> tuple[WriteResult, ...]:
        """Make everything written durable; its checksums in file order. Called once all is written.

        Raises:
            PersistError: the bytes may not be durable.
        """
        if self._is_shared or self._is_the_same():
            self._is_shared = True
            return self._link()
        with self._errors("sync"):
            fd = self._open()
            if self._same:
                self._fill()
            if self.request.file_bytes != self.request.nbytes:
                self._files.truncate(fd, self.request.file_bytes)
            self._files.sync(fd)
        self._is_synced = True
        if self.request.shared_at is not None and len(self._digests) == len(self._results):
            self._hold()
        results = tuple(
            [result for index in sorted(self._results) for result in self._results[index]]
        )
        assert sum(result.nbytes for result in results) == self.request.file_bytes
        return results

    def _is_the_same(self) -> bool:
        return self.earlier is not None and len(self._same) == len(self.earlier.sizes)

    def _fill(self) -> None:
        """Write what had been left out as it is in the earlier file, since that one is not shared."""
        assert self._path is not None and self.earlier is not None
        # By a descriptor of its own: direct writes take whole blocks alone.
        fd = self._files.open_write(self._path)
        try:
            self.earlier.copy_pieces(fd, sorted(self._same), step=self.request.step)
        finally:
            self._files.close(fd)

    def _hold(self) -> None:
        """Have later saves share it, where nobody but this machine changes files."""
        assert self._path is not None
        if not self._files.is_local(self._path.parent):
            return
        digests = [self._digests[index] for index in sorted(self._digests)]
        pieces = [self._results[index] for index in sorted(self._results)]
        try:
            self.held = HeldFile(self._path, digests, pieces, files=self._files)
        except OSError as exc:
            _log.info("%s will not be shared by later steps: %s", self._path, exc)

    def _link(self) -> tuple[WriteResult, ...]:
        assert self.earlier is not None and self.request.shared_at is not None
        with self._errors("link"):
            self._path = self.request.shared_at()
            self.earlier.put(self._path, step=self.request.step)
        return self.earlier.results

    def let_go(self) -> None:
        """Hold no file of a committed step any more. Called when the save has ended."""
        with self._opening:
            held = [one for one in (self.earlier, self.held) if one is not None]
            self.earlier = self.held = None
        for one in held:
            one.release()

    def close(self) -> None:
        """Close the descriptor, or hand it on to the next save; nobody writes any more."""
        with self._opening:
            fd, self._fd = self._fd, None
            mapping, self._mapping = self._mapping, None
            if fd is not None and not self._keep(fd, mapping):
                self._files.close(fd)

    def _keep(self, fd: int, mapping: mmap.mmap | None) -> bool:
        # Of one that may not be published, nothing is kept.
        if self._kept is None or not self._is_synced:
            return False
        warm = self._is_warm or self.request.mapped
        return self._kept.keep(fd, self.request.nbytes, mapping, warm=warm)

    # -- inside ----------------------------------------------------------------------------------

    def _put(self, fd: int, piece: PieceLike) -> None:
        mapping = self._mapping
        if mapping is not None and piece.memory.obj is mapping:
            return  # a window: it was filled where it lies
        if mapping is not None and self._is_warm:
            self._files.write_mapped(mapping, piece.memory, piece.offset)
            return
        self._pwrite(fd, piece)
        if not self._direct:
            self._files.start_writeback(fd, piece.offset, piece.nbytes)

    def _pwrite(self, fd: int, piece: PieceLike) -> None:
        try:
            self._files.pwrite(fd, piece.memory, piece.offset)
        except OSError as exc:
            # Some filesystems accept O_DIRECT at open and refuse the first write.
            if not (self._direct and exc.errno in NO_DIRECT):
                raise
            if self.request.direct_io is DirectIO.ON:
                raise
            self._files.pwrite(self._reopen_buffered(fd), piece.memory, piece.offset)

    def _reopen_buffered(self, refused: int) -> int:
        with self._opening:
            if self._fd == refused and self._direct:
                assert self._path is not None
                fresh = self._files.open_write(self._path, direct=False)
                # dup2 keeps the number: other writers may be using it right now.
                os.dup2(fresh, refused, inheritable=False)
                self._files.close(fresh)
                self._direct = False
            assert self._fd is not None
            return self._fd

    def _open(self) -> int:
        with self._opening:
            if self._fd is None:
                place = self.request.place()
                self._path = place.path
                found = self._found(place)
                if found is not None:
                    self._mapping, self._is_warm = found.memory, found.is_warm
                    self._fd = found.fd
                    return self._fd
                self._fd = self._open_file(place)
                self._size(self._fd, recycled=place.recycled)
                if self.request.mapped:
                    self._mapping = self._files.map_shared(self._fd, self.request.nbytes)
            return self._fd

    def _found(self, place: FilePlace) -> KeptMapping | None:
        """The file as it was left by the step that wrote it last."""
        if self._kept is None or not place.recycled:
            return None
        return self._kept.take(place.path, self.request.nbytes)

    def _open_file(self, place: FilePlace) -> int:
        opener = self._files.open_write if place.recycled else self._files.create
        wanted = self.request.direct_io is not DirectIO.OFF and not self.request.mapped
        if wanted:
            try:
                fd = opener(place.path, direct=True)
            except OSError as exc:
                if exc.errno not in NO_DIRECT or self.request.direct_io is DirectIO.ON:
                    raise
                # Linux creates the name before it finds that O_DIRECT is not to be had.
                opener = self._files.open_write if place.path.exists() else opener
            else:
                self._direct = True
                return fd
        return opener(place.path, direct=False)

    def _size(self, fd: int, *, recycled: bool) -> None:
        # A recycled file keeps its blocks: it is cut only when the new file is shorter.
        size = os.fstat(fd).st_size if recycled else 0
        if size > self.request.nbytes:
            self._files.truncate(fd, self.request.nbytes)
        if size != self.request.nbytes or self.request.mapped:
            self._files.allocate(fd, self.request.nbytes, mapped=self.request.mapped)
            if os.fstat(fd).st_size < self.request.nbytes:
                self._files.truncate(fd, self.request.nbytes)

    def _errors(self, action: str) -> _Boundary:
        return _Boundary(self, action)


class _Boundary:
    """Turns whatever the file layer raises into PersistError, with what happened and what to do."""

    def __init__(self, shard: ShardFile, action: str) -> None:
        self._shard = shard
        self._action = action

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, CkptError) or not isinstance(error, Exception):
            return
        path = self._shard.path
        step = self._shard.request.step
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise PersistError(
            f"step {step} was not saved: cannot {self._action} {path}: {reason}. "
            f"Earlier steps are untouched. {advice(error)}",
            step=step,
            path=path,
        ) from error


def _sums(memory: memoryview, sum_bytes: int | None) -> tuple[WriteResult, ...]:
    size = sum_bytes or len(memory)
    parts = [memory[start : start + size] for start in range(0, len(memory), size)]
    return tuple([WriteResult(len(part), xxhash.xxh3_64(part).hexdigest()) for part in parts])


def _look(data: memoryview) -> bytes:
    """A few of its bytes, from all over it."""
    step = max((len(data) - _LINE_BYTES) // (_LOOKS - 1), 1)
    return b"".join([data[at : at + _LINE_BYTES] for at in range(0, _LOOKS * step, step)])
