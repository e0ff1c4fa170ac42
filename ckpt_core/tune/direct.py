"""Whether a filesystem takes direct writes. Where it takes none, "auto" and "off" are one thing."""

from __future__ import annotations

import dataclasses
import mmap
from pathlib import Path

from ckpt_core.errors import ConfigError
from ckpt_core.policy import tuning
from ckpt_core.system.files import NO_DIRECT, Files
from ckpt_core.types import DirectIO
from ckpt_core.units import ALIGN_BYTES

NOTE = "this filesystem takes no direct writes: direct_io is not tried"


def usable_axes(
    wished: tuning.Axes, folder: Path, files: Files | None = None
) -> tuple[tuning.Axes, tuple[str, ...]]:
    """The user's own values without those that come to the same in `folder`; notes on what is left out.

    Args:
        wished: the user's own values; an empty axis stands for the default.
        folder: existing directory; a file is written into it and removed.
        files: to write with; None: real ones.

    Raises:
        ConfigError: direct writes are insisted on where there are none.
    """
    if wished.direct_io in ((DirectIO.AUTO,), (DirectIO.OFF,)):
        return wished, ()
    if takes_direct_writes(folder, files or Files()):
        return wished, ()
    if DirectIO.ON in wished.direct_io:
        raise ConfigError(
            f"direct_io={DirectIO.ON.value!r} cannot be tried: this filesystem takes no direct writes; "
            f"leave --direct-io out, or give another --root"
        )
    return dataclasses.replace(wished, direct_io=(DirectIO.AUTO.value,)), (NOTE,)


def takes_direct_writes(folder: Path, files: Files) -> bool:
    """Whether a save would go past the page cache, by one block that is written and removed again."""
    path = folder / "direct-write"
    try:
        _write_block(path, files)
    except OSError as exc:
        # Whatever else is wrong is no matter of direct writes; the first save tells of it.
        return exc.errno not in NO_DIRECT
    finally:
        path.unlink(missing_ok=True)
    return True


def _write_block(path: Path, files: Files) -> None:
    fd = files.create(path, direct=True)
    try:
        # A mapping begins on a page, as direct writes need.
        files.pwrite(fd, mmap.mmap(-1, ALIGN_BYTES), 0)
    finally:
        files.close(fd)
