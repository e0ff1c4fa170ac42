"""Arguments of the callback that are about the engine, checked: its options, and its root."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_core import ConfigError, OnError, Options


def checked_root(root: object) -> Path:
    """The root as an absolute path.

    Raises:
        ConfigError: it is none, or a URL.
    """
    if not isinstance(root, str | os.PathLike) or not os.fspath(root):
        raise ConfigError(f"root={root!r} is no path: give the directory for the steps")
    return Options.checked_root(root)


def engine_options(options: object, on_error: OnError | str, levels: Any) -> Options:
    """The settings in force.

    Raises:
        ConfigError: they are none.
    """
    settings = Options() if options is None else options
    if not isinstance(settings, Options):
        raise ConfigError(f"options={options!r} is no Options: pass ckpt_core.Options(...)")
    more = {} if levels is None else {"levels": levels}
    return replace(settings, on_error=on_error, **more).or_places_from_env()
