"""Containers of tensors alone, of which a state has most of its leaves: taken as a whole, and made once.

While a walk meets the same ones as the last walk did, their names and nodes are those of the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from ckpt_core.state.nodes import Map, Node, Ref


@dataclass(frozen=True, slots=True)
class Run:
    """A container of tensors alone, or of dicts of them.

    Attributes:
        prefix: of their names.
        keys: what follows it; of dicts, with the keys of each.
        first: number of the first one.
        names: of each.
        refs: nodes of what is in it.
    """

    prefix: str
    keys: Sequence[object]
    first: int
    names: list[str]
    refs: list[Node]

    def is_of(self, prefix: str, keys: Sequence[object], first: int) -> bool:
        """Whether it is the same one, met at the same place."""
        return self.first == first and self.prefix == prefix and self.keys == keys


def run_of(before: Run | None, prefix: str, keys: Sequence[object], first: int, number: int) -> Run:
    """Of so many tensors; `before` is what the last walk met here."""
    if before is not None and before.is_of(prefix, keys, first):
        return before
    refs: list[Node] = list(map(Ref, range(first, first + number)))
    return Run(prefix, keys, first, [f"{prefix}{key}" for key in keys], refs)


def rows_of(
    before: Run | None,
    prefix: str,
    names: Sequence[object],
    first: int,
    rows: Sequence[dict[Any, Any]],
) -> Run | None:
    """Of dicts of tensors alone, such as an optimizer has for each parameter; none of them is empty.

    None: there are keys that are no texts.
    """
    found = list(map(tuple, rows))
    keys = [*names, *found]
    if before is not None and before.is_of(prefix, keys, first):
        return before
    if not all(set(map(type, row)) == {str} for row in set(found)):
        return None
    refs = map(Ref, count(first))
    nodes: list[Node] = [Map("dict", row, list(islice(refs, len(row)))) for row in found]
    made = [f"{prefix}{name}.{key}" for name, row in zip(names, found, strict=True) for key in row]
    return Run(prefix, keys, first, made, nodes)
