"""Opaque values: pickled when they are saved, opened by an unpickler that can call almost nothing.

The safe unpickler knows a short list of harmless constructors. Before it runs, every opcode is read
without executing anything, so that a few hostile bytes cannot make it allocate absurd amounts.
"""

from __future__ import annotations

import importlib
import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any, ClassVar

from ckpt_core.errors import ConfigError, CorruptCheckpoint, UntrustedData
from ckpt_core.state.leaf import dtypes
from ckpt_core.state.nodes import Opaque

_PROTOCOL = 4
_CLASSES = frozenset(
    "builtins.complex builtins.set builtins.frozenset builtins.list builtins.dict builtins.tuple"
    " builtins.int builtins.float builtins.str builtins.bool builtins.bytes builtins.slice"
    " builtins.range builtins.object collections.OrderedDict collections.deque collections.Counter"
    " collections.defaultdict datetime.date datetime.datetime datetime.time datetime.timedelta"
    " datetime.timezone decimal.Decimal uuid.UUID pathlib.PosixPath pathlib.PurePosixPath"
    " pathlib.WindowsPath pathlib.PureWindowsPath random.Random types.SimpleNamespace"
    " argparse.Namespace numpy.ndarray numpy.dtype torch.Size torch.device torch.dtype"
    " numpy.random.bit_generator.SeedSequence"
    " numpy.random._pcg64.PCG64 numpy.random._pcg64.PCG64DXSM numpy.random._mt19937.MT19937"
    " numpy.random._philox.Philox numpy.random._sfc64.SFC64".split()
)
_CALLABLE = frozenset(
    "builtins.complex builtins.set builtins.frozenset builtins.slice builtins.range"
    " collections.OrderedDict collections.deque collections.Counter collections.defaultdict"
    " datetime.date datetime.datetime datetime.time datetime.timedelta datetime.timezone"
    " decimal.Decimal pathlib.PosixPath pathlib.PurePosixPath pathlib.WindowsPath"
    " pathlib.PureWindowsPath random.Random types.SimpleNamespace torch.Size torch.device".split()
)
_NEW = frozenset(
    "argparse.Namespace uuid.UUID collections.OrderedDict builtins.object random.Random".split()
)
_FACTORIES = frozenset({list, dict, int, float, set, str, bool, tuple})
_FORBIDDEN = frozenset("PERSID BINPERSID EXT1 EXT2 EXT4 INST OBJ NEXT_BUFFER".split())
_MEMO_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})


def pickle_opaque(value: Any, where: str) -> Opaque:
    """Opaque node of a value, pickled at once.

    Raises:
        ConfigError: it cannot be pickled; names `where` and the type.
    """
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    try:
        return Opaque(name, pickle.dumps(value, protocol=_PROTOCOL))
    except Exception as exc:
        raise ConfigError(
            f"{where} is a {name}, which cannot be stored ({type(exc).__name__}: {exc}): leave it"
            " out of the state, or give its class state_dict() and load_state_dict()"
        ) from exc


def open_opaque(node: Opaque, *, trusted: bool, path: str) -> Any:
    """The value of an opaque node; `path` names the checkpoint in errors.

    Raises:
        UntrustedData: it needs a global outside the list, and `trusted` is False.
        CorruptCheckpoint: the bytes are no pickle.
    """
    try:
        if trusted:
            return pickle.loads(node.data)
        _scan(node.data)
        return _SafeUnpickler(node.data).load()
    except _Refused as exc:
        raise UntrustedData(
            f"the checkpoint holds a {node.type_name}, and loading it would call {exc}: pass"
            " trusted=True if you know who wrote this checkpoint; nothing was run",
            type_name=str(exc),
            path=path,
        ) from exc
    except Exception as exc:
        raise CorruptCheckpoint(
            f"the pickled {node.type_name} cannot be read: {type(exc).__name__}: {exc}", path=path
        ) from exc


class _Refused(Exception):
    """A global that only trusted=True may use; the text is its name."""


def _scan(data: bytes) -> None:
    """Read all opcodes; genops itself checks each claimed length against the data that is there."""
    memo_bound = len(data)
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in _FORBIDDEN:
            raise _Refused(f"opcode {opcode.name}")
        if opcode.name in _MEMO_PUTS and int(argument or 0) > memo_bound:
            raise ValueError(f"memo index {argument} in {len(data)} bytes")


# The stubs leave out what the Python class has: `stack`, `append`, `load_build`.
_PythonUnpickler: Any = pickle._Unpickler


class _SafeUnpickler(_PythonUnpickler):  # type: ignore[misc]
    """The pure Python unpickler, where each way of calling something is checked."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))

    def find_class(self, module: str, name: str, /) -> Any:
        full = f"{module}.{name}"
        made = _CONSTRUCTORS.get(full)
        if made is not None:
            return made
        if module == "torch" and name in dtypes():
            return dtypes()[name]
        if full not in _CLASSES:
            raise _Refused(full)
        return getattr(importlib.import_module(module), name)

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        self.stack[-1] = _call(function, arguments)

    def load_newobj(self) -> None:
        arguments = self.stack.pop()
        cls = self.stack.pop()
        name = _full_name(cls)
        if name not in _NEW or arguments:
            raise _Refused(f"{name}.__new__")
        self.append(cls.__new__(cls))

    def load_newobj_ex(self) -> None:
        raise _Refused("__newobj_ex__")

    def load_build(self) -> None:
        # Danger: on a class or function BUILD would change it for the whole process.
        target = self.stack[-2]
        if isinstance(target, type) or callable(target) or type(target).__name__ == "module":
            raise _Refused(f"BUILD on {_full_name(target)}")
        if type(target).__module__.partition(".")[0] == "numpy":
            self.stack[-1] = _checked_numpy_state(target, self.stack[-1])
        super().load_build()

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_PythonUnpickler.dispatch)
    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.NEWOBJ_EX[0]] = load_newobj_ex
    dispatch[pickle.BUILD[0]] = load_build


def _full_name(value: Any) -> str:
    if isinstance(value, _Constructor):
        return value.name
    module = getattr(value, "__module__", None) or type(value).__module__
    return f"{module}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _call(function: Any, arguments: Any) -> Any:
    if not isinstance(arguments, tuple):
        raise ValueError("arguments are not a tuple")
    if isinstance(function, _Constructor):
        return function.make(*arguments)
    name = _full_name(function)
    if name not in _CALLABLE and name.replace("_decimal", "decimal") not in _CALLABLE:
        raise _Refused(name)
    if any(isinstance(argument, range) for argument in arguments):
        raise ValueError("a range of any length would be spelled out")
    factory = arguments[0] if name == "collections.defaultdict" and arguments else None
    if factory is not None and factory not in _FACTORIES:
        raise _Refused(f"collections.defaultdict({_full_name(factory)})")
    return function(*arguments)


class _Constructor:
    """Stands for a global; `make` does what the global would, after checking its arguments."""

    def __init__(self, name: str, make: Callable[..., Any]) -> None:
        self.name = name
        self.make = make

    def __call__(self, *_: object) -> Any:
        raise _Refused(self.name)


def _bytearray(data: Any = b"", *rest: Any) -> bytearray:
    if type(data) is not bytes or rest:
        raise ValueError("a bytearray is made of bytes only")
    return bytearray(data)


def _fraction(numerator: Any, denominator: Any = 1) -> Any:
    from fractions import Fraction

    if type(numerator) is not int or type(denominator) is not int:
        raise ValueError("a fraction is made of two ints")
    return Fraction(numerator, denominator)


def _array(cls: Any, shape: Any, _: Any) -> Any:
    import numpy as np

    # The real one would allocate whatever shape it is given; the true shape comes with the state.
    if cls is not np.ndarray or shape != (0,):
        raise ValueError("unexpected array")
    return np.ndarray((0,), np.int8)


def _dtype(text: Any, *_: Any) -> Any:
    import numpy as np

    if not isinstance(text, str) or len(text) > 32:
        raise ValueError("unexpected dtype")
    return np.dtype(text, False, True)


def _scalar(dtype: Any, data: Any) -> Any:
    import numpy as np

    if not isinstance(dtype, np.dtype) or dtype.hasobject or type(data) is not bytes:
        raise ValueError("unexpected scalar")
    if len(data) != dtype.itemsize:
        raise ValueError("scalar of another size")
    return np.frombuffer(data, dtype)[0]


def _bit_generator(kind: Any) -> Any:
    if isinstance(kind, str) and kind in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"):
        from numpy import random

        return getattr(random, kind)(0)
    if not isinstance(kind, type) or not _full_name(kind).startswith("numpy.random._"):
        raise ValueError("unexpected bit generator")
    return kind(0)


def _generator(bits: Any, *_: Any) -> Any:
    from numpy import random

    if not isinstance(bits, random.BitGenerator):
        raise ValueError("unexpected bit generator")
    return random.Generator(bits)


def _random_state(bits: Any, *_: Any) -> Any:
    from numpy import random

    if not isinstance(bits, random.BitGenerator):
        raise ValueError("unexpected bit generator")
    return random.RandomState(bits)


def _seed_sequence(cls: Any, *_: Any) -> Any:
    from numpy.random import SeedSequence

    if cls is not SeedSequence:
        raise ValueError("unexpected seed sequence")
    module: Any = importlib.import_module("numpy.random.bit_generator")
    return module.__pyx_unpickle_SeedSequence(cls, *_)


def _checked_numpy_state(target: Any, state: Any) -> Any:
    import math

    import numpy as np

    if isinstance(target, np.dtype) and any(part is not None for part in state[2:5]):
        raise ValueError("unexpected dtype state")
    if isinstance(target, np.ndarray):
        _, shape, dtype, _, content = state
        sizes = [int(size) for size in shape]
        count = math.prod(sizes)
        held = len(content) if dtype.hasobject else len(content) // max(dtype.itemsize, 1)
        if min(sizes, default=0) < 0 or count != held or (not dtype.itemsize and count > 2**20):
            raise ValueError("array state of another size")
    return state


_CONSTRUCTORS: dict[str, _Constructor] = {
    name: _Constructor(name, make)
    for names, make in (
        ("builtins.bytearray", _bytearray),
        ("fractions.Fraction", _fraction),
        ("numpy._core.multiarray._reconstruct numpy.core.multiarray._reconstruct", _array),
        ("numpy._core.multiarray.scalar numpy.core.multiarray.scalar", _scalar),
        ("numpy.dtype", _dtype),
        ("numpy.random._pickle.__bit_generator_ctor", _bit_generator),
        ("numpy.random._pickle.__generator_ctor", _generator),
        ("numpy.random._pickle.__randomstate_ctor", _random_state),
        ("numpy.random.bit_generator.__pyx_unpickle_SeedSequence", _seed_sequence),
    )
    for name in names.split()
}
