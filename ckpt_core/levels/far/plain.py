"""`PlainFar`: a root of another node, as that node shows it: with files where directories have them."""

from __future__ import annotations

from collections.abc import Collection

from ckpt_core.layout import MANIFEST_NAME
from ckpt_core.levels.far.door import Copy
from ckpt_core.levels.far.objects import ObjectFar


class PlainFar(ObjectFar):
    """A root that lies on a disk as every root, seen through the object store that the node serves.

    Files of a step may change under a reader when it is saved again: whoever reads compares them with sums.
    """

    def folder(self, copy: Copy) -> str:
        """As `ObjectFar.folder`."""
        return copy.target

    def files(self, copy: Copy) -> dict[str, int]:
        """As `Far.files`."""
        found = super().files(copy)
        found.pop(MANIFEST_NAME, None)
        return found

    def pins(self, among: Collection[int] | None = None) -> frozenset[int]:
        """None: a node shows steps, and nothing that is hidden in its root."""
        return frozenset()
