"""Files that people and their tools read: the old one or the new one, whole, whatever cuts a write short.

Outside of roots, which are written to through `Files` and the store's rules.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckpt_core.system.files import Files

_STREAMS = (1, 2)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A path of the same suffix to write a file to; it gets the name `path`, durably, when the body succeeds.

    Where the body raises, or the process is killed, what was there stays as it was. A link is followed. What
    is no file, such as /dev/null or a pipe, and what standard output goes to, is written to as it is.

    Raises:
        OSError: it cannot be written; names `path`.
    """
    if _stays(path):
        yield path
        return
    real = Path(os.path.realpath(path)) if path.is_symlink() else path
    try:
        with beside(real) as temporary:
            yield temporary
            with suppress(FileNotFoundError):
                shutil.copymode(real, temporary)
            fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
    except OSError as exc:
        if exc.filename is None:  # of a write
            exc.filename = str(path)
        raise


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A new name in the directory of `path`; what the body makes there, and syncs, then has the name `path`.

    Raises:
        OSError: it cannot be made or renamed; names `path`.
    """
    # Filesystems count bytes, not letters. Programs choose a format by the suffix.
    start, suffix = (
        os.fsencode(text)[:100].decode(errors="ignore") for text in (path.name, path.suffix)
    )
    temporary = path.with_name(f".{start}.{secrets.token_hex(4)}.tmp{suffix}")
    try:
        yield temporary
        os.rename(temporary, path)
    except BaseException as exc:
        with suppress(FileNotFoundError):
            temporary.unlink()
        if isinstance(exc, OSError) and str(exc.filename) == str(temporary):
            exc.filename, exc.filename2 = str(path), None
        raise
    Files().sync_dir(Path(os.path.realpath(path.parent)))


def _stays(path: Path) -> bool:
    """Whether another file of that name would not be where somebody looks for the text."""
    try:
        found = os.stat(path)
    except OSError:
        return False
    return not path.is_file() or any(_is_at(found, fd) for fd in _STREAMS)


def _is_at(found: os.stat_result, fd: int) -> bool:
    with suppress(OSError):
        return os.path.samestat(found, os.fstat(fd))
    return False
