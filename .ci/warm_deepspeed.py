"""Compiles DeepSpeed's CPU extensions that the tests use: `python .ci/warm_deepspeed.py`.

DeepSpeed compiles each at its first use, in the middle of a test, which takes minutes. Later
runs find them in `torch_extensions` of the virtual environment, or where TORCH_EXTENSIONS_DIR or torch
says. It needs a C++ compiler; ninja comes with DeepSpeed.

A build that was killed leaves its lock there, and torch waits for that without end: it is removed first.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
# As in tests/conftest.py.
if sys.prefix != sys.base_prefix:
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix, "torch_extensions")))

BUILDERS = ("ShareMemCommBuilder", "CPUAdamBuilder", "FusedAdamBuilder")
"""Gloo's first `initialize`, offloaded optimizers, {"optimizer": {"type": "Adam"}}."""


def extensions() -> Path:
    """Where torch builds: one folder for each extension, or for each Python with such folders."""
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def unlock(root: Path) -> None:
    """Remove the locks of builds that are gone, once their compilers are; tell of those that are kept."""
    for lock in (*root.glob("*/lock"), *root.glob("*/*/lock")):
        if is_held(lock):
            sys.stdout.write(f"{lock}: waiting for that build; if none runs, remove the file\n")
            continue
        while any(_works_in(process, lock.parent) for process in Path("/proc").glob("[0-9]*")):
            time.sleep(0.1)
        lock.unlink(missing_ok=True)
        sys.stdout.write(f"{lock}: left by a build that was killed, removed\n")


def is_held(lock: Path) -> bool:
    """Whether a build still has its lock; True where that cannot be told."""
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except FileNotFoundError:  # just ended
        return True
    try:
        # Granted only where nobody else has the file open; closing it gives the lease back.
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _works_in(process: Path, folder: Path) -> bool:
    try:
        return (process / "cwd").samefile(folder)
    except OSError:  # it has ended, or is another user's
        return False


def main() -> None:
    """Build what is missing; ends with the builder's own error if that fails."""
    from deepspeed.accelerator import get_accelerator

    unlock(extensions())
    for name in BUILDERS:
        began = time.monotonic()
        get_accelerator().create_op_builder(name).load(verbose=False)
        sys.stdout.write(f"{name}: ready after {time.monotonic() - began:.0f} s\n")


if __name__ == "__main__":
    main()
