"""The suite `policy`: CheckFreq's experiment with `Auto`, beside training without saves.

    auto_alone          Auto, nothing else on the machine
    fixed_beside_job    a second job takes cores and disk; the interval is the one that was right alone
    auto_beside_job     a second job starts in the middle of the run, and Auto adapts

Each condition is one job in a process of its own, which trains all the time: blocks of iterations with the
policy in force and blocks without any save follow one another, so that both are of the same minute.

    suite (one `worker` process for each condition, with an `interference` process) -> reaction -> shown

Source: CheckFreq (FAST '21) section 5.5 (isolated, static, adaptive).
"""

from __future__ import annotations

from ckpt_core.bench.policy.conditions import ADAPTIVE, ALONE, FIXED, NAMES
from ckpt_core.bench.policy.suite import SUITE, PolicyMeasure, PolicySettings

__all__ = ["ADAPTIVE", "ALONE", "FIXED", "NAMES", "SUITE", "PolicyMeasure", "PolicySettings"]
