"""The suite `transformers`: the same training under Trainer, with its ways to save, and with none.

What is measured: `ckpt_core.bench.fits`. Each way runs in a process of its own, which is the only place where
Transformers and `ckpt_transformers` are imported.
"""

from __future__ import annotations

from ckpt_transformers_tools.bench.suite import NAMES, SUITE, TransformersSettings

__all__ = ["NAMES", "SUITE", "TransformersSettings"]
