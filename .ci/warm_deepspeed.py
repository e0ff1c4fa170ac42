"""Compiles DeepSpeed's CPU extensions that the tests use: `python .ci/warm_deepspeed.py`.

DeepSpeed compiles each at its first use, in the middle of a test, which takes minutes. Later
runs find them in `~/.cache/torch_extensions`. It needs a C++ compiler; ninja comes with DeepSpeed.
"""

from __future__ import annotations

import os
import sys
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")

BUILDERS = ("ShareMemCommBuilder", "CPUAdamBuilder", "FusedAdamBuilder")
"""Gloo's first `initialize`, offloaded optimizers, {"optimizer": {"type": "Adam"}}."""


def main() -> None:
    """Build what is missing; ends with the builder's own error if that fails."""
    from deepspeed.accelerator import get_accelerator

    for name in BUILDERS:
        began = time.monotonic()
        get_accelerator().create_op_builder(name).load(verbose=False)
        sys.stdout.write(f"{name}: ready after {time.monotonic() - began:.0f} s\n")


if __name__ == "__main__":
    main()
