"""What other packages add to `ckpt-core`, found by the entry points that they are installed with.

`ckpt_core` imports no integration. Each names what it brings in its distribution, by group and name:

    ckpt_core.bench     a suite of `ckpt-core bench`
    ckpt_core.doctor    what `ckpt-core doctor` is to know of a framework
    ckpt_core.export    a layout of `ckpt-core export`
    ckpt_core.import    what `ckpt-core import` is to know of a format
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any


def names(group: str) -> list[str]:
    """Of everything that is installed for a group, sorted; nothing of it is imported."""
    return sorted({point.name for point in entry_points(group=group)})


def load(group: str, name: str) -> Any:
    """What stands under a name that `names` has; imports the module that it is in.

    Raises:
        LookupError: there is none of this name.
    """
    for point in entry_points(group=group, name=name):
        return point.load()
    raise LookupError(f"{name!r} is not installed for {group}")
