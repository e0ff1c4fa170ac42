"""`plan_zip`: a tree -> the layout of its torch zip file and the tensors that go into it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import IO, Any, cast

import torch

from ckpt_core.torch_zip.layout import ZipLayout
from ckpt_core.torch_zip.pickling import PICKLE_MODULE, Job, Skipping
from ckpt_core.torch_zip.sink import Sink


@dataclass(frozen=True)
class ZipPlan:
    """A torch zip file without the bytes of its tensors. Holds on to the live state.

    Attributes:
        layout: where everything goes.
        tensors: one for each extent: the live bytes, in row-major order of the tensor, without gradient
            and conjugate bit. One-dimensional wherever those bytes are one run of memory.
    """

    layout: ZipLayout
    tensors: tuple[torch.Tensor, ...]


def plan_zip(tree: Any, skipping: Skipping | None = None) -> ZipPlan:
    """Lay out the file that `torch.save` would write of `tree` if its tensors were detached clones.

    Called on the training thread inside `save`. Everything but the bytes of tensors is pickled here, with
    the values of this moment; those bytes are read by whoever fills the file. Copies no tensor and changes
    nothing in the tree.

    Views that are the same (memory, shape, strides, dtype) share a storage in the file, other views get one
    of their own with their bytes alone. Tensors that are not dense are stored by their parts, as
    `torch.save` does it.

    Args:
        tree: whatever `torch.save` takes.
        skipping: for a caller that is interrupted: it ends this once more, if only to be sure.

    Raises:
        ConfigError: something in the tree cannot be pickled, or has no memory; names its place.
    """
    sink, outer = Sink(), sys.exc_info()[1]
    job = Job(tree, skipping or Skipping())
    try:
        torch.save(job, cast(IO[bytes], sink), pickle_module=PICKLE_MODULE)
    except RuntimeError as exc:
        # Where the sink was interrupted, torch's writer misses bytes at the end of the file.
        raise _first_of(exc, outer) from None
    finally:
        job.skipping.end()
    layout = sink.layout()
    tensors = tuple([job.tensors[extent.name] for extent in layout.extents])
    sizes = [tensor.nbytes for tensor in tensors]
    assert sizes == [extent.nbytes for extent in layout.extents], "torch reserved other sizes"
    assert sum(sizes) == sum([tensor.nbytes for tensor in job.tensors.values()]), (
        "a record is missing"
    )
    return ZipPlan(layout, tensors)


def _first_of(error: BaseException, outer: BaseException | None) -> BaseException:
    """What the error came of; `outer` is what the caller is handling anyway."""
    while error.__context__ not in (None, outer):
        error = error.__context__
    return error
