"""Random number generators that a state holds, and their states, checked before native code gets them.

NumPy and torch take positions as they come and index memory with them at the next draw.
Each check raises `ValueError`.
"""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ckpt_core.system.devices import Devices

_WORD = 2**32
_MT_WORDS = 624
_TORCH_BYTES = 5056
_TORCH_HEAD = struct.Struct("<QiiQ")
"""Seed, words left until the next twist, whether it was seeded, next word; then the words."""


NO_DEVICES = frozenset({"python", "torch", "numpy"})
"""Keys of an `RngState`; all others are types of devices, each with the states of its devices in order, and
what `Devices.generators` says besides, in the same form."""


def is_generator(live: Any) -> bool:
    """Whether it is a generator of Python's, torch's or NumPy's, which a restore puts back in place."""
    return isinstance(live, random.Random | torch.Generator) or _is_numpy(live)


def _is_numpy(live: Any) -> bool:
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return False
    return isinstance(live, numpy.Generator | numpy.RandomState | numpy.BitGenerator)


def are_alike(live: Any, saved: Any) -> bool:
    """Whether one generator takes the state of the other."""
    if isinstance(live, torch.Generator):
        if isinstance(saved, Tensor):  # of a device that was not in use when it was read
            return live.device.type != "cpu" and saved.dtype == torch.uint8 and saved.dim() == 1
        return isinstance(saved, torch.Generator) and saved.device.type == live.device.type
    if type(live) is not type(saved):
        return False
    return _kind(live) is _kind(saved)


def _kind(generator: Any) -> type:
    """The class of NumPy's bit generator below, or of the generator itself."""
    bits = getattr(generator, "bit_generator", getattr(generator, "_bit_generator", generator))
    return type(bits)


def put_generator(live: Any, saved: Any) -> None:
    """Give a generator the state of another one that is alike."""
    if isinstance(live, torch.Generator):
        live.set_state(saved if isinstance(saved, Tensor) else saved.get_state())
    elif isinstance(live, random.Random):
        live.setstate(saved.getstate())
    elif hasattr(live, "set_state"):
        live.set_state(saved.get_state(legacy=False))
    else:
        bits, was = (getattr(one, "bit_generator", one) for one in (live, saved))
        bits.state = was.state
        _put_seed(bits, was)


def _put_seed(bits: Any, was: Any) -> None:
    """Also what `spawn` makes children of, and how many it has made: else the same ones come again."""
    from numpy.random import SeedSequence

    # Older releases of NumPy pickle none, and what was read has a fresh one.
    kept = any(type(part) is tuple for part in was.__reduce__()[2:3])
    if kept and {type(bits.seed_seq), type(was.seed_seq)} == {SeedSequence}:
        bits.seed_seq.__setstate__(was.seed_seq.__reduce__()[2])


def shown_generator(value: Any) -> str:
    """A generator in words, for messages."""
    where = f" of {value.device.type}" if isinstance(value, torch.Generator) else ""
    return f"{type(value).__module__}.{type(value).__name__}{where}"


def reduce_torch(generator: torch.Generator) -> tuple[Any, ...]:
    """How torch's generator is pickled: as bytes, where torch itself has a tensor pickled that only
    torch.load opens."""
    return torch_generator, (str(generator.device), bytes(generator.get_state().tolist()))


def torch_generator(device: str, state: bytes) -> torch.Generator | Tensor:
    """What `reduce_torch` has taken apart.

    Returns:
        The state itself, as a tensor, of a device that this process does not use: to read a checkpoint
        opens none.

    Raises:
        ValueError: no such device, or no such state.
    """
    if type(device) is not str or type(state) is not bytes:
        raise ValueError("a generator of torch's of another form")
    values = torch.frombuffer(bytearray(state), dtype=torch.uint8) if state else torch.empty(0)
    check_torch(values)
    try:
        place = torch.device(device)
    except RuntimeError as exc:
        raise ValueError("a generator of an unknown device") from exc
    devices = Devices()
    if place.type != "cpu" and (place.type != devices.kind() or not devices.in_use()):
        return values
    try:
        made = torch.Generator(place)
        made.set_state(values)
    except (RuntimeError, TypeError) as exc:
        raise ValueError("a state of torch's generator of another form") from exc
    return made


def check_states(states: Any) -> None:
    """What an `RngState` holds."""
    if not isinstance(states, Mapping) or not {"python", "torch"} <= states.keys():
        raise ValueError("states of generators of another form")
    check_python(states["python"])
    check_torch(states["torch"])
    if "numpy" in states:
        check_numpy(states["numpy"])
    for kind in states.keys() - NO_DEVICES:
        for state in _items(states[kind], list, None, "states of generators of devices"):
            _check_bytes(state)


def check_python(state: Any) -> None:
    """A state of `random`: Python itself expands older versions of it, of any length."""
    version, words, gauss = _items(state, tuple, 3, "a state of Python's generator")
    if version != 3 or not (gauss is None or type(gauss) is float):
        raise ValueError("a state of Python's generator of another form")
    _items(words, tuple, _MT_WORDS + 1, "a state of Python's generator")
    for word in words:
        _int(word, _WORD - 1, "a word of Python's generator")
    _int(words[-1], _MT_WORDS, "the position of Python's generator")


def check_torch(state: Any) -> None:
    """A state of torch's CPU generator."""
    _check_bytes(state)
    if state.numel() != _TORCH_BYTES:
        return  # None of ours to judge: torch looks at the length first.
    _, left, seeded, following = _TORCH_HEAD.unpack_from(bytes(state[: _TORCH_HEAD.size].tolist()))
    if seeded != 1 or not 0 < left <= _MT_WORDS or following + left > _MT_WORDS + 1:
        raise ValueError("a position of torch's generator that is out of range")


def check_numpy(state: Any) -> None:
    """A state of NumPy's global generator or of a `RandomState`: a tuple or a dict."""
    if isinstance(state, dict):
        if "gauss" in state:
            _int(state.get("has_gauss"), 1, "has_gauss")
            _float(state["gauss"])
        check_bit_generator(state)
        return
    name, key, position, has_gauss, gauss = _items(state, tuple, 5, "a state of NumPy's generator")
    if name != "MT19937":
        raise ValueError("a state of NumPy's generator of an unknown kind")
    _check_mt({"key": key, "pos": position})
    _int(has_gauss, 1, "has_gauss")
    _float(gauss)


def check_bit_generator(state: Any) -> None:
    """What the `state` of one of NumPy's bit generators takes."""
    name = state.get("bit_generator") if isinstance(state, dict) else None
    check = _BIT_GENERATORS.get(name) if isinstance(name, str) else None
    if check is None or not isinstance(state.get("state"), dict):
        raise ValueError("a state of NumPy's generator of an unknown kind")
    check(state["state"])
    if name != "MT19937":
        _int(state.get("has_uint32"), 1, "has_uint32")
        _int(state.get("uinteger"), _WORD - 1, "uinteger")
    if name == "Philox":
        _array(state.get("buffer"), 4, "uint64")
        _int(state.get("buffer_pos"), 4, "the position of NumPy's generator")


def check_seed_sequence(state: Any) -> None:
    """What unpickling puts into NumPy's `SeedSequence`."""
    _, spawned, pool, size, key = _items(state, tuple, 5, "a seed sequence")
    _array(pool, _int(size, 64, "the size of a pool"), "uint32")
    _int(spawned, _WORD - 1, "the number of spawned children")
    for number in _items(key, tuple, None, "a spawn key"):
        _int(number, _WORD - 1, "a spawn key")


def _check_mt(state: dict[str, Any]) -> None:
    _array(state.get("key"), _MT_WORDS, "uint32")
    _int(state.get("pos"), _MT_WORDS, "the position of NumPy's generator")


def _check_pcg(state: dict[str, Any]) -> None:
    for part in ("state", "inc"):
        _int(state.get(part), 2**128 - 1, "a word of NumPy's generator")


def _check_philox(state: dict[str, Any]) -> None:
    _array(state.get("counter"), 4, "uint64")
    _array(state.get("key"), 2, "uint64")


def _check_sfc(state: dict[str, Any]) -> None:
    _array(state.get("state"), 4, "uint64")


_BIT_GENERATORS: dict[str, Callable[[dict[str, Any]], None]] = {
    "MT19937": _check_mt,
    "PCG64": _check_pcg,
    "PCG64DXSM": _check_pcg,
    "Philox": _check_philox,
    "SFC64": _check_sfc,
}


def _items(value: Any, kind: type, count: int | None, what: str) -> Any:
    items: Any = value
    if type(value) is not kind or count not in (None, len(items)):
        raise ValueError(f"{what} of another form")
    return items


def _int(value: Any, most: int, what: str) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{what} that is out of range")
    return value


def _float(value: Any) -> None:
    if type(value) is not float and value != 0:
        raise ValueError("a gauss that is no float")


def _array(value: Any, count: int, dtype: str) -> None:
    import numpy as np

    if type(value) is not np.ndarray or value.shape != (count,) or value.dtype.name != dtype:
        raise ValueError("words of NumPy's generator of another form")


def _check_bytes(state: Any) -> None:
    # A state is taken by its address.
    if not isinstance(state, Tensor) or str(state.dtype) != "torch.uint8" or state.dim() != 1:
        raise ValueError("a state of torch's generator of another form")
    if state.device.type != "cpu" or not state.is_contiguous():
        raise ValueError("a state of torch's generator of another form")
