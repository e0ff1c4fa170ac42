"""Sizes and durations as users write them. No I/O, no torch."""

from __future__ import annotations

import re
from datetime import timedelta

from ckpt_core.errors import ConfigError

ALIGN_BYTES = 4096
"""Granularity of everything that is written directly: file sizes, chunk sizes, the tensor region."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(value: int | str, *, field: str) -> int:
    """Bytes from an int or from text such as "2GiB", "16 MiB" or "4096".

    Raises:
        ConfigError: the text is no size, or the size is negative.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(
            f"{field}={value!r} is not a size: give an int of bytes or text like '2GiB'"
        )
    if isinstance(value, int):
        size = value
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(f"{field}={value!r} is not a size: write it like '16MiB' or '2GiB'")
        size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size < 0:
        raise ConfigError(f"{field}={value!r} is negative: a size is 0 or more bytes")
    return size


def parse_duration(value: timedelta | float | int, *, field: str) -> timedelta:
    """A positive duration from a `timedelta` or from seconds.

    Raises:
        ConfigError: it is neither, or not above zero.
    """
    if isinstance(value, bool) or not isinstance(value, timedelta | float | int):
        raise ConfigError(f"{field}={value!r} is not a duration: give a timedelta or seconds")
    try:
        duration = value if isinstance(value, timedelta) else timedelta(seconds=value)
    except (OverflowError, ValueError) as exc:
        raise ConfigError(f"{field}={value!r} is not a finite duration") from exc
    if duration <= timedelta(0):
        raise ConfigError(f"{field}={value!r} must be above zero: nothing waits without a deadline")
    return duration


def align_up(size: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit
