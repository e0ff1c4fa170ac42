"""The frameworks that the integrations are for."""

from __future__ import annotations

import importlib.util

FRAMEWORKS = {
    "deepspeed": "pip install 'ckpt-core[deepspeed]'",
    "horovod": "docs/horovod.md#installing says how to build it",
    "lightning": "pip install 'ckpt-core[lightning]'",
    "transformers": "pip install 'ckpt-core[transformers]'",
}
"""Folder of tests and import name of each, and how to install it."""


def installed(name: str) -> bool:
    """Whether it can be imported."""
    return importlib.util.find_spec(name) is not None
