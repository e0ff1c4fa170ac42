"""The manifests of a directory of steps, decoded once for as long as they stay the same."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

import xxhash

from ckpt_core.errors import CkptError, ConfigError
from ckpt_core.layout import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, RankManifest
from ckpt_core.levels.far.door import Away, Copy
from ckpt_core.levels.mailbox import LEVELS
from ckpt_core.store import check_layout, entries, home_of, is_real_dir, mount_of
from ckpt_core.system.files import Files, advice
from ckpt_core.system.threads import own_lock
from ckpt_core.types import parse_step_dir

logger = logging.getLogger(__name__)

HOPELESS = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG}
)
"""What trying again does not help against, before somebody does something."""

Seen = tuple[int, int, int]
"""What tells one writing of a file from another: its inode, when it was written, its length."""


class Looked:
    """What has a manifest in a root: steps and directories of files. Thread-safe, without a lock."""

    def __init__(self, root: Path, *, files: Files, refused: set[str] | None = None) -> None:
        self._root = root
        self._files = files
        self._refused = refused
        self._known: dict[str, tuple[Seen, Manifest | None]] = {}
        self._lock = own_lock()

    def manifest(self, name: str) -> Manifest | None:
        """That of what has a name in the root; None when nothing whole has, said once in the log.

        Raises:
            OSError: it cannot be told.
        """
        try:
            seen = _seen(self._root / name)
            with self._lock:
                known = self._known.get(name)
            if known is not None and known[0] == seen:
                return known[1]
            found = self._decoded(name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        with self._lock:
            self._known[name] = (seen, found)
        return found

    def listed(self, name: str) -> Manifest | None:
        """As `manifest`, in a list of all; what this user may not read is only named where that was asked."""
        try:
            return self.manifest(name)
        except PermissionError:
            if self._refused is None:
                raise
            self._refused.add(name)
            return None

    def home(self, copy: Copy) -> Path | None:
        """Where the files of a copy lie; None when nothing, or something else, has its name."""
        manifest = self.manifest(copy.target)
        if manifest is None or manifest.attempt != copy.attempt:
            return None
        folder = self._root / copy.target
        home = home_of(folder, manifest)
        return home if is_real_dir(home) else folder

    def forget_others(self, names: Collection[str]) -> None:
        """Only these are in the root: nothing of what has gone is remembered."""
        with self._lock:
            self._known = {name: self._known[name] for name in names if name in self._known}

    def _decoded(self, name: str) -> Manifest | None:
        try:
            return self.fresh(name)
        except CkptError as exc:
            logger.warning("%s is left out: %s", self._root / name, exc)
            return None

    def fresh(self, name: str) -> Manifest:
        """The same, read now.

        Raises:
            FileNotFoundError: it has none.
            CorruptCheckpoint, UnknownFormat: it is damaged, or that of a newer release.
        """
        path = self._root / name / MANIFEST_NAME
        manifest = Manifest.decode(self.read(name), path=path)
        is_step = parse_step_dir(name)
        if (manifest.directory is None) != (is_step is not None):
            raise FileNotFoundError(errno.ENOENT, "it is a copy of something else", str(path))
        return manifest

    def read(self, name: str) -> bytes:
        """The bytes of its manifest. Raises OSError."""
        if not is_real_dir(self._root / name):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        data = read_whole(self._root / name / MANIFEST_NAME, MAX_MANIFEST_BYTES, files=self._files)
        if data is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return data


def read_whole(path: Path, most: int, *, files: Files) -> bytes | None:
    """The bytes of a small file; None when it is not there, no regular file, or longer than `most`.

    Raises:
        OSError: it cannot be read.
    """
    try:
        fd = files.open_read(path)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            return None
        return files.first(fd, found.st_size)
    finally:
        files.close(fd)


def _seen(folder: Path) -> Seen:
    found = os.lstat(folder / MANIFEST_NAME)
    return found.st_ino, found.st_mtime_ns, found.st_size


def files_in(folder: Path, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Regular files below a folder, with their lengths; none that is being written."""
    for entry in entries(folder):
        if entry.name.startswith("."):
            continue
        with suppress(FileNotFoundError):
            found = os.lstat(entry.path)
            if stat.S_ISDIR(found.st_mode):
                yield from files_in(Path(entry.path), f"{prefix}{entry.name}/")
            elif stat.S_ISREG(found.st_mode):
                yield prefix + entry.name, found.st_size


_NEVER = -1
"""A length that no file has."""


def named_files(folder: Path, manifest: Manifest, *, files: Files) -> dict[str, int]:
    """What must lie in a folder for it to be whole: rank manifests and all that these name, with lengths.

    A rank manifest that is not there as it was written has a length that no file has.

    Raises:
        OSError: it cannot be told.
        UnknownFormat: a newer release wrote a rank manifest.
    """
    named: dict[str, int] = {}
    for rank in manifest.ranks:
        data = read_whole(folder / rank.file, MAX_MANIFEST_BYTES, files=files)
        if data is None or xxhash.xxh3_64_hexdigest(data) != rank.xxh3:
            named[rank.file] = _NEVER
            continue
        named[rank.file] = rank.nbytes
        found = RankManifest.decode(data, path=folder / rank.file)
        named |= {entry.name: entry.nbytes for entry in found.files}
    return named


def age_s(path: Path) -> float:
    """How long nothing has been written below a path."""
    newest = 0.0
    for folder, _, names in os.walk(path):
        for name in (".", *names):
            with suppress(FileNotFoundError):
                newest = max(newest, os.lstat(os.path.join(folder, name)).st_mtime)
    return time.time() - newest


def find_disk(root: Path, mounted: str, *, url: str) -> str:
    """Be sure that nothing is written on the disk below, where a level's own is not mounted any more.

    Args:
        mounted: where it was mounted; "": not known.

    Returns:
        Where it is mounted.

    Raises:
        Away: nothing is mounted there, and no level is here.
    """
    # By the place, and not by the number of the device: that is another one after a reboot.
    is_there = not mounted or os.path.ismount(mounted)
    if not is_there and not is_real_dir(root / LEVELS):
        raise Away(
            f"{url}: nothing is mounted at {mounted}, where its filesystem was: mount it again; or, to begin "
            f"anew on what is there now, make the directory {root / LEVELS}. Nothing was written"
        )
    return mount_of(root)


def check_place(root: Path, *, url: str, files: Files) -> None:
    """Be sure that a root can be written to, or made; leaves nothing behind.

    Raises:
        ConfigError: it cannot; what to do.
        Away: it cannot be told now.
    """
    check_layout(root)
    above = next(path for path in (root, *root.parents) if os.path.lexists(path))
    try:
        if not above.is_dir():
            raise ConfigError(f"{url}: {above} is no directory: name another place")
        if above == root:
            _try_out(root, files)
        elif not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(above))
    except OSError as exc:
        text = f"{url}: cannot write in {above}: {exc.strerror or exc}. {advice(exc)}"
        if exc.errno in HOPELESS:
            raise ConfigError(text) from exc
        raise Away(text) from exc


def _try_out(root: Path, files: Files) -> None:
    probe = root / f".{secrets.token_hex(8)}.part"
    try:
        files.write_new(probe, b"ckpt-core")
    finally:
        with suppress(FileNotFoundError):
            files.unlink(probe)
