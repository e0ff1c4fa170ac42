"""JSON from untrusted bytes: no duplicate keys, no NaN, and no exception but `Invalid`."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from ckpt_core.errors import CorruptCheckpoint


class Invalid(Exception):
    """What was expected and what was there. Never leaves this package: the caller adds the path."""

    def __init__(self, what: str, *, expected: str, got: object) -> None:
        super().__init__(what)
        self.what = what
        self.expected = expected
        self.got = got if isinstance(got, _Text) else brief(got)

    def of(self, path: Path) -> CorruptCheckpoint:
        """The error for the caller: what is wrong in this file."""
        return CorruptCheckpoint(
            f"{path}: {self.what}: expected {self.expected}, got {self.got}",
            path=path,
            expected=self.expected,
            got=self.got,
        )


_SCALARS = frozenset({int, float, str, bool, type(None)})


class _Text(str):
    """Text to show as it is, where other text is quoted."""

    __slots__ = ()


def note(text: str) -> str:
    """`got` of an `Invalid` that is a description, not a value from the file."""
    return _Text(text)


def brief(value: object) -> str:
    """A value from a hostile file, short enough for a message: never a walk through it."""
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, str):
        return repr(value[:60]) + ("..." if len(value) > 60 else "")
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 128 else f"an int of {value.bit_length()} bits"
    return f"a {type(value).__name__}"


def parse(data: bytes) -> Any:
    """The value that `data` spells.

    Raises:
        Invalid: not UTF-8, not JSON, a duplicate key, NaN or Infinity, nested too deep.
    """
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
    except RecursionError as exc:
        raise Invalid("JSON", expected="bounded nesting", got=note("nested too deep")) from exc
    except ValueError as exc:  # JSONDecodeError, UnicodeDecodeError, and an int of too many digits
        raise Invalid("JSON", expected="valid UTF-8 JSON", got=note(str(exc)[:120])) from exc


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise Invalid("JSON keys", expected="each once", got=note(f"{brief(twice)} twice"))
    return found


def _refuse_constant(text: str) -> NoReturn:
    raise Invalid("JSON number", expected="a finite number", got=note(text))


def check_plain(value: object, what: str, *, levels: int) -> None:
    """JSON gives `value` back unchanged: keys are texts, and it nests at most `levels` deep.

    Source of the bound: a reader's recursion depends on the stack it is called from; what one
    process could write another one must be able to read.
    """
    level: list[Any] = [value]
    for _ in range(levels):
        inner: list[Any] = []
        deeper = False
        for item in level:
            if isinstance(item, dict):
                if not all(isinstance(key, str) for key in item):
                    raise Invalid(f"keys in {what}", expected="texts", got=note("another type"))
                item = item.values()
            elif not isinstance(item, list | tuple):
                continue
            deeper = deeper or bool(item)
            if not _SCALARS.issuperset(map(type, item)):
                inner.extend(item)
        if not deeper:
            return
        level = inner
    raise Invalid(what, expected=f"at most {levels} levels of nesting", got=note("more"))


# -- typed access: each returns the value or raises Invalid ------------------------------------


def member(obj: dict[str, Any], key: str, kind: type) -> Any:
    """`obj[key]`, which must be there and of exactly the type `kind` (a bool is no int)."""
    value = obj.get(key)
    if type(value) is not kind:
        raise Invalid(key, expected=f"a JSON {kind.__name__}", got=value)
    return value


def bounded(value: object, what: str, low: int, high: int) -> int:
    """An int in low..high."""
    if type(value) is not int or not low <= value <= high:
        raise Invalid(what, expected=f"an int in {low}..{high}", got=value)
    return value


def is_name(value: object) -> bool:
    """Whether it is a text that every JSON reader accepts: no lone surrogates."""
    if type(value) is not str:
        return False
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError:
        return False
    return True


def row(value: object, what: str, length: int) -> list[Any]:
    """A list of exactly `length` items."""
    if type(value) is not list or len(value) != length:
        raise Invalid(what, expected=f"a list of {length}", got=value)
    return value
