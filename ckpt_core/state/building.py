"""What the safe unpickler may call, and which states it may put into what it made.

One row for each: the arguments are what an honest pickle gives, and nothing else.
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import importlib
import pathlib
import random
import re
import types
import uuid
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch

from ckpt_core.state.generators import (
    check_bit_generator,
    check_numpy,
    check_python,
    check_seed_sequence,
    torch_generator,
)
from ckpt_core.state.keys import Keys, TooMuchWork, Work
from ckpt_core.state.kinds import FACTORIES

_MOST_INT_BITS = 2**16
"""Of an int in a call: division and gcd take the square of it."""

_MOST_ITEMS = 2**20
_DTYPE_TEXT = re.compile(r"[?a-zA-Z]\d{0,9}\Z")
_GENERATOR_UNITS = 4096
_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


class Refused(Exception):
    """A global that only trusted=True may use; the text is its name."""


# -- arguments: each check raises ValueError -----------------------------------------------------


def _plain(arguments: tuple[Any, ...], work: Work) -> None:
    """Numbers, texts and what they make; the length of a text is what it costs."""
    for argument in arguments:
        if isinstance(argument, int) and argument.bit_length() > _MOST_INT_BITS:
            raise TooMuchWork("an int of too many digits")
        if isinstance(argument, str | bytes):
            work.spend(len(argument))
        elif not isinstance(argument, _PLAIN_TYPES):
            raise ValueError("arguments of another kind")


_PLAIN_TYPES = (int, float, str, bytes, type(None), dt.timedelta, dt.timezone)


def _nothing(arguments: tuple[Any, ...], work: Work) -> None:
    if arguments:
        raise ValueError("arguments where there are none")


def _anything(arguments: tuple[Any, ...], work: Work) -> None:
    work.spend(len(arguments))


def _members(arguments: tuple[Any, ...], work: Work) -> None:
    _items(arguments[:1], work)
    if len(arguments) > 1:
        raise ValueError("more arguments than a set has")
    for argument in arguments:
        Keys(work).add(argument)


def _items(arguments: tuple[Any, ...], work: Work) -> None:
    for argument in arguments:
        if type(argument) not in (list, tuple):
            raise ValueError("items that are no list")
        work.spend(len(argument))


def _deque(arguments: tuple[Any, ...], work: Work) -> None:
    _items(arguments[:1], work)
    _plain(arguments[1:], work)


def _counts(arguments: tuple[Any, ...], work: Work) -> None:
    for argument in arguments:
        if type(argument) is not dict:
            raise ValueError("counts that are no dict")
        work.spend(len(argument))


def _factory(arguments: tuple[Any, ...], work: Work) -> None:
    if len(arguments) > 1:
        raise ValueError("a defaultdict of more than its factory")
    for one in arguments:
        if one is not None and one not in FACTORIES.values():
            raise Refused(
                f"{one.__module__}.{one.__qualname__}" if isinstance(one, type) else "a factory"
            )


_PATHS = (
    pathlib.PosixPath,
    pathlib.PurePosixPath,
    pathlib.WindowsPath,
    pathlib.PureWindowsPath,
)
_DATES = (dt.date, dt.datetime, dt.time, dt.timedelta, dt.timezone)
_CALLABLE: dict[Any, Callable[[tuple[Any, ...], Work], None]] = {
    **dict.fromkeys((complex, range, decimal.Decimal, torch.device, *_PATHS, *_DATES), _plain),
    set: _members,
    frozenset: _members,
    slice: _anything,
    collections.deque: _deque,
    collections.Counter: _counts,
    collections.defaultdict: _factory,
    torch.Size: _items,
    **dict.fromkeys((collections.OrderedDict, random.Random, types.SimpleNamespace), _nothing),
}


def check_call(function: Any, arguments: tuple[Any, ...], work: Work) -> bool:
    """Whether a class may be called at all; counts the work.

    Raises:
        ValueError: it may, but not with these arguments.
        Refused: these arguments would be called.
    """
    check = _CALLABLE.get(function) if isinstance(function, type) else None
    if check is not None:
        check(arguments, work)
    return check is not None


# -- constructors that stand for others ------------------------------------------------------------


class Constructor:
    """Stands for a global; `make` does what the global would, after checking its arguments."""

    def __init__(self, name: str, make: Callable[..., Any]) -> None:
        self.name = name
        self.make = make


def _bytearray(work: Work, data: Any = b"", *rest: Any) -> bytearray:
    if type(data) is not bytes or rest:
        raise ValueError("a bytearray is made of bytes only")
    work.spend(len(data))
    return bytearray(data)


def _fraction(work: Work, numerator: Any, denominator: Any = 1) -> Any:
    if type(numerator) is not int or type(denominator) is not int:
        raise ValueError("a fraction is made of two ints")
    _plain((numerator, denominator), work)
    work.spend(numerator.bit_length())
    return Fraction(numerator, denominator)


def _array(_: Work, cls: Any, shape: Any, *rest: Any) -> Any:
    import numpy as np

    # The real one would allocate whatever shape it is given; the true shape comes with the state.
    if cls is not np.ndarray or shape != (0,) or len(rest) != 1:
        raise ValueError("unexpected array")
    return np.ndarray((0,), np.int8)


def _dtype(_: Work, text: Any, *rest: Any) -> Any:
    import numpy as np

    if not isinstance(text, str) or not _DTYPE_TEXT.match(text) or len(rest) > 2:
        raise ValueError("unexpected dtype")
    return np.dtype(text, False, True)


def _scalar(work: Work, dtype: Any, data: Any) -> Any:
    import numpy as np

    if not isinstance(dtype, np.dtype) or dtype.hasobject or type(data) is not bytes:
        raise ValueError("unexpected scalar")
    if len(data) != dtype.itemsize:
        raise ValueError("scalar of another size")
    work.spend(len(data))
    return np.frombuffer(data, dtype)[0]


def _bit_generator(work: Work, kind: Any) -> Any:
    from numpy import random as numpy_random

    known = {name: getattr(numpy_random, name) for name in _BIT_GENERATORS}
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
    if name not in known or (kind is not name and kind is not known[name]):
        raise ValueError("unexpected bit generator")
    work.spend(_GENERATOR_UNITS)
    return known[name](0)


def _wrapped(kind: str) -> Callable[..., Any]:
    def make(work: Work, bits: Any, *rest: Any) -> Any:
        from numpy import random as numpy_random

        if isinstance(bits, str):  # NumPy 1 names it; its state follows with that of the whole
            bits = _bit_generator(work, bits)
        if not isinstance(bits, numpy_random.BitGenerator):
            raise ValueError("unexpected bit generator")
        return getattr(numpy_random, kind)(bits)

    return make


def _torch_generator(work: Work, device: Any, state: Any) -> Any:
    work.spend(_GENERATOR_UNITS + len(state))
    return torch_generator(device, state)


def _seed_sequence(_: Work, cls: Any, checksum: Any, state: Any = None) -> Any:
    from numpy.random import SeedSequence

    if cls is not SeedSequence or type(checksum) is not int or state is not None:
        raise ValueError("unexpected seed sequence")
    module: Any = importlib.import_module("numpy.random.bit_generator")
    return module.__pyx_unpickle_SeedSequence(cls, checksum, None)


CONSTRUCTORS: dict[str, Constructor] = {
    name: Constructor(name, make)
    for names, make in (
        ("builtins.bytearray", _bytearray),
        ("fractions.Fraction", _fraction),
        ("numpy._core.multiarray._reconstruct numpy.core.multiarray._reconstruct", _array),
        ("numpy._core.multiarray.scalar numpy.core.multiarray.scalar", _scalar),
        ("numpy.dtype", _dtype),
        ("numpy.random._pickle.__bit_generator_ctor", _bit_generator),
        ("numpy.random._pickle.__generator_ctor", _wrapped("Generator")),
        ("numpy.random._pickle.__randomstate_ctor", _wrapped("RandomState")),
        ("ckpt_core.state.generators.torch_generator", _torch_generator),
        ("numpy.random.bit_generator.__pyx_unpickle_SeedSequence", _seed_sequence),
    )
    for name in names.split()
}

# -- states: each check raises ValueError ----------------------------------------------------------


def put_state(target: Any, state: Any, work: Work) -> bool:
    """Give an object the state that its pickle holds; False for objects that take none.

    Raises:
        ValueError: no state of such an object.
    """
    put = _STATES.get(type(target))
    if put is None and type(target).__module__.partition(".")[0] == "numpy":
        put = _numpy_states().get(type(target))
    if put is None:
        return False
    work.spend(len(state) if isinstance(state, dict | tuple | list) else 1)
    put(target, state, work)
    return True


def _put_attributes(target: Any, state: Any, work: Work) -> None:
    if type(state) is not dict or not all(type(name) is str for name in state):
        raise ValueError("attributes of another form")
    vars(target).update(state)


def _put_uuid(target: Any, state: Any, work: Work) -> None:
    number = state.get("int") if type(state) is dict else None
    if type(number) is not int or not 0 <= number < 2**128:
        raise ValueError("no UUID")
    safe = state.get("is_safe")
    target.__setstate__({"int": number} | ({} if safe is None else {"is_safe": int(safe)}))


def _put_random(target: Any, state: Any, work: Work) -> None:
    check_python(state)
    target.setstate(state)


_STATES: dict[type, Callable[[Any, Any, Work], None]] = {
    argparse.Namespace: _put_attributes,
    types.SimpleNamespace: _put_attributes,
    collections.OrderedDict: _put_attributes,
    uuid.UUID: _put_uuid,
    random.Random: _put_random,
}


def _numpy_states() -> dict[type, Callable[[Any, Any, Work], None]]:
    import numpy as np
    from numpy import random as numpy_random

    generators = [getattr(numpy_random, name) for name in _BIT_GENERATORS]
    dtype_classes = {type(np.dtype(text)) for text in "? b B h H i I l L q Q e f d g F D G".split()}
    dtype_classes |= {type(np.dtype(text)) for text in "O S U V M m".split()}
    return {
        np.ndarray: _put_array,
        **dict.fromkeys(dtype_classes, _put_dtype),
        **dict.fromkeys(generators, _put_bits),
        numpy_random.RandomState: _put_random_state,
        numpy_random.Generator: _put_generator,
        numpy_random.SeedSequence: _put_seed_sequence,
    }


def _put_array(target: Any, state: Any, work: Work) -> None:
    import math

    import numpy as np

    if type(state) is not tuple or len(state) != 5:
        raise ValueError("array state of another form")
    _, shape, dtype, _, content = state
    if type(shape) is not tuple or len(shape) > 64 or not isinstance(dtype, np.dtype):
        raise ValueError("array state of another form")
    if any(type(size) is not int or not 0 <= size < 2**62 for size in shape):
        raise ValueError("array state of another size")
    if type(content) is not (list if dtype.hasobject else bytes):
        raise ValueError("array state of another form")
    count, unit = math.prod(shape), 1 if dtype.hasobject else dtype.itemsize
    if count * unit != len(content) or (not unit and count > _MOST_ITEMS):
        raise ValueError("array state of another size")
    work.spend(len(content) // (1 if dtype.hasobject else 8) + (0 if unit else count))
    target.__setstate__(state)


def _put_dtype(target: Any, state: Any, work: Work) -> None:
    if type(state) is not tuple or len(state) not in (8, 9) or target.fields is not None:
        raise ValueError("unexpected dtype state")
    version, order, *parts, size, alignment, flags = state[:8]
    if any(part is not None for part in parts):
        raise Refused("numpy.dtype of fields")
    # Danger: with the flags of another dtype, raw bytes would be taken for objects.
    known = version in (3, 4) and order in ("<", ">", "=", "|") and type(flags) is int
    if not known or flags != target.flags:
        raise ValueError("unexpected dtype state")
    if type(size) is not int or not -1 <= size < 2**31 or type(alignment) is not int:
        raise ValueError("unexpected dtype state")
    if target.kind not in "SUV" and (size, alignment) != (-1, -1):
        raise ValueError("unexpected dtype state")
    if target.kind in "SUV" and (alignment not in (1, 4) or size % alignment):
        raise ValueError("unexpected dtype state")
    if (target.kind in "Mm") != (len(state) == 9):
        raise ValueError("unexpected dtype state")
    if len(state) == 9:
        _check_unit(state[8])
    target.__setstate__(state)


def _check_unit(metadata: Any) -> None:
    if type(metadata) is not tuple or len(metadata) != 2 or metadata[0] not in (None, {}):
        raise ValueError("unexpected unit of time")
    unit = metadata[1]
    if type(unit) is not tuple or len(unit) != 4 or type(unit[0]) not in (bytes, str):
        raise ValueError("unexpected unit of time")
    # NumPy divides by them.
    if any(type(number) is not int or not 0 < number < 2**31 for number in unit[1:]):
        raise ValueError("unexpected unit of time")


def _put_bits(target: Any, state: Any, work: Work) -> None:
    from numpy.random import SeedSequence

    work.spend(_GENERATOR_UNITS)
    values, *seed = state if type(state) is tuple else (state,)
    check_bit_generator(values)
    # None: `RandomState(1)`, which is seeded as in NumPy 1.16.
    if len(seed) > 1 or any(type(one) not in (SeedSequence, type(None)) for one in seed):
        raise ValueError("unexpected state of a bit generator")
    target.__setstate__(state)


def _put_random_state(target: Any, state: Any, work: Work) -> None:
    work.spend(_GENERATOR_UNITS)
    check_numpy(state)
    target.set_state(state)


def _put_generator(target: Any, state: Any, work: Work) -> None:
    work.spend(_GENERATOR_UNITS)
    if state is not None:
        check_bit_generator(state)
        target.bit_generator.state = state


def _put_seed_sequence(target: Any, state: Any, work: Work) -> None:
    check_seed_sequence(state)
    target.__setstate__(state)
