"""When to save: tiny objects that combine with `|` and `&`.

    policy = EveryNSteps(1000) | EverySeconds(600) | LastStep(total_steps)
    for step in ...:
        ...
        if policy.should_save(step):
            checkpointer.save(step, state)

A policy that says yes takes the step as saved. A policy of your own derives from `Policy` and
answers `due` and `saved`.

`Auto` measures instead of being told an interval:

    auto      the Policy; ranks agree
    planner   phases: from what was measured to the next step
    meter     the clock of the loop beside the engine;  ledger: what saves cost;  activity: what is under way
    interval  the arithmetic, pure
    profile   what was measured, and its cache

Source: CheckFreq (FAST '21) section 4 (what an interval costs); the form is tenacity's.
"""

from ckpt_core.policy.auto import Auto
from ckpt_core.policy.base import Policy
from ckpt_core.policy.fixed import EveryNSteps, EverySeconds, LastStep
from ckpt_core.policy.interval import Costs, Interval, Limits, choose_interval, daly_interval_s
from ckpt_core.policy.profile import Profile

__all__ = [
    "Auto",
    "Costs",
    "EveryNSteps",
    "EverySeconds",
    "Interval",
    "LastStep",
    "Limits",
    "Policy",
    "Profile",
    "choose_interval",
    "daly_interval_s",
]
