"""The kinds of containers, one row for each: whoever freezes, encodes, decodes, builds, fills, shows or
exports a state reads them here. Free of torch, as the commands are that only look at a step.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ckpt_core.state.nodes import Map, Record, Seq

FACTORIES: dict[str, type] = {
    cls.__name__: cls
    for cls in (list, dict, int, float, set, str, bool, tuple, OrderedDict, Counter, deque)
}
"""What a defaultdict may call to make a value, by its name in a skeleton."""


class Unnamed(Exception):
    """A container has something that no skeleton can name: it is pickled as a whole."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of container.

    Attributes:
        tag: its name in a skeleton, and that of its type.
        form: of its nodes: Seq, Map or Record.
        module: of its type; "" for records, which are of the user's types.
        loose: the kind that `torch.load(weights_only=True)` takes in its place; "" for none.
        ends: what stands around its items where they are shown.
        hashed: its items are keys: they are hashed, and have no order.
        homes: what is in it may have live memory of its own.
        extra: key of its node's JSON for what it has beside its items; "" for nothing.
        note: the extra of a value; None for none.
        take: the items of a value, if that does not give them itself.
        fits: whether items and extra, as nodes, can be of one.
        make: a new one of a list of items, or of a dict, and the extra; None: of its type.
    """

    tag: str
    form: type
    module: str = "builtins"
    loose: str = ""
    ends: str = ""
    hashed: bool = False
    homes: bool = False
    extra: str = ""
    note: Callable[[Any], Any] = lambda value: None
    take: Callable[[Any], Any] | None = None
    fits: Callable[[Any, Any], bool] = lambda items, extra: True
    make: Callable[[Any, Any], Any] | None = None

    @property
    def type(self) -> type:
        """Of its values."""
        found: type = getattr(import_module(self.module), self.tag)
        return found

    def build(self, items: Any, extra: Any) -> Any:
        """A new one.

        Raises:
            TypeError: of these items there can be none.
        """
        return self.type(items) if self.make is None else self.make(items, extra)


def _factory_name(value: defaultdict[Any, Any]) -> str | None:
    factory = value.default_factory
    name = getattr(factory, "__name__", "")
    if factory is not None and FACTORIES.get(name) is not factory:
        raise Unnamed
    return None if factory is None else name


def _is_factory(_: Any, extra: Any) -> bool:
    return extra is None or (type(extra) is str and extra in FACTORIES)


def _has_names(_: Any, extra: Any) -> bool:
    return extra is None or (isinstance(extra, Map) and all(type(key) is str for key in extra.keys))


def _has_room(items: Any, extra: Any) -> bool:
    return extra is None or (type(extra) is int and len(items) <= extra <= sys.maxsize)


def _are_sizes(items: Any, _: Any) -> bool:
    return all(type(item) is int and -(2**63) <= item < 2**63 for item in items)


def _ordered(items: dict[Any, Any], attributes: Any) -> OrderedDict[Any, Any]:
    made = OrderedDict(items)
    vars(made).update(attributes or {})
    return made


def _counter(items: dict[Any, Any], _: Any) -> Counter[Any]:
    made: Counter[Any] = Counter()
    dict.update(made, items)  # As they are: Counter would add them up.
    return made


_ROWS = (
    Kind("list", Seq, loose="list", ends="[]", homes=True),
    Kind("tuple", Seq, loose="tuple", ends="()", homes=True),
    Kind(
        "Size",
        Seq,
        "torch",
        loose="Size",
        ends="[]",
        take=lambda value: list(map(int, value)),  # NumPy's ints among them
        fits=_are_sizes,
    ),
    Kind("set", Seq, loose="set", ends="{}", hashed=True),
    Kind("frozenset", Seq, loose="set", ends="{}", hashed=True),
    Kind(
        "deque",
        Seq,
        "collections",
        loose="list",
        ends="[]",
        extra="maxlen",
        note=lambda value: value.maxlen,
        fits=_has_room,
        make=deque,
    ),
    Kind(
        "slice",
        Seq,
        ends="()",
        take=lambda value: (value.start, value.stop, value.step),
        fits=lambda items, _: len(items) == 3,
        make=lambda items, _: slice(*items),
    ),
    Kind("dict", Map, loose="dict"),
    Kind(
        "OrderedDict",
        Map,
        "collections",
        loose="OrderedDict",
        extra="attrs",
        note=lambda value: vars(value) or None,
        fits=_has_names,
        make=_ordered,
    ),
    Kind(
        "defaultdict",
        Map,
        "collections",
        loose="dict",
        extra="factory",
        note=_factory_name,
        fits=_is_factory,
        make=lambda items, name: defaultdict(FACTORIES[name] if name else None, items),
    ),
    Kind("Counter", Map, "collections", loose="Counter", make=_counter),
    Kind("dataclass", Record, "", loose="dict"),
    Kind("namedtuple", Record, "", loose="dict"),
)
KINDS: dict[str, Kind] = {kind.tag: kind for kind in _ROWS}
"""By tag."""
