"""Which nodes keep parity of one another, and who keeps which of whom. Pure.

Of each stripe of a group k nodes hold a block of data, one each, and m nodes one of parity; which these are
goes round, so that all keep, read and send the same.

    stripe   node 0  node 1  node 2        (2+1)
    0        parity  a       b
    1        a       parity  b
    2        a       b       parity
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from ckpt_core.options import parity_shape


@dataclass(frozen=True, slots=True)
class Shape:
    """k nodes' worth of data and m of parity, in groups of k+m nodes."""

    k: int
    m: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """As users write it, "4+1". Raises ValueError."""
        found = parity_shape(text)
        if found is None:
            raise ValueError(text)
        return cls(*found)

    @property
    def nodes(self) -> int:
        """Of a group."""
        return self.k + self.m

    @property
    def stripes(self) -> range:
        """Of a group."""
        return range(self.nodes)

    def parity(self, stripe: int) -> list[int]:
        """Numbers in the group of the nodes with the parity of a stripe, the first parity first."""
        return [(stripe + number) % self.nodes for number in range(self.m)]

    def data(self, stripe: int) -> list[int]:
        """Numbers of those with the data, in order."""
        kept = self.parity(stripe)
        return [number for number in range(self.nodes) if number not in kept]

    def kept(self, node: int) -> list[int]:
        """The stripes whose parity a node keeps."""
        return [stripe for stripe in self.stripes if node in self.parity(stripe)]

    def covering(self, node: int) -> list[int]:
        """The stripes that have the blocks of a node, the first block first."""
        return [stripe for stripe in self.stripes if node not in self.parity(stripe)]


class Placed(Protocol):
    """A node of a job."""

    @property
    def rank(self) -> int: ...

    @property
    def domain(self) -> str | None: ...


_Node = TypeVar("_Node", bound=Placed)


def grouped(nodes: Sequence[_Node], shape: Shape) -> list[list[_Node]]:
    """The nodes in groups, each in the order of ranks.

    Nodes are put in order by domain and dealt out, so that as few as can be of a domain are in one group.
    """
    count = len(nodes) // shape.nodes
    assert count * shape.nodes == len(nodes)
    names = [_domain(one) for one in nodes]
    order = sorted(range(len(nodes)), key=lambda at: (names.index(names[at]), at))
    dealt = [[nodes[at] for at in order[number::count]] for number in range(count)]
    return [sorted(group, key=lambda one: one.rank) for group in dealt]


def worst_domain(groups: Sequence[Sequence[Placed]]) -> int:
    """Most nodes of one domain that are in one group."""
    return max(max(Counter(map(_domain, group)).values()) for group in groups)


def _domain(node: Placed) -> tuple[str | None, int | None]:
    return (node.domain, None if node.domain is not None else node.rank)
