"""`OpenSave`: a committed step (or directory of files) with all its files open, to be sent or looked at.

Files that somebody has open are never written again, so what is open here stays as it was committed,
whatever becomes of the step: retired, replaced, moved aside.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import xxhash

from ckpt_core.errors import (
    CkptError,
    CorruptCheckpoint,
    NotCommitted,
    RestoreError,
    UnknownFormat,
)
from ckpt_core.layout import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    RankEntry,
    RankManifest,
)
from ckpt_core.levels.agent.pace import BLOCK_BYTES
from ckpt_core.levels.agent.precedence import Precedence
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.levels.far.door import Away, Copy, Far
from ckpt_core.system.files import Files, advice


class OpenSave:
    """What a root holds of one save. Close it, or use `with`.

    Attributes:
        copy: which save it is.
        manifest: what it consists of, here.
        manifest_bytes: as they are in the root.
        ranks: the bytes of each rank manifest that is here, by name.
        entries: the other files, in the order of ranks.
    """

    def __init__(self, path: Path, *, files: Files) -> None:
        """Open everything and check the manifests.

        Raises:
            NotCommitted: it is not there, or was retired before all of it was open.
            CorruptCheckpoint: a manifest is damaged, or a file has another length.
            UnknownFormat: a newer release wrote it.
            RestoreError: the system refused to read.
        """
        self.path = path
        self._files = files
        self._fds: dict[str, int] = {}
        self.ranks: dict[str, bytes] = {}
        self.entries: list[FileEntry] = []
        try:
            with self._reading(path):
                self._open_all()
        except BaseException:
            self.close()
            raise

    def _open_all(self) -> None:
        # By this descriptor: whatever takes the name meanwhile is never mixed with what is open already.
        home = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self.manifest_bytes = self._small(home, MANIFEST_NAME)
            self.manifest = Manifest.decode(self.manifest_bytes, path=self.path / MANIFEST_NAME)
            m = self.manifest
            self.copy = Copy(m.step, m.attempt, m.directory)
            for rank in m.ranks:
                self.ranks[rank.file] = self._rank(home, rank)
            for entry in self.entries:
                self._open(home, entry)
        finally:
            os.close(home)

    def _rank(self, home: int, entry: RankEntry) -> bytes:
        data, path = self._small(home, entry.file), self.path / entry.file
        found = xxhash.xxh3_64_hexdigest(data)
        if len(data) != entry.nbytes or found != entry.xxh3:
            raise _corrupt(path, f"{entry.nbytes} bytes of xxh3 {entry.xxh3}", f"xxh3 {found}")
        self.entries += RankManifest.decode(data, path=path).files
        return data

    def _small(self, home: int, name: str) -> bytes:
        fd = self._files.open_within(home, name)
        try:
            size = _size(fd, self.path / name)
            if size > MAX_MANIFEST_BYTES:
                raise _corrupt(
                    self.path / name, f"at most {MAX_MANIFEST_BYTES} bytes", f"{size} bytes"
                )
            return self._files.first(fd, size)
        finally:
            self._files.close(fd)

    def _open(self, home: int, entry: FileEntry) -> None:
        fd = self._files.open_within(home, entry.name)
        self._fds[entry.name] = fd
        size = _size(fd, self.path / entry.name)
        if size != entry.nbytes:
            raise _corrupt(self.path / entry.name, f"{entry.nbytes} bytes", f"{size} bytes")

    def which(self, name: str) -> tuple[int, int]:
        """Which file of this machine that is, under whatever names."""
        found = os.fstat(self._fds[name])
        return found.st_dev, found.st_ino

    @property
    def nbytes(self) -> int:
        """Of all files but `manifest.json`."""
        return sum(entry.nbytes for entry in self.entries) + sum(map(len, self.ranks.values()))

    @property
    def is_whole(self) -> bool:
        """Whether all ranks are here; else other roots have the rest."""
        return len(self.manifest.ranks) == self.manifest.world_size

    def blocks(self, entry: FileEntry, block_bytes: int) -> Iterator[memoryview]:
        """The bytes of a file, in order; a chunk's last block comes after its sum was found right.

        Each block is overwritten by the next, unless it is read-only: such a one is the file's own memory.

        Args:
            block_bytes: most bytes of a block.

        Raises:
            CorruptCheckpoint: a chunk differs from the manifest.
            RestoreError: the system refused to read.
        """
        size, read = self._reader(entry, block_bytes)
        offset = 0
        for index, chunk in enumerate(entry.chunks):
            found = xxhash.xxh3_64()
            for begin in range(0, chunk.nbytes, size):
                block = read(offset + begin, min(size, chunk.nbytes - begin))
                found.update(block)
                is_last = begin + len(block) == chunk.nbytes
                if is_last and chunk.xxh3 not in (None, got := found.hexdigest()):
                    what = f"xxh3 {chunk.xxh3} of chunk {index}"
                    raise _corrupt(self.path / entry.name, what, f"xxh3 {got}")
                yield block
                # Reason: whoever has kept it decides when its memory goes, and nobody else.
                del block
            offset += chunk.nbytes

    def _reader(self, entry: FileEntry, most: int) -> tuple[int, Callable[[int, int], memoryview]]:
        """How much of a file is read at a time, and what gives the bytes from an offset on."""
        if self._files.is_in_memory(self._fds[entry.name]):
            return most, lambda offset, nbytes: self._mapped(entry.name, offset, nbytes)
        buffer = memoryview(bytearray(min(most, BLOCK_BYTES, entry.nbytes)))

        def read(offset: int, nbytes: int) -> memoryview:
            self.read_into(entry.name, buffer[:nbytes], offset)
            return buffer[:nbytes]

        return len(buffer), read

    def _mapped(self, name: str, offset: int, nbytes: int) -> memoryview:
        path = self.path / name
        with self._reading(path):
            try:
                return self._files.map_range(self._fds[name], offset, nbytes)
            except ValueError:
                pass  # it is shorter by now
        raise _corrupt(path, f"{offset + nbytes} bytes", "fewer")

    def read_into(self, name: str, block: memoryview, offset: int) -> None:
        """Fill a block. Raises as `blocks`."""
        path = self.path / name
        with self._reading(path):
            done = self._files.fill(self._fds[name], block, offset)
        if done < len(block):
            raise _corrupt(path, f"{offset + len(block)} bytes", f"{offset + done} bytes")

    def close(self) -> None:
        """Let go of the files. Idempotent."""
        while self._fds:
            with suppress(OSError):
                self._files.close(self._fds.popitem()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as exc:
            if path == self.path and not self._is_still_there():
                raise NotCommitted(f"{path} was retired meanwhile", path=path) from exc
            raise _corrupt(
                self.path / str(exc.filename or ""), "a file", "nothing of that name"
            ) from exc
        except OSError as exc:
            text = f"{path} cannot be read: {exc.strerror or exc}. {advice(exc)}"
            raise RestoreError(text, path=path) from exc

    def _is_still_there(self) -> bool:
        """Whether the name leads to this very save."""
        with suppress(OSError, AttributeError, CorruptCheckpoint):
            return (self.path / MANIFEST_NAME).read_bytes() == self.manifest_bytes
        return False


def with_nearest(
    folders: Iterable[Path], copy: Copy, act: Callable[[OpenSave], None], *, files: Files
) -> None:
    """Do something with a save where it is nearest; where that is damaged, with the next; or nowhere.

    Args:
        folders: roots, the nearest first.

    Raises:
        CorruptCheckpoint, UnknownFormat: it is damaged wherever it is, or that was found by `act`.
        What `act` raises: at once.
    """
    damage: CkptError | None = None
    for folder in folders:
        try:
            with OpenSave(folder / copy.target, files=files) as save:
                if save.copy == copy:
                    act(save)
                    return
        except NotCommitted:
            continue  # retired or saved again meanwhile, or never there
        except (CorruptCheckpoint, UnknownFormat) as exc:
            damage = exc
    if damage is not None:
        raise damage


_SETTLED_S = 2.0
_ANYWAY_S = 5.0


class Source:
    """The steps of a root that is looked at several times in a second. For one thread."""

    def __init__(self, root: Path, *, files: Files) -> None:
        self._root = root
        self.far = DirectoryFar(root, files=files)
        self._seen: tuple[int, int] | None = None
        self._listed_s = float("-inf")
        self._steps: dict[int, str] = {}

    def steps(self) -> dict[int, str]:
        """As `Far.steps`; listed anew when a name in the root has changed, or may have."""
        seen, now = self._changed(), time.monotonic()
        if seen is None or seen != self._seen or now - self._listed_s > _ANYWAY_S:
            self._steps = self.far.steps()
            self._seen, self._listed_s = seen, now
        return self._steps

    def _changed(self) -> tuple[int, int] | None:
        """Which directory it is and when a name in it has changed; None where that is too fresh to tell."""
        try:
            found = os.stat(self._root)
        except OSError:
            return None
        # Clocks of files are coarse, and those of servers not ours: two changes may bear the same time.
        is_settled = abs(time.time() - found.st_mtime) > _SETTLED_S
        return (found.st_ino, found.st_mtime_ns) if is_settled else None


class Sources:
    """The steps of the root and of the directories before a level, looked at likewise."""

    def __init__(self, *, files: Files) -> None:
        self._files = files
        self._known: dict[Path, Source] = {}
        self._precedence: Precedence[int] = Precedence()

    def steps(self, folders: Iterable[Path]) -> dict[int, str]:
        """The saves that count, with their attempts; a folder that is away has none.

        Args:
            folders: the root, then directories, the nearest first.
        """
        found = []
        for folder in folders:
            if folder not in self._known:
                self._known[folder] = Source(folder, files=self._files)
            source, steps = self._known[folder], dict[int, str]()
            with suppress(Away):  # a level before it that is away is told of by its own carrier
                steps = source.steps()
            found.append((source.far, steps))
        return self._precedence.merge(found)

    def lesser(self, there: Mapping[int, str], far: Far) -> dict[int, str]:
        """See `Precedence.lesser`, of the last `steps`."""
        return self._precedence.lesser(there, far)


def _size(fd: int, path: Path) -> int:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise _corrupt(path, "a regular file", "something else")
    return found.st_size


def _corrupt(path: Path, expected: str, got: str) -> CorruptCheckpoint:
    text = f"{path}: expected {expected}, got {got}"
    return CorruptCheckpoint(text, path=path, expected=expected, got=got)
