"""A shard file of a committed step that is held open, so that later steps may have it as well.

As long as it is held it is no slot, whatever becomes of the names that it has: the kernel says that somebody
has it open. And its bytes are there, where it cannot get another name.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ckpt_core.errors import PersistError
from ckpt_core.system.files import Files
from ckpt_core.system.threads import own_lock

_log = logging.getLogger("ckpt_core")


@dataclass(frozen=True, slots=True)
class WriteResult:
    """Written bytes under one checksum: their length and xxh3 (16 hex digits; None: checksums are off)."""

    nbytes: int
    xxh3: str | None


class HeldFile:
    """Closed when the last one who has it releases it; whoever makes it has it. Thread-safe.

    Args:
        path: where it is now; a commit says where it is then (`home`).
        digests: xxh3_128 of each piece of the file, in their order.
        pieces: the checksums of each.

    Attributes:
        home: where it was last seen.
        sizes: of the pieces.
    """

    def __init__(
        self,
        path: Path,
        digests: Sequence[bytes],
        pieces: Sequence[Sequence[WriteResult]],
        *,
        files: Files,
    ) -> None:
        self.home = path
        self.digests = tuple(digests)
        self.pieces = tuple([tuple(piece) for piece in pieces])
        self.sizes = tuple([sum(one.nbytes for one in piece) for piece in pieces])
        self._starts = tuple(itertools.accumulate(self.sizes, initial=0))[:-1]
        self._files = files
        self._written_ns = os.lstat(path).st_mtime_ns
        self._fd = files.open_read(path)
        self._users = 1
        self._lock = own_lock()

    @property
    def nbytes(self) -> int:
        """Its length."""
        return sum(self.sizes)

    @property
    def results(self) -> tuple[WriteResult, ...]:
        """The checksums of all of it, in file order."""
        return tuple(itertools.chain.from_iterable(self.pieces))

    def has(self, index: int, offset: int, digest: bytes) -> bool:
        """Whether its piece of that number begins there, and has these bytes."""
        # Staging memory may have been replaced since, by chunks of another size.
        return self._starts[index : index + 1] == (offset,) and self.digests[index] == digest

    def is_as_written(self) -> bool:
        """Whether nobody has cut it or written to it; True where that cannot be told: `put` looks again.

        Not seen: what its storage makes of it, and what comes in the same tick of the clock as its writing.
        """
        with contextlib.suppress(OSError), self._lock:
            return self._is_as_written(os.fstat(self._fd))
        return True

    def _is_as_written(self, found: os.stat_result) -> bool:
        # By what links, renames and permissions do not change: unlike st_ctime.
        return (found.st_size, found.st_mtime_ns) == (self.nbytes, self._written_ns)

    def take(self) -> HeldFile:
        """Have it too, until `release`."""
        with self._lock:
            assert self._users > 0, "taken after it was closed"
            self._users += 1
        return self

    def release(self) -> None:
        """Have it no more. Called once for each who has it."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._files.close(self._fd)

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of it, as they are on storage; fewer where they are not there."""
        memory = memoryview(bytearray(nbytes))
        return memory[: self._files.fill(self._fd, memory, offset)]

    def put(self, target: Path, *, step: int) -> None:
        """Make the file `target` of it: another name, or where that cannot be, a copy that is durable.

        The name is durable with the next sync of its directory. Called from a background thread.

        Raises:
            OSError: neither is possible.
            PersistError: it is damaged on storage.
        """
        try:
            self._files.link(self.home, target)
        except FileExistsError:
            raise
        except OSError as exc:
            _log.info("%s is copied and not linked: %s", target, exc)
        else:
            # Somebody may have put another file there since, or have changed this one.
            held = os.fstat(self._fd)
            if os.path.samestat(os.lstat(target), held) and self._is_as_written(held):
                return
            self._files.unlink(target)
        self._copy(target, step)
        # Later steps share the copy. dup2 keeps the number: somebody may be reading from it right now.
        written_ns = os.lstat(target).st_mtime_ns
        fresh = self._files.open_read(target)
        with self._lock:
            os.dup2(fresh, self._fd, inheritable=False)
            self._written_ns = written_ns
        self._files.close(fresh)

    def copy_pieces(self, fd: int, indices: Iterable[int], *, step: int) -> None:
        """Write these pieces of it to their places in another file, each of them checked.

        Raises:
            OSError: it cannot be read, or the other one not be written.
            PersistError: it is damaged on storage.
        """
        memory = memoryview(bytearray(max(self.sizes)))
        for index in indices:
            piece = memory[: self.sizes[index]]
            self._files.fill(self._fd, piece, self._starts[index])
            if xxhash.xxh3_128(piece).digest() != self.digests[index]:
                raise PersistError(
                    f"step {step} was not saved: {self.home}, which it was to share, is damaged on "
                    f"storage. `ckpt-core verify` says which steps have it; the next save writes it anew",
                    step=step,
                    path=self.home,
                )
            self._files.pwrite(fd, piece, self._starts[index])

    def _copy(self, target: Path, step: int) -> None:
        fd = self._files.create(target)
        try:
            self.copy_pieces(fd, range(len(self.sizes)), step=step)
            self._files.sync(fd)
        finally:
            self._files.close(fd)
