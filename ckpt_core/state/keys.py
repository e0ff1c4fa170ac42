"""Keys and members that a stranger chose, looked at before anything hashes or compares them.

Python hashes a tuple anew each time, recursing without a check: nested ones that share their parts take
exponential time, deep ones the process. Keys with one hash make a dict quadratic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any

MAX_DEPTH = 256
_SAME_HASH = 64
"""Most keys of one container with the same hash: honest ones hardly ever have two."""

_PART_UNITS = 8
"""An int is hashed by its words, many at a time."""


class TooMuchWork(ValueError):
    """What the bytes ask for is out of proportion to what they are."""


class Work:
    """What may be spent on one checkpoint's values, in looks at an item; counts down."""

    def __init__(self, units: int) -> None:
        self._left = units

    def spend(self, units: int) -> None:
        """Count work that is about to be done.

        Raises:
            TooMuchWork: it is more than is left.
        """
        self._left -= units
        if self._left < 0:
            raise TooMuchWork("values that take too much work")

    def look(self, key: Any) -> None:
        """Count what hashing or comparing a key takes, without doing it.

        Raises:
            TooMuchWork: it is more than is left, or the key is nested too deeply.
        """
        if type(key) is str:  # nearly all of them
            self.spend(1)
            return
        level, depth = [key], 0
        while level:
            inner: list[Any] = []
            for item in level:
                parts = _parts(item)
                if parts is not None:
                    self.spend(1 + len(parts))
                    inner.extend(parts)
                elif isinstance(item, int):
                    self.spend(1 + item.bit_length() // (64 * _PART_UNITS))
                else:
                    self.spend(1)
            level, depth = inner, depth + 1
            if depth > MAX_DEPTH:
                raise TooMuchWork("keys that are nested too deeply")


def _parts(item: Any) -> Collection[Any] | None:
    """What the hash of a value is made of; None if it has no parts."""
    if isinstance(item, tuple | frozenset):
        return item
    if isinstance(item, slice):
        return (item.start, item.stop, item.step)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name, None) for field in dataclasses.fields(item)]
    return None


class Keys:
    """The keys of one container, or its members, as they come."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._hashes: dict[int, int] = {}

    def add(self, keys: Iterable[Any]) -> None:
        """Look at keys that are about to be used.

        Raises:
            TooMuchWork: using them would take too much work.
            TypeError: one of them cannot be a key.
        """
        for key in keys:
            self._work.look(key)
            if type(key) is str or type(key) is bytes:
                continue  # Their hashes cannot be foreseen.
            number = hash(key)
            count = self._hashes[number] = self._hashes.get(number, 0) + 1
            if count > _SAME_HASH:
                raise TooMuchWork("too many keys with one hash")
