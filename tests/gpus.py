"""Which runs of the tests see a GPU: `pytest -m cuda`, and no other.

A process that has looked for GPUs cannot be forked any more, frameworks warn of a GPU that a test leaves
idle, and ranks of one machine ask for one each. So a run of all tests is the same on every machine, and what
means a GPU has the marker `cuda` and a run of its own.
"""

from __future__ import annotations

import os

import pytest
import torch

_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_REASON = "needs a CUDA device, and `pytest -m cuda`"


def hide_gpus(config: pytest.Config) -> None:
    """Hide them from this process and from those that it starts, before one has looked for them."""
    if not _are_meant(config):
        os.environ.update(dict.fromkeys(_HIDING, ""))


def skip_without_gpu(item: pytest.Item) -> None:
    """Skip a test that is marked `cuda` where no GPU is seen."""
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip(_REASON)


def header(config: pytest.Config) -> str:
    """What a run says of it."""
    told = "seen" if _are_meant(config) else "hidden; pytest -m cuda runs what needs one"
    return f"GPUs: {told}"


def _are_meant(config: pytest.Config) -> bool:
    expression = str(config.option.markexpr)
    return "cuda" in expression and "not cuda" not in expression
