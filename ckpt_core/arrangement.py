"""What stays the same while the structure of a state does: worked out once, used by every save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_core.layout import Extent, ShardLayout
from ckpt_core.state import FlatState
from ckpt_core.types import LeafSpec


@dataclass(frozen=True)
class Arrangement:
    """Where the leaves of one structure go.

    Attributes:
        layout: the shard file.
        order: number of the leaf (in the flat state) of each extent.
        contents: (spec, index of the shard file, extent) in file order, as the manifest lists them.
        names: of all leaves.
        lazy_names: of the leaves that the stager copies, in file order.
    """

    layout: ShardLayout
    order: tuple[int, ...]
    contents: tuple[tuple[LeafSpec, int, Extent], ...]
    names: frozenset[str]
    lazy_names: tuple[str, ...]

    @property
    def front_count(self) -> int:
        """How many leaves are copied inside `save`; they are the first ones of the file."""
        return len(self.order) - len(self.lazy_names)


class Arranger:
    """Arranges flat states; remembers the last structure. One owner, one thread."""

    def __init__(self) -> None:
        self._known: tuple[Sequence[LeafSpec], list[bool], Arrangement] | None = None

    def arrange(self, flat: FlatState) -> Arrangement:
        """The arrangement of a flat state; cheap when the structure is that of the last call.

        Raises:
            ConfigError: the layout is impossible (its header would be too large).
        """
        eager = [leaf.eager for leaf in flat.leaves]
        # The specs are the very same objects while the structure is (SpecMemo): == is an identity test.
        if self._known is None or self._known[0] != flat.specs or self._known[1] != eager:
            self._known = (flat.specs, eager, _arrange(flat))
        return self._known[2]


def _arrange(flat: FlatState) -> Arrangement:
    front = [leaf.spec for leaf in flat.leaves if leaf.eager]
    lazy = [leaf.spec for leaf in flat.leaves if not leaf.eager]
    layout = ShardLayout.plan(front, lazy)
    number = {leaf.spec.name: index for index, leaf in enumerate(flat.leaves)}
    order = tuple(number[extent.name] for extent in layout.extents)
    contents = tuple(
        (flat.leaves[index].spec, 0, extent)
        for index, extent in zip(order, layout.extents, strict=True)
    )
    lazy_names = tuple(extent.name for extent in layout.extents[len(front) :])
    return Arrangement(layout, order, contents, frozenset(number), lazy_names)
