"""When layers are enqueued, and a checkpoint that takes them while a step is made (LightCheck III-B)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from torch import Tensor

from ckpt_core import Checkpointer, SaveHandle
from ckpt_horovod.tree import StateTree


class Layerwise(StrEnum):
    """When the layers of a step that is saved are enqueued.

    IN_STEP: inside `step()`, each as soon as its all-reduce and update are done. LAZY: at the end of the
    iteration. In both, the update of a layer in the next step waits for that layer's copy alone.
    """

    IN_STEP = "in_step"
    LAZY = "lazy"


class LayerSave:
    """Open from the first layer of a step to the end of the iteration; sealed or aborted then.

    Args:
        checkpointer: takes it.
        step: number that the iteration will have.
        tree: names the tensors.

    Attributes:
        open: what was begun.

    Raises:
        CkptError: as for `Checkpointer.begin`.
    """

    def __init__(self, checkpointer: Checkpointer, step: int, tree: StateTree) -> None:
        self._tree = tree
        self._layers = {id(param): tree.layer(param) for param in tree.layers()}
        flat = {name: tensor for layer in self._layers.values() for name, tensor in layer.items()}
        self._left = dict.fromkeys(flat)
        self._versions: list[tuple[Tensor, int]] = []
        self._problem: str | None = None
        self.open = checkpointer.begin(step, flat)

    def stage(self, params: Sequence[Tensor]) -> None:
        """These parameters are final for the step, and so is the state that the optimizer keeps of them."""
        names: list[str] = []
        for param in params:
            layer = self._layers.get(id(param))
            if layer is None:  # frozen, and updated all the same: it is copied at the end
                continue
            if not _same_tensors(layer, self._tree.layer(param)):
                self._problem = "the optimizer puts new tensors in the place of its state"
                return
            names += layer
            self._versions += [(tensor, tensor._version) for tensor in layer.values()]
        self._stage(names)

    def spoil(self, problem: str) -> None:
        """What was staged is not what the iteration will end with."""
        self._problem = problem

    def problem(self, parts: Mapping[str, Any]) -> str | None:
        """Why it cannot be sealed with these parts; None if it can. Asked at the end of the iteration.

        A net and not the guarantee: an edit through `.data`, and by fused optimizers that are in no
        checkpoint, leaves no trace here.
        """
        if self._problem is None and self._tree.is_shared(parts):
            # Danger: if it is fused, its updates raise no version counter.
            self._problem = "another optimizer that is saved has parameters of this one"
        if self._problem is None and any(was != t._version for t, was in self._versions):
            self._problem = "parameters were changed between step() and the end of the iteration"
        return self._problem

    def seal(self, tree: dict[str, Any], per_rank: Iterable[str]) -> SaveHandle:
        """End it with everything else that belongs to the iteration.

        Raises:
            CkptError: as for `LayerwiseSave.seal`; the save is given up.
        """
        # Parameters that this step did not update: without a gradient on any rank.
        self._stage(list(self._left))
        try:
            return self.open.seal(tree, per_rank=per_rank)
        except BaseException as exc:
            # Nobody will seal it again, and it would keep its place until `timeout`.
            self.abort(exc)
            raise

    def abort(self, raised: BaseException | None = None) -> None:
        """Give it up; `raised` is what the caller is told instead. Idempotent."""
        self.open.abort(raised)

    def _stage(self, names: Sequence[str]) -> None:
        for name in names:
            self._left.pop(name, None)
        self.open.stage(names)


def _same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether what was there before an update still is: same names, same memory."""
    return all(
        name in other and other[name].data_ptr() == tensor.data_ptr()
        for name, tensor in one.items()
    )
