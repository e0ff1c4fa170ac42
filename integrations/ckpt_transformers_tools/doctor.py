"""Hugging Face's Trainer, for `ckpt-core doctor`."""

from __future__ import annotations

from ckpt_core.cli.doctor import Framework

FRAMEWORK = Framework(
    name="transformers",
    needs="ckpt_transformers",
    install="pip install 'ckpt-core[transformers]'",
    place=4,
    program="import ckpt_transformers",
)
