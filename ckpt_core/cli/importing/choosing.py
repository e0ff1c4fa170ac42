"""Which format a path has."""

from __future__ import annotations

from pathlib import Path

from ckpt_core.cli.importing.dcp import DCP
from ckpt_core.cli.importing.source import Source
from ckpt_core.cli.importing.torch_file import TORCH
from ckpt_core.errors import ConfigError
from ckpt_core.system import plugins

GROUP = "ckpt_core.import"
"""Entry points, each a `Source`."""

AUTO = "auto"


def sources() -> list[Source]:
    """Those of torch and of all integrations, in their order; frameworks need not be installed."""
    found: list[Source] = [plugins.load(GROUP, name) for name in plugins.names(GROUP)]
    return sorted([TORCH, DCP, *found], key=lambda one: (one.place, one.name))


def chosen(name: str, path: Path) -> Source:
    """The format of this name; for "auto", the one that `path` looks like.

    Raises:
        ConfigError: there is none of this name, nothing is there, or nothing recognises it.
    """
    known = {one.name: one for one in sources()}
    if name != AUTO and name not in known:
        raise ConfigError(f"--format {name}: that is no format; choose {' or '.join(known)}")
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file or directory", path=path)
    if name != AUTO:
        return known[name]
    for one in known.values():
        if one.recognises(path):
            return one
    described = "; ".join(f"{one.name}: {one.what}" for one in known.values())
    raise ConfigError(f"{path} looks like nothing that can be imported ({described})", path=path)
