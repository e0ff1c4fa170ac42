"""What an export has made, whatever its format; and whether there is room for it."""

from __future__ import annotations

import errno
import fcntl
import io
import os
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ckpt_core.errors import ConfigError
from ckpt_core.layout import MANIFEST_NAME
from ckpt_core.system.files import Files
from ckpt_core.system.replacing import beside, left_beside
from ckpt_core.types import parse_step_dir
from ckpt_core.units import size_text


@dataclass
class Exported:
    """What was written, and what was not as it was.

    Attributes:
        tensors: how many entries the file has.
        nbytes: size of the file.
        left_out: paths that the format cannot hold, with what they are.
        changed: paths that are there in another form, and which.
        show: told bytes done and bytes in all.
    """

    tensors: int = 0
    nbytes: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)
    show: Callable[[int, int], None] = lambda done, total: None
    _taken: int = 0

    def told(self, blocks: Iterable[memoryview], *, of_bytes: int) -> Iterator[memoryview]:
        """The same blocks, while `show` is told what has been taken of `of_bytes`."""
        for block in blocks:
            yield block
            self._taken += len(block)
            self.show(self._taken, of_bytes)


def unique(name: str, used: Container[str]) -> str:
    """The name, with a number where it is used already."""
    number, made = 0, name
    while made in used:
        number += 1
        made = f"{name}~{number}"
    return made


@contextmanager
def replacing(path: Path, *, force: bool) -> Iterator[IO[bytes]]:
    """A file beside `path` to write to; it gets the name `path`, durably, when the body succeeds.

    What killed processes have left of such files goes first.

    Raises:
        ConfigError: `path` is there and `force` is not given, it is no file, or it is in a step; or another
            process begins to write it at the same moment.
        OSError: it cannot be written; names `path`.
    """
    _check_free(path, force=force)
    _sweep(path)
    # Order matters: locked until it has its name.
    with ExitStack() as held, beside(path) as temporary:
        with io.BufferedRandom(_Named(temporary, path)) as file:
            held.callback(os.close, lock := os.dup(file.fileno()))
            _lock(lock, temporary, path)
            yield file
            file.flush()
            os.fsync(file.fileno())
        _check_free(path, force=force)


def _sweep(path: Path) -> None:
    """Take away what was left by who was killed: nobody has it locked. What cannot be locked stays."""
    with suppress(OSError):
        for left in left_beside(path):
            with suppress(OSError), left.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()


def _lock(fd: int, temporary: Path, path: Path) -> None:
    busy = False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:  # any other: there are no such locks here, and nobody sweeps
        busy = exc.errno == errno.EWOULDBLOCK
    if busy or not temporary.exists():
        raise ConfigError(f"{path}: another export to it begins right now: try again", path=path)


class _Named(io.FileIO):
    """A new file; what it cannot write is told by the name that it will have."""

    def __init__(self, temporary: Path, path: Path) -> None:
        super().__init__(temporary, "x+")
        self._path = path

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as exc:
            exc.filename = str(self._path)
            raise


@contextmanager
def with_its_reason() -> Iterator[None]:
    """Around `torch.save`: an error of a write, or Ctrl-C in it, is raised as what it is.

    Torch completes its archive even then, and raises a RuntimeError of the place that it finds itself at.
    """
    try:
        yield
    except RuntimeError as exc:
        reason: BaseException | None = exc
        while reason and not isinstance(reason, OSError | MemoryError | KeyboardInterrupt):
            reason = reason.__context__
        if reason is None:
            raise
        raise reason from None


def check_outside(path: Path) -> None:
    """Raises ConfigError for a place within the directory of a step, whose bytes never change."""
    folder = Path(os.path.realpath(path.parent))
    for place in (folder, *folder.parents):
        if parse_step_dir(place.name) is not None and (place / MANIFEST_NAME).exists():
            raise ConfigError(f"{path} is in a committed step: name a file elsewhere", path=path)


def _check_free(path: Path, *, force: bool) -> None:
    check_outside(path)
    if path.exists() and not path.is_file():
        what = "a directory" if path.is_dir() else "no file"
        raise ConfigError(f"{path} is {what}: name the file to write", path=path)
    if os.path.lexists(path) and not force:
        raise ConfigError(f"{path} is there already: --force replaces it", path=path)
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent}: there is no such directory", path=path)


def check_room(file: IO[bytes], nbytes: int) -> None:
    """Refuse before anything is written when the disk is too small.

    Raises:
        ConfigError: it is; nothing was written.
    """
    free = Files().free_bytes(Path(file.name).parent)
    if nbytes > free:
        raise ConfigError(
            f"the exported file takes {size_text(nbytes)} and {Path(file.name).parent} has "
            f"{size_text(free)} free: nothing was written"
        )
