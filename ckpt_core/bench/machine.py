"""Where a run takes place, whether there is room for it, and the directory that it leaves empty."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_core.errors import ConfigError
from ckpt_core.system.files import Files
from ckpt_core.system.interrupts import holding
from ckpt_core.system.memory_limit import free_memory


def check_room(root: Path, *, disk_bytes: int, memory_bytes: int) -> None:
    """Raise before the first byte is written when the run would not fit.

    Raises:
        ConfigError: too little free disk under `root`, or too little free memory.
    """
    free = Files().free_bytes(root)
    advice = "use a smaller --state-bytes or fewer --contender"
    if free < disk_bytes:
        raise ConfigError(
            f"the run writes up to {_gb(disk_bytes)} and {str(root)!r} has {_gb(free)} free: "
            f"{advice}, or another --root"
        )
    available = free_memory()
    if available < memory_bytes:
        raise ConfigError(
            f"the run takes up to {_gb(memory_bytes)} of memory and {_gb(available)} are free: "
            f"{advice}"
        )


@contextmanager
def work_folder(root: Path) -> Iterator[Path]:
    """A new directory in `root` for all that a run writes; removed at the end, whatever happens."""
    with (
        holding() as held,
        tempfile.TemporaryDirectory(
            prefix="ckpt-core-bench-", dir=root, ignore_cleanup_errors=True
        ) as folder,
        held.allowed(),
    ):
        yield Path(folder)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
