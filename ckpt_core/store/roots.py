"""Roots beside or below a place: for whoever named the wrong one."""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Callable
from pathlib import Path

from ckpt_core.errors import RestoreError
from ckpt_core.store.names import committed_steps

_ALIKE = 0.8
_MOST_LOOKED_AT = 1000


def roots_in(folder: Path, *, named: Callable[[str], bool] = lambda name: True) -> dict[Path, int]:
    """The directories right in `folder` that hold committed steps, each with its newest; by name.

    Takes no lock and changes nothing; what cannot be read is left out.

    Args:
        named: of these names alone; the others are not looked into.
    """
    try:
        with os.scandir(folder) as found:
            likely = (Path(one.path) for one in found if named(one.name))
            paths = sorted(itertools.islice(likely, _MOST_LOOKED_AT))
    except OSError:
        return {}
    newest: dict[Path, int] = {}
    for path in paths:
        try:
            steps = committed_steps(path)
        except (OSError, RestoreError):
            continue
        if steps:
            newest[path] = max(steps)
    return newest


def is_misspelt(name: str, other: str) -> bool:
    """Whether one name looks like a slip of the other. Names that differ in digits alone are numbered."""
    wanted, there = (_without_digits(text.casefold()) for text in (name, other))
    same_but_case = name.casefold() == other.casefold()
    alike = difflib.SequenceMatcher(None, wanted, there).ratio() >= _ALIKE
    return name != other and (same_but_case or (wanted != there and alike))


def _without_digits(text: str) -> str:
    return "".join(char for char in text if not char.isdigit())
