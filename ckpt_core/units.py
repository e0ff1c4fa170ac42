"""Sizes, counts, durations and names, as people write and as they read them. No I/O, no torch."""

from __future__ import annotations

import difflib
import html
import operator
import re
import threading
from collections.abc import Iterable, Mapping
from datetime import timedelta

from ckpt_core.errors import ConfigError

ALIGN_BYTES = 4096
"""Granularity of everything that is written directly: file sizes, chunk sizes, the tensor region."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

_STEPS = ("KiB", "MiB", "GiB", "TiB", "PiB")
_TIMES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
_PLURALS = {
    "directory": "directories",
    "directory of files": "directories of files",
    "leaf": "leaves",
}


def parse_bytes(value: int | str, *, field: str) -> int:
    """Bytes from an int or from text such as "2GiB", "16 MiB" or "4096".

    Raises:
        ConfigError: the text is no size, or the size is negative, or 8 EiB or more.
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
        # The least that is refused stands for all that is larger, infinity too.
        size = int(min(float(match[1]) * _UNITS[match[2].lower()], 2.0**63))
    if size >= 2**63:
        raise ConfigError(f"{field}={value!r} is more than any machine has: a size is below 8 EiB")
    if size < 0:
        raise ConfigError(f"{field}={value!r} is negative: a size is 0 or more bytes")
    return size


def parse_count(value: object, *, field: str, least: int = 1) -> int:
    """A count as a plain int, also of NumPy's.

    Raises:
        ConfigError: it is no int, or below `least`.
    """
    number = plain_int(value)
    if number is None or number < least:
        raise ConfigError(f"{field}={value!r} must be an int of at least {least}")
    return number


def plain_int(value: object) -> int | None:
    """A whole number as a plain int, also NumPy's and a tensor's; None: it is none, as a bool is."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return None


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
        raise ConfigError(f"{field}={value!r} must be above zero")
    return duration


def parse_timeout(value: timedelta | float | int, *, field: str) -> timedelta:
    """As `parse_duration`, no longer than the system can wait.

    Raises:
        ConfigError: it is no such duration.
    """
    duration = parse_duration(value, field=field)
    if duration.total_seconds() > threading.TIMEOUT_MAX:
        raise ConfigError(
            f"{field}={value!r} is longer than the system can wait: name at most "
            f"{threading.TIMEOUT_MAX:.0f} seconds"
        )
    return duration


def align_up(size: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit


def size_text(nbytes: float) -> str:
    """Bytes for people: `512 B`, `16.0 MiB`."""
    if nbytes < 1024:
        return f"{int(nbytes)} B"
    size, unit = float(nbytes), ""
    for unit in _STEPS:  # noqa: B007
        size /= 1024
        if size < 1023.95:
            break
    return f"{size:.1f} {unit}"


def every_text(steps: int) -> str:
    """An interval for people: `every step`, `every 40 steps`."""
    return "every step" if steps == 1 else f"every {steps:,} steps"


def count_text(count: int, noun: str) -> str:
    """A number with its noun: `1 step`, `2 steps`."""
    return f"{count:,} {noun if count == 1 else _PLURALS.get(noun, noun + 's')}"


def time_text(seconds: float | None) -> str:
    """A duration for people: `1.5 h`; nothing for None."""
    if seconds is None:
        return ""
    for unit_s, name in _TIMES:
        if seconds >= 2 * unit_s or (name == "s" and seconds >= 0.1):
            return f"{seconds / unit_s:.4g} {name}"
    return f"{seconds * 1e3:.3g} ms"


def clean(text: str) -> str:
    """Text from a file, harmless for a terminal or a page: what does not print is escaped.

    Escape sequences, line breaks and marks that turn the direction of writing could make a hostile
    name look like something else.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """What a notebook shows of an object: a heading, and a line for each thing that it says."""
    cells = [[html.escape(clean(str(cell))) for cell in row] for row in rows.items()]
    body = "".join([f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in cells])
    return f"<table><caption>{html.escape(clean(title))}</caption>{body}</table>"


def known_names(given: str, known: Iterable[str]) -> str:
    """The end of an error about a name that is none of those that are known: `did you mean ...`."""
    names = {name.lower(): name for name in sorted(known)}
    close = difflib.get_close_matches(given.lower(), names, n=1)
    listed = ", ".join(names.values())
    return f"did you mean {names[close[0]]}? Known are {listed}" if close else f"known are {listed}"
