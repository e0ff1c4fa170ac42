"""What can be drawn, asked before the work whose figures are to be drawn."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ckpt_core.errors import ConfigError

_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raise when a picture could not be written to `path`.

    Raises:
        ConfigError: matplotlib is not installed, or does not know the suffix.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("a plot needs matplotlib: pip install 'ckpt-core[bench]'")
    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"{path.name!r} is no picture: end it in {', '.join(_SUFFIXES)}")
