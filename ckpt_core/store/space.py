"""Refuse a save that cannot fit, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ckpt_core.errors import PersistError
from ckpt_core.store.failures import mapped
from ckpt_core.store.slots import Slots
from ckpt_core.system.files import Files
from ckpt_core.system.memory_limit import room_left
from ckpt_core.units import size_text


def check_space(
    root: Path, sizes: Sequence[int], others_bytes: int, *, slots: Slots, files: Files
) -> None:
    """Blocks of the slots that files of `sizes` would take, one each, count as there already.

    Args:
        others_bytes: of files that take no slot.

    Raises:
        PersistError: the free space is too small; says how much is needed and what to do.
    """
    with mapped("look for free space", path=root):
        need = sum(sizes) + others_bytes - slots.reusable_bytes(sizes)
        free, within = files.free_bytes(root), ""
        room = room_left() if files.in_memory(root) else None
    if room is not None and room < free:
        # The kernel kills whoever goes beyond it; what lies on tmpfs counts, and tmpfs does not ask.
        free, within = room, " within the memory limit of this process's control group"
    if need > free:
        raise PersistError(
            f"{root} has {size_text(free)} free{within} and this checkpoint needs {size_text(need)} more. "
            "Nothing was written, committed steps are safe; free some space, keep fewer steps "
            "(keep_last), or use another root",
            path=root,
        )
