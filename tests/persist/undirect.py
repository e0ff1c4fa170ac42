"""Filesystems that take no direct writes, and say so at different moments."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

from ckpt_core.system.files import Files


class NoDirectOpen(Files):
    """Refuses O_DIRECT when a file is opened, after it has made the name."""

    def create(self, path: Path, *, direct: bool = False) -> int:
        fd = super().create(path)
        if direct:
            os.close(fd)
            raise OSError(errno.EINVAL, "no O_DIRECT here", str(path))
        return fd


class NoDirectWrite(Files):
    """Takes O_DIRECT at open and refuses the first such write."""

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "alignment")
        super().pwrite(fd, data, offset)
