"""Files that people and their tools read: the old one or the new one, whole, whatever cuts a write short.

Outside of roots, which are written to through `Files` and the store's rules.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt_core.system.files import Files

_STREAMS = (1, 2)
_TOKEN_BYTES = 4

_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EBUSY})
"""Of a rename over another's file in a sticky directory, such as /tmp, and over one that is a mount point."""


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A path of the same suffix to write a file to; it gets the name `path`, durably, when the body succeeds.

    Where the body raises, or the process is killed, what was there stays as it was. A link is followed. What
    is no file, such as /dev/null or a pipe, and what standard output goes to, is written to as it is; so is a
    file that may be written, where its directory lets nothing else have the name.

    Raises:
        OSError: it cannot be written; names `path`.
    """
    if _stays(path):
        yield path
        return
    real = Path(os.path.realpath(path)) if path.is_symlink() else path
    try:
        with beside(real, _take_name) as temporary:
            yield temporary
            with suppress(FileNotFoundError):
                _give_away(temporary, real)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
    except OSError as exc:
        if exc.filename is None:  # of a write
            exc.filename = str(path)
        raise


def _give_away(temporary: Path, old: Path) -> None:
    """To whom the old file belongs, who may read it as before."""
    found = old.stat()
    with suppress(OSError):
        os.chown(temporary, found.st_uid, found.st_gid)
    shutil.copymode(old, temporary)


def _take_name(temporary: Path, path: Path) -> None:
    try:
        os.rename(temporary, path)
    except OSError as exc:
        if exc.errno not in _REFUSED or not path.is_file():
            raise
        # Not "wb": in a sticky directory the kernel opens another's file for nobody who might create it.
        with path.open("r+b") as file, temporary.open("rb") as fresh:
            file.truncate()
            shutil.copyfileobj(fresh, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.unlink()


@contextmanager
def beside(path: Path, take: Callable[[Path, Path], None] = os.rename) -> Iterator[Path]:
    """A new name in the directory of `path`; what the body makes there, and syncs, then has the name `path`.

    Args:
        take: gives it that name.

    Raises:
        OSError: it cannot be made or renamed; names `path`.
    """
    start, suffix = _around(path)
    temporary = path.with_name(f"{start}{secrets.token_hex(_TOKEN_BYTES)}{suffix}")
    try:
        yield temporary
        take(temporary, path)
    except BaseException as exc:
        with suppress(FileNotFoundError):
            temporary.unlink()
        if isinstance(exc, OSError) and str(exc.filename) == str(temporary):
            exc.filename, exc.filename2 = str(path), None
        raise
    Files().sync_dir(Path(os.path.realpath(path.parent)))


def left_beside(path: Path) -> list[Path]:
    """Files that `beside` may have named for that path: being written, or left by who was killed at it."""
    start, suffix = _around(path)
    name = re.compile(f"{re.escape(start)}[0-9a-f]{{{2 * _TOKEN_BYTES}}}{re.escape(suffix)}")
    with os.scandir(path.parent) as found:
        files = [entry.name for entry in found if entry.is_file(follow_symlinks=False)]
    return [path.with_name(one) for one in files if name.fullmatch(one)]


def _around(path: Path) -> tuple[str, str]:
    # Filesystems count bytes, not letters. Programs choose a format by the suffix.
    start, suffix = (
        os.fsencode(text)[:100].decode(errors="ignore") for text in (path.name, path.suffix)
    )
    return f".{start}.", f".tmp{suffix}"


def _stays(path: Path) -> bool:
    """Whether another file of that name would not be where somebody looks for the text."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    if not path.is_file() or any(_is_at(found, fd) for fd in _STREAMS):
        return True
    return not os.access(os.path.dirname(os.path.realpath(path)), os.W_OK, effective_ids=True)


def _is_at(found: os.stat_result, fd: int) -> bool:
    with suppress(OSError):
        return os.path.samestat(found, os.fstat(fd))
    return False
