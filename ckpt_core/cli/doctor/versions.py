"""Versions of packages, as their metadata tell; nothing is imported."""

from __future__ import annotations

import re
from importlib import metadata
from importlib.util import find_spec

_OURS = "ckpt-core"


def installed_version(package: str) -> str | None:
    """The version of an installed distribution, None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def is_there(name: str) -> bool:
    """Whether a module of this name would be imported; a mere directory is none."""
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def least_version(package: str) -> str | None:
    """The oldest version of a package that this one names, as an extra or always; None if it names none."""
    try:
        requirements = metadata.requires(_OURS) or []
    except metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        match = re.match(rf"{re.escape(package)}\s*>=\s*([\d.]+)", requirement)
        if match is not None:
            return match[1]
    return None


def is_older(version: str, least: str) -> bool:
    """Whether a version is below another, by the numbers of their release alone."""
    mine, wanted = _numbers(version), _numbers(least)
    length = max(len(mine), len(wanted))
    return _padded(mine, length) < _padded(wanted, length)


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match is not None else ()


def _padded(numbers: tuple[int, ...], length: int) -> tuple[int, ...]:
    return numbers + (0,) * (length - len(numbers))
