"""Paths that the working directory no longer concerns, and where figures are told, as people write it."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from ckpt_core.errors import ConfigError

_LOOPBACK = "127.0.0.1"
_SUFFIX = ".prom"
_WANTED = "name a file that ends in .prom, a port (of 127.0.0.1), HOST:PORT (0.0.0.0: any network), or None"


def absolute(path: str) -> str:
    """A path that later changes of the working directory do not concern.

    Raises:
        ConfigError: it has a null character; or it is relative, and the working directory has been removed,
            or cannot be found.
    """
    check_no_null(path)
    try:
        return os.path.abspath(path)
    except OSError as exc:
        raise ConfigError(
            f"{path!r} is relative, and the working directory cannot be found ({exc.strerror}): give an "
            f"absolute path, or start in a directory that is there"
        ) from exc


def check_no_null(path: str | os.PathLike[str]) -> None:
    """Raise ConfigError for what the system would refuse in words that name nothing."""
    text = os.fsdecode(path)
    if "\0" in text:
        raise ConfigError(f"{text!r} has a null character, and no path has: leave it out")


def parse_metrics(value: Any) -> str:
    """An absolute path that ends in .prom, or `HOST:PORT`.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(value, os.PathLike) or (isinstance(value, str) and value.endswith(_SUFFIX)):
        path = os.fspath(value)
        if not isinstance(path, str) or not path.endswith(_SUFFIX):
            raise ConfigError(f"metrics={value!r}: Prometheus reads no such file: {_WANTED}")
        return absolute(path)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"metrics={value!r} is no place: {_WANTED}")
    text = str(value).strip()
    if text.isascii() and text.isdecimal():
        text = f"{_LOOPBACK}:{text}"
    try:
        found = urlsplit(f"//{text}")
        host, port = found.hostname, found.port
    except ValueError as exc:
        raise ConfigError(f"metrics={value!r} is no place ({exc}): {_WANTED}") from exc
    if not host or port is None or found.netloc != text or "@" in text:
        raise ConfigError(f"metrics={value!r} is no place: {_WANTED}")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
