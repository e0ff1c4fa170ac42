"""When to save: tiny objects that combine with `|` and `&`.

    policy = EveryNSteps(1000) | EverySeconds(600)
    for step in ...:
        ...
        if policy.should_save(step):
            checkpointer.save(step, state)

A policy that says yes takes the step as saved. A policy of your own derives from `Policy` and
answers `due` and `saved`.

Source: CheckFreq (FAST '21) section 4 (what an interval costs); the form is tenacity's.
"""

from ckpt_core.policy.base import Policy
from ckpt_core.policy.fixed import EveryNSteps, EverySeconds

__all__ = ["EveryNSteps", "EverySeconds", "Policy"]
