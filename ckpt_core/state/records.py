"""Types that a skeleton names, and which instances are no more than their fields."""

from __future__ import annotations

import dataclasses
import sys
from functools import cached_property
from typing import Any

from ckpt_core.errors import ConfigError

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement.


def type_name(cls: type) -> str:
    """ "module:qualname", the form in which a skeleton names a type."""
    return f"{cls.__module__}:{cls.__qualname__}"


def check_reachable(cls: type, where: str) -> None:
    """Raise ConfigError for a type that its name does not lead to: every reader would refuse it."""
    found: Any = sys.modules.get(cls.__module__)
    try:
        for part in cls.__qualname__.split("."):
            found = vars(found)[part]
    except (KeyError, TypeError):
        found = None
    if found is not cls:
        raise ConfigError(
            f"{where} is a {type_name(cls)}, and no type is found by that name when it is restored:"
            " define its class at the top of a module"
        )


def fields_alone(value: Any) -> list[str] | None:
    """The fields of a dataclass; None if an instance of them alone would be incomplete.

    What a cached_property has kept is made again when it is asked for.
    """
    cls = type(value)
    fields = [field.name for field in dataclasses.fields(value)]
    own = (name for name in getattr(value, "__dict__", ()) if name not in fields)
    whole = all(isinstance(getattr(cls, name, None), cached_property) for name in own)
    return fields if whole and all(hasattr(value, n) for n in fields) and _is_plain(cls) else None


def _is_plain(cls: type) -> bool:
    """Whether instances hold nothing but attributes: no dict, list or exception below the class."""
    return all(base is object or base.__flags__ & _HEAP_TYPE for base in cls.__mro__)
