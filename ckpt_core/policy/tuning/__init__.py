"""Which settings to choose on this disk, and how often to save with them: PCcheck's tool, as pure functions.

    space_of(limits) -> search(space, measure) -> sureness_of(found), as_options(found.best)
                                               -> Load(...).least_interval(max_overhead)

The caller measures: `measure(candidate)` gives the seconds for each checkpoint in one turn, which
`timing_of` takes from the moments of saves and barriers. Nothing here writes, waits or knows of tensors.

Idea: a search along the axes, each a race by successive halving, then fresh turns of the finalists.
Source: PCcheck (ASPLOS '25) section 3.4; CheckFreq (FAST '21) for the cost that is spread.
"""

from ckpt_core.policy.tuning.overhead import (
    Checked,
    Load,
    kept_interval,
    most_lost_s,
    nearest_overhead,
    next_interval,
    typical_loss_s,
)
from ckpt_core.policy.tuning.recommending import (
    Sureness,
    as_environment,
    as_options,
    as_values,
    size_value,
    sureness_of,
)
from ckpt_core.policy.tuning.search import Found, Plan, exhaustive, search
from ckpt_core.policy.tuning.space import AXES, Axes, Candidate, Limits, Measure, Space, space_of
from ckpt_core.policy.tuning.timing import (
    Span,
    Timing,
    Trace,
    beside,
    clean_iteration_s,
    iterations_of,
    timing_of,
)

__all__ = [
    "AXES",
    "Axes",
    "Candidate",
    "Checked",
    "Found",
    "Limits",
    "Load",
    "Measure",
    "Plan",
    "Space",
    "Span",
    "Sureness",
    "Timing",
    "Trace",
    "as_environment",
    "as_options",
    "as_values",
    "beside",
    "clean_iteration_s",
    "exhaustive",
    "iterations_of",
    "kept_interval",
    "most_lost_s",
    "nearest_overhead",
    "next_interval",
    "search",
    "size_value",
    "space_of",
    "sureness_of",
    "timing_of",
    "typical_loss_s",
]
