"""The second encoder: what `torch.save` writes, laid out before a byte of a tensor is copied.

    plan_zip(tree) -> ZipPlan(layout, tensors)
    layout.frames:  bytes of the file that are not tensor data: pickle, zip headers, zip directory
    layout.extents: where the bytes of each of `tensors` go

Call order: `plan_zip` on the training thread inside `save`; then frames and tensors are copied into the
image of the file, in ascending order or in any other. Pure: no I/O, no threads, and no bytes of tensors:
planning takes memory for the pickle and the zip directory, whatever the size of the state.

Idea: `torch.save` does the work, so that the format is torch's own. Two things are put in its way.

- Its pickler hands the tree to one of ours, which lets every tensor reduce itself as ever, and then
  changes the result where that is a piece of a dense storage: the storage becomes one of its own, of
  the size of the view, that has no memory. So views do not drag in the buffer that they are cut from,
  and nothing is cloned. Fake tensors would do the same but cost more than planning may take, and a
  table of reducers could not see views that are the same.
- `torch.serialization.skip_data` makes its zip writer step over those storages. The file-like object
  that we give to it keeps what is written and notes what is stepped over.

Used of torch and not documented, each guarded by a test: the order of arguments of `_rebuild_tensor_v2`,
`_rebuild_tensor_v3` and `_rebuild_from_type_v2` (they are part of the file format, so they stay), the
fields of persistent ids (likewise), `TypedStorage(wrap_storage=, dtype=, _internal=)`,
`TypedStorage._untyped_storage`, `torch.serialization.location_tag`, and that a skipped record is a relative
seek of the file-like object.
"""

from __future__ import annotations

from ckpt_core.torch_zip.blame import tensor_paths
from ckpt_core.torch_zip.layout import ZipExtent, ZipLayout
from ckpt_core.torch_zip.pickling import Skipping
from ckpt_core.torch_zip.plan import ZipPlan, plan_zip

__all__ = ["Skipping", "ZipExtent", "ZipLayout", "ZipPlan", "plan_zip", "tensor_paths"]
