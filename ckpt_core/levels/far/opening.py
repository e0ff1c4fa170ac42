"""`open_far`: the door that fits a URL; `open_plain`, for what a peer shows of its disk."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_core.errors import ConfigError
from ckpt_core.levels.far.door import Far
from ckpt_core.options import PARITY, PEER, scheme_of
from ckpt_core.system.files import Files

if TYPE_CHECKING:
    from ckpt_core.levels.far.plain import PlainFar

ROOT_PREFIX = "root-of-"
"""Of the name by which a node shows its root, and not what it keeps of others."""


def open_far(
    url: str, *, files: Files | None = None, mounted: str = "", refused: set[str] | None = None
) -> Far:
    """The level at `url`, as `Level.url` has it. Opens no connection, and writes nothing.

    Args:
        mounted: see `Far`.
        refused: gets the names in a directory whose manifests this user may not read: they are left out of
            what is listed. None: then nothing is listed, as whoever retires or sends steps must know all.

    Raises:
        ConfigError: an object store, and the extra that brings its client is not installed.
    """
    if scheme_of(url) is None:
        from ckpt_core.levels.far.directory import DirectoryFar

        return DirectoryFar(Path(url), files=files or Files(), mounted=mounted, refused=refused)
    if scheme_of(url) == PARITY:
        raise ConfigError(
            f"{url} is parity, which a restore reads where it needs it: name the root itself"
        )
    if is_shown_root(url):
        return open_plain(url)
    check_extra(url)
    # Never imported by a process that trains: it may be forked, which the client's threads do not survive.
    from ckpt_core.levels.far.objects import ObjectFar

    return ObjectFar(url)


def is_shown_root(url: str) -> bool:
    """Whether this is the root of another node, as that shows it: to be read alone."""
    return scheme_of(url) == PEER and url.rpartition("/")[2].startswith(ROOT_PREFIX)


def open_plain(url: str) -> PlainFar:
    """A directory of another node, as that shows it. Raises as `open_far`."""
    check_extra(url)
    # Never imported by a process that trains: see `open_far`.
    from ckpt_core.levels.far.plain import PlainFar

    return PlainFar(url)


def check_extra(url: str) -> None:
    """Be sure that the client for object stores is installed, without importing it.

    Raises:
        ConfigError: it is not.
    """
    if importlib.util.find_spec("obstore") is None:
        raise ConfigError(
            f"{url} needs the client of object stores: pip install 'ckpt-core[remote]'"
        )
