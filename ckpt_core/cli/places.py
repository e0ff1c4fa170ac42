"""A root or a step that a command looks at: a directory, or the same in an object store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_core.anywhere import local, url_of
from ckpt_core.errors import ConfigError, NotCommitted
from ckpt_core.system.files import Files

if TYPE_CHECKING:
    from ckpt_core.levels import Look


class Here:
    """A directory: all that is read of it is there, so that nothing has to be done before (see `Look`).

    Attributes:
        path: the directory.
        files: how its files are read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = Files()

    def outline(self) -> None:
        """Nothing."""

    def directories(self) -> None:
        """Nothing."""

    def pins(self) -> None:
        """Nothing."""

    def ready(self, target: Path) -> Path:
        """The same path."""
        return target

    def check(self, doubted: Path | None = None) -> None:
        """Nothing."""


@contextmanager
def seen(place: str) -> Iterator[Here | Look]:
    """What a person named, for as long as the body reads it.

    Raises:
        ConfigError: a URL with an unknown scheme, or without the extra that it needs.
        NotCommitted: a step of that URL is not there, or was retired while the body read it.
        RestoreError: the store cannot be reached or read.
    """
    url = url_of(place)
    if url is None:
        yield Here(local(place))
        return
    from ckpt_core.levels import look_at

    with look_at(url) as look:
        yield look


def check_directory(path: Path) -> None:
    """Be sure that a directory of this machine is there.

    Raises:
        NotCommitted: it is not, or it is a file.
    """
    if path.is_file():
        raise NotCommitted(f"{path} is a file: a checkpoint root is a directory", path=path)
    if not path.is_dir():
        raise NotCommitted(f"{path}: there is no such directory", path=path)


def directory_of(place: str, *, command: str, what: str = "a directory") -> Path:
    """A place that a command, or an option of it, needs on this machine.

    Args:
        what: it may be.

    Raises:
        ConfigError: it is in an object store.
    """
    if url_of(place) is not None:
        raise ConfigError(f"{place} is in an object store: `{command}` takes {what}")
    return local(place)
