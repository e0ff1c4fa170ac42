"""Objects as files: a key is a path below one directory, and a file has its name only once it is whole.

    fresh = tree.begin()               a file without a name that anybody looks at
    tree.publish(fresh, key, over)     durable, then there: by one rename, if the condition holds

Order matters: bytes are durable before their name is, and both before anybody is told so.
The lock of the directory keeps other servers out, and one lock of ours makes a condition and the rename that
rests on it one act; so conditions hold also on filesystems without links. What a kill leaves has no name, and
is deleted by the next server.
A step goes by a mark in its manifest's place, which needs room before it gives any: for a disk that is
full to the last byte one small file is kept in hand, without a name, where the filesystem can (O_TMPFILE).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ckpt_core.levels.serving.wire import Refusal
from ckpt_core.store import RootLock, ensure_dir, ensure_root, entries, remove_tree
from ckpt_core.system.files import Files

INCOMING = ".incoming"
"""What has no name yet. No key's first part begins with a dot, so none leads here, or to the lock."""

MOST_HASHED_BYTES = 1 << 20
"""Words and manifests are told apart by their bytes; larger ones by when and where they were written."""

_SPARE_BYTES = 4096
"""Room for a mark, a lease or a word."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_KEY = (errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST, errno.ELOOP, errno.EINVAL)


@dataclass(frozen=True)
class Thing:
    """An object.

    Attributes:
        fd: open for reading.
        tag: changes with each writing.
    """

    fd: int
    nbytes: int
    tag: str
    changed_s: float


@dataclass(frozen=True)
class Row:
    """An object in a list."""

    key: str
    nbytes: int
    changed_s: float


@dataclass(frozen=True)
class Condition:
    """What has to be there for a write: an object with the tag `match`; nothing (`create`); else anything."""

    match: str | None = None
    create: bool = False


class Tree:
    """The objects below one directory. Thread-safe.

    Args:
        folder: made if it is not there; locked until `close`.

    Raises:
        RootBusy: another server, or a job, has the directory.
        PersistError: it cannot be made or locked.
    """

    def __init__(self, folder: Path, *, files: Files) -> None:
        ensure_root(files, folder)
        self.folder = Path(os.path.realpath(folder))
        self._files = files
        self._names = threading.Lock()
        self._shown: tuple[str, Path] | None = None
        self._spare: list[int] = []
        self._lock = RootLock(self.folder, files=files)
        self._lock.acquire()
        try:
            # Nobody was told that any of it is here.
            remove_tree(files, self.folder / INCOMING)
            ensure_dir(files, self.folder / INCOMING)
            self._keep_spare()
        except BaseException:
            self._lock.release()
            raise

    def close(self) -> None:
        """Let others have the directory. Idempotent."""
        while (fd := self._taken_spare()) is not None:
            self._files.close(fd)
        with contextlib.suppress(OSError):
            if self._lock.held():
                remove_tree(self._files, self.folder / INCOMING)
        self._lock.release()

    def show(self, name: str, folder: Path) -> None:
        """Let a directory that lies elsewhere be read under a name of two parts, from now on; "": none is.

        What is hidden in it stays so, and nothing in it can be changed.
        """
        self._shown = (f"{name}/", Path(os.path.realpath(folder))) if name else None

    # -- writing ---------------------------------------------------------------------------------

    def check_key(self, key: str) -> None:
        """Be sure that an object can have it. Raises Refusal."""
        self._path(key)

    def begin(self) -> tuple[Path, int]:
        """A new file that has no key yet, and a descriptor of it. Raises Refusal."""
        path = self.folder / INCOMING / secrets.token_hex(8)
        with refused():
            return path, self._files.create(path)

    def begin_over(self, nbytes: int) -> tuple[Path, int]:
        """As `begin`, of what takes an object's place: a few bytes find room also where the disk is full."""
        if nbytes > _SPARE_BYTES:
            return self.begin()
        self._keep_spare()
        path = self.folder / INCOMING / secrets.token_hex(8)
        try:
            with refused():
                self._files.write_new(path, bytes(nbytes))
                return path, self._files.open_write(path)
        except Refusal as refusal:
            self.discard(path)
            if refusal.status != 507 or (fd := self._taken_spare()) is None:
                raise
            try:
                self._files.name(fd, path)
            except OSError:  # without /proc, say
                self._files.close(fd)
                raise refusal from None
        try:
            with refused():
                self._files.truncate(fd, nbytes)
            return path, fd
        except BaseException:
            self._files.close(fd)
            raise

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        """Write some of it. Raises Refusal."""
        with refused():
            self._files.pwrite(fd, data, offset)

    def sync(self, fd: int) -> None:
        """Make what was written of it durable. Raises Refusal."""
        with refused():
            self._files.sync(fd)

    def discard(self, path: Path) -> None:
        """Give up a file that has no key yet; what stays of it is swept."""
        with contextlib.suppress(OSError):
            self._files.unlink(path)

    def publish(self, path: Path, key: str, condition: Condition) -> str:
        """Give a file whose bytes are durable its key, durably; its tag.

        Raises:
            Refusal: 412 if the condition does not hold; 400 for a key that cannot be; 507 if the disk is
                full.
        """
        target = self._path(key)
        with refused(), self._names:
            self._check(target, condition)
            self._make_folders(target)
            # Commit point: from here on the object is there.
            self._files.rename(path, target)
            self._keep_spare()
            fd = self._files.open_read(target)
        try:
            with refused():
                self._sync_names(target.parent)
                return _tag(self._files, fd, os.fstat(fd))
        finally:
            self._files.close(fd)

    def link(self, thing: Thing, source: str, key: str, condition: Condition) -> str:
        """Give an object that is open one more key, durably; its tag.

        Raises:
            Refusal: 412 if the object has gone from its key; or as `publish`.
        """
        path = self.folder / INCOMING / secrets.token_hex(8)
        try:
            with refused(), contextlib.suppress(FileNotFoundError):
                self._files.link(self._path(source), path)
                if os.path.samestat(os.lstat(path), os.fstat(thing.fd)):
                    return self.publish(path, key, condition)
            raise Refusal(412, "PreconditionFailed")
        finally:
            # Also where it has been published: of two names of one file a rename takes none.
            self.discard(path)

    def delete(self, keys: Sequence[str]) -> None:
        """Take objects away, durably, with the folders that are empty then; what is not there is no error."""
        changed: set[Path] = set()
        with refused():
            for target in map(self._path, keys):
                with self._names, contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    if stat.S_ISREG(os.lstat(target).st_mode):
                        self._files.unlink(target)
                        changed.add(self._remove_empty(target.parent))
            self._keep_spare()
            for folder in changed:
                with contextlib.suppress(FileNotFoundError):
                    self._files.sync_dir(folder)

    # -- reading ---------------------------------------------------------------------------------

    def open(self, key: str) -> Thing | None:
        """An object, whose descriptor is the caller's to close; None when it is not there."""
        with refused():
            return self._open(self._path(key, reads=True))

    def look(self, prefix: str, *, flat: bool) -> Iterator[Row | str]:
        """Objects whose keys begin with a prefix, in order; their folders (a text) instead, unless `flat`.

        Args:
            prefix: "", or with a slash at its end.
        """
        above = self._path(prefix + "x", reads=True).parent if prefix else self.folder
        is_top = self._shown is not None and prefix == self._shown[0]
        for entry in _in_order(above):
            key = prefix + entry.name
            if (not prefix or is_top) and entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                below = self.look(f"{key}/", flat=flat)
                if flat:
                    yield from below
                elif next(below, None) is not None:
                    yield f"{key}/"
                continue
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(found.st_mode):
                    yield Row(key, found.st_size, found.st_mtime)

    # -- inside ----------------------------------------------------------------------------------

    def _path(self, key: str, *, reads: bool = False) -> Path:
        """Where a key lies. Danger: whoever has the token chooses it; it must not lead out of here."""
        base = self.folder
        if self._shown is not None and f"{key}/".startswith(self._shown[0]):
            if not reads:
                raise Refusal(403, "AccessDenied")
            key, base = key[len(self._shown[0]) :], self._shown[1]
        parts = key.split("/")
        names = [part.encode(errors="surrogateescape") for part in parts]
        if parts[0].startswith(".") or any(
            part in ("", ".", "..") or "\0" in part for part in parts
        ):
            raise Refusal(400, "InvalidArgument")
        if any(len(name) > 255 for name in names) or sum(map(len, names)) > 1024:
            raise Refusal(400, "KeyTooLongError")
        folder = base.joinpath(*parts[:-1])
        # Somebody of this machine may have put a link there.
        if os.path.realpath(folder) != str(folder):
            raise Refusal(400, "InvalidArgument")
        return folder / parts[-1]

    def _open(self, path: Path) -> Thing | None:
        try:
            fd = self._files.open_read(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            found = os.fstat(fd)
            if stat.S_ISREG(found.st_mode):
                tag = _tag(self._files, fd, found)
                thing, fd = Thing(fd, found.st_size, tag, found.st_mtime), -1
                return thing
            return None
        finally:
            if fd >= 0:
                self._files.close(fd)

    def _check(self, target: Path, condition: Condition) -> None:
        if condition == Condition():
            return
        thing = self._open(target)
        if thing is not None:
            self._files.close(thing.fd)
        there = None if thing is None else thing.tag
        if (condition.create and there is not None) or condition.match not in (None, there):
            raise Refusal(412, "PreconditionFailed")

    def _make_folders(self, target: Path) -> None:
        above = itertools.takewhile(lambda folder: folder != self.folder, target.parents)
        for folder in reversed([*above]):
            ensure_dir(self._files, folder)

    def _sync_names(self, folder: Path) -> None:
        """All of them: another thread may have made one of them, and not have come to its sync yet."""
        while folder != self.folder.parent:
            # What has been taken away again meanwhile was there.
            with contextlib.suppress(FileNotFoundError):
                self._files.sync_dir(folder)
            folder = folder.parent

    def _taken_spare(self) -> int | None:
        with contextlib.suppress(IndexError):
            return self._spare.pop()
        return None

    def _keep_spare(self) -> None:
        """Where there is no room for it now, what goes next gives some."""
        if self._spare:
            return
        with contextlib.suppress(OSError):
            fd = self._files.create_unnamed(self.folder / INCOMING)
            try:
                # What is overwritten later needs no room then.
                self._files.pwrite(fd, bytes(_SPARE_BYTES), 0)
                self._spare.append(fd)
            except BaseException:
                self._files.close(fd)
                raise

    def _remove_empty(self, folder: Path) -> Path:
        """The first folder above that stays."""
        while folder != self.folder:
            try:
                self._files.rmdir(folder)
            except OSError:
                break
            folder = folder.parent
        return folder


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Turn what the operating system says into what the client understands.

    A full disk is a status that the client's own retries, and then the agent's, are made for.
    """
    try:
        yield
    except OSError as exc:
        if exc.errno in _FULL:
            raise Refusal(507, "StorageFull") from exc
        if exc.errno == errno.ENAMETOOLONG:
            raise Refusal(400, "KeyTooLongError") from exc
        if exc.errno in _NO_KEY:
            raise Refusal(400, "InvalidArgument") from exc
        raise Refusal(500, "InternalError") from exc


def _in_order(folder: Path) -> list[os.DirEntry[str]]:
    """As keys are in order: a folder's name has a slash at its end."""

    def key(entry: os.DirEntry[str]) -> bytes:
        slash = "/" if entry.is_dir(follow_symlinks=False) else ""
        return os.fsencode(entry.name + slash)

    return sorted(entries(folder), key=key)


def _tag(files: Files, fd: int, found: os.stat_result) -> str:
    """Which writing of an object: small ones by their bytes, since conditions are made of these."""
    if found.st_size <= MOST_HASHED_BYTES:
        return f'"{xxhash.xxh3_128_hexdigest(files.first(fd, found.st_size))}"'
    return f'"{found.st_mtime_ns:x}-{found.st_ino:x}-{found.st_size:x}"'
