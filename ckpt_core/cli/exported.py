"""What an export has made, whatever its format; and whether there is room for it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ckpt_core.errors import ConfigError
from ckpt_core.system.files import Files
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


@contextmanager
def replacing(path: Path, *, force: bool) -> Iterator[IO[bytes]]:
    """A file beside `path` to write to; it gets the name `path`, durably, when the body succeeds.

    Raises:
        ConfigError: `path` is there and `force` is not given, or it is a directory.
        OSError: it cannot be written.
    """
    _check_free(path, force=force)
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _check_free(path, force=force)
        os.rename(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise
    Files().sync_dir(Path(os.path.realpath(path.parent)))


def _check_free(path: Path, *, force: bool) -> None:
    if path.is_dir():
        raise ConfigError(f"{path} is a directory: name the file to write", path=path)
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
