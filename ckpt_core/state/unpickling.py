"""An unpickler that can call almost nothing, on what is harmless, as often as its bytes are worth.

It knows a short list of harmless constructors. Before it runs, every opcode is read without executing
anything, so that a few hostile bytes cannot make it allocate absurd amounts. Danger: an attribute of an
unpickled object may be anything, so no method is ever looked up on one.
"""

from __future__ import annotations

import importlib
import io
import pickle
import pickletools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from ckpt_core.state.building import CONSTRUCTORS, Constructor, Refused, check_call, put_state
from ckpt_core.state.keys import Keys, Work
from ckpt_core.state.leaf import dtypes

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
_NEW = frozenset(
    "argparse.Namespace uuid.UUID collections.OrderedDict builtins.object random.Random".split()
)
_FORBIDDEN = frozenset(
    "PERSID BINPERSID EXT1 EXT2 EXT4 INST OBJ NEXT_BUFFER READONLY_BUFFER".split()
)
_MEMO_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_LISTS = (list, deque)
_DICTS = (dict, OrderedDict, Counter, defaultdict)

_SHOWN = 200
_FREE_UNITS = 1_000_000
_UNITS_PER_BYTE = 4
_CALL_UNITS = 16
"""What a harmless call costs apart from its arguments; `building` adds to it."""


def read_harmless(data: bytes) -> Any:
    """The value of a pickle that anybody may have written.

    Raises:
        Refused: it would call something that is not on the list.
        TooMuchWork: it asks for more work than its length is worth.
        Exception: whatever else is wrong with it.
    """
    _scan(data)
    return _SafeUnpickler(data).load()


def _scan(data: bytes) -> None:
    """Read all opcodes; genops itself checks each claimed length against the data that is there."""
    memo_bound = len(data)
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in _FORBIDDEN:
            raise Refused(f"opcode {opcode.name}")
        if opcode.name in _MEMO_PUTS and int(argument or 0) > memo_bound:
            raise ValueError(f"memo index {argument} in {len(data)} bytes")


# The stubs leave out what the Python class has: `stack`, `append`, `load_build`.
_PythonUnpickler: Any = pickle._Unpickler


class _SafeUnpickler(_PythonUnpickler):  # type: ignore[misc]
    """The pure Python unpickler, where each way of calling something is checked."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._work = Work(_FREE_UNITS + _UNITS_PER_BYTE * len(data))
        self._containers: dict[int, tuple[Any, Keys]] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        full = f"{module}.{name}"
        made = CONSTRUCTORS.get(full)
        if made is not None:
            return made
        if module == "torch" and name in dtypes():
            return dtypes()[name]
        if full not in _CLASSES:
            raise Refused(full[:_SHOWN])
        return getattr(importlib.import_module(module), name)

    # -- calls -----------------------------------------------------------------------------------

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        if not isinstance(arguments, tuple):
            raise ValueError("arguments are not a tuple")
        self._work.spend(_CALL_UNITS)
        if isinstance(function, Constructor):
            self.stack[-1] = function.make(self._work, *arguments)
        elif check_call(function, arguments, self._work):
            self.stack[-1] = function(*arguments)
        else:
            raise Refused(_full_name(function))

    def load_newobj(self) -> None:
        arguments = self.stack.pop()
        cls = self.stack.pop()
        name = _full_name(cls)
        if not isinstance(cls, type) or name not in _NEW or arguments != ():
            raise Refused(f"{name}.__new__")
        self._work.spend(_CALL_UNITS)
        make: Any = cls.__new__
        self.append(make(cls))

    def load_newobj_ex(self) -> None:
        raise Refused("__newobj_ex__")

    def load_build(self) -> None:
        # Danger: on a class or function BUILD would change it for the whole process.
        state = self.stack.pop()
        if not put_state(self.stack[-1], state, self._work):
            raise Refused(f"BUILD on {_full_name(self.stack[-1])}")

    # -- containers ------------------------------------------------------------------------------

    def load_append(self) -> None:
        value = self.stack.pop()
        self._extend([value])

    def load_appends(self) -> None:
        self._extend(self.pop_mark())

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put([key, value])

    def load_setitems(self) -> None:
        self._put(self.pop_mark())

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._put(items)

    def load_additems(self) -> None:
        items, target = self.pop_mark(), self.stack[-1]
        if type(target) is not set:
            raise ValueError("items for what is no set")
        self._keys(target).add(items)
        target.update(items)

    def load_frozenset(self) -> None:
        items = self.pop_mark()
        Keys(self._work).add(items)
        self.append(frozenset(items))

    def _extend(self, items: Iterable[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in _LISTS:
            raise ValueError("items for what is no list")
        target.extend(items)

    def _put(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) not in _DICTS:
            raise ValueError("items for what is no dict")
        self._keys(target).add(items[::2])
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[key] = value

    def _keys(self, container: Any) -> Keys:
        """What is known of the keys of a container, which cannot go meanwhile."""
        return self._containers.setdefault(id(container), (container, Keys(self._work)))[1]

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_PythonUnpickler.dispatch)
    for _opcode, _method in (
        (pickle.REDUCE, load_reduce),
        (pickle.NEWOBJ, load_newobj),
        (pickle.NEWOBJ_EX, load_newobj_ex),
        (pickle.BUILD, load_build),
        (pickle.APPEND, load_append),
        (pickle.APPENDS, load_appends),
        (pickle.SETITEM, load_setitem),
        (pickle.SETITEMS, load_setitems),
        (pickle.DICT, load_dict),
        (pickle.ADDITEMS, load_additems),
        (pickle.FROZENSET, load_frozenset),
    ):
        dispatch[_opcode[0]] = _method


def _full_name(value: Any) -> str:
    if isinstance(value, Constructor):
        return value.name
    cls = value if isinstance(value, type) else type(value)
    return f"{cls.__module__}.{cls.__qualname__}"
