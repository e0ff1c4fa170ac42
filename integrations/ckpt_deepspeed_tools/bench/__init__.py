"""The suite `deepspeed`: the same training on 2 ranks under DeepSpeed, with each way to save, and with none.

At ZeRO 1 and 3 in bf16, on real DeepSpeed over Gloo: how long a save holds training up, when `latest` names
it, when it is durable, what it takes of memory and writes to storage, and what training loses by a save every
1, 5, 20 steps.

    settings -> crew (two ranks for each way, which serve requests) -> rounds -> figures -> tables, drawing

A peer that cannot run here is tried all the same, in processes of its own, and reported with its own error;
the one peer that is measured with a change to DeepSpeed is named so, and the change is in `saving`.
DeepSpeed and `ckpt_deepspeed` are imported by the ranks alone.
"""

from __future__ import annotations

from ckpt_deepspeed_tools.bench.suite import SUITE, DeepSpeedSettings

__all__ = ["SUITE", "DeepSpeedSettings"]
