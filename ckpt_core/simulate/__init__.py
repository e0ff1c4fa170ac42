"""What a way to checkpoint is worth: runs with checkpoints, stalls, failures and recoveries, simulated.

    Job, Rates -> costs_of(strategy) -> Costs -> stretch() -> Stretch -> simulate(outages, goal) -> Outcome

`Stretch` is the course of training without failures, event by event until it repeats itself. `simulate`
lays such stretches between outages, which come from a mean time between failures or from a trace.
`levels` says what is left of what was committed, where committed steps are copied further.
Nothing happens between events, so a run takes as long as it has failures, however long it is and however
many nodes it has. `recovery` holds what the papers say in closed form, `schedule` preemptive scheduling,
`papers` the papers' numbers with their sources and what we get for them, `measured` reads what
`ckpt-core bench` found. Pure functions over numbers: no clock, no torch, files are the caller's.

Source: PCcheck (ASPLOS '25) sections 3.4, 4.2 and 5.2.3; LightCheck (ICCD '23) section IV.
"""

from ckpt_core.simulate.costs import Costs, FurtherLevel, Job, Kind, Rates, Sharing
from ckpt_core.simulate.failures import (
    Outage,
    Stops,
    Trace,
    exponential,
    of_kinds,
    of_nodes,
    parse_trace,
)
from ckpt_core.simulate.measured import Measured, read_bench
from ckpt_core.simulate.papers import (
    PAPERS,
    Comparison,
    compare,
    lightcheck_data,
    pccheck_data,
)
from ckpt_core.simulate.recovery import bound_s, daly_s, mean_s, young_s
from ckpt_core.simulate.redundancy import Redundancy
from ckpt_core.simulate.run import Goal, Outcome, simulate
from ckpt_core.simulate.schedule import Load, Task, completion_times, mean_completion_s
from ckpt_core.simulate.strategies import Setting, Strategy, costs_of
from ckpt_core.simulate.stretch import Stretch, stretch
from ckpt_core.simulate.study import Point, Study, run_study

__all__ = [
    "PAPERS",
    "Comparison",
    "Costs",
    "FurtherLevel",
    "Goal",
    "Job",
    "Kind",
    "Load",
    "Measured",
    "Outage",
    "Outcome",
    "Point",
    "Rates",
    "Redundancy",
    "Setting",
    "Sharing",
    "Stops",
    "Strategy",
    "Stretch",
    "Study",
    "Task",
    "Trace",
    "bound_s",
    "compare",
    "completion_times",
    "costs_of",
    "daly_s",
    "exponential",
    "lightcheck_data",
    "mean_completion_s",
    "mean_s",
    "of_kinds",
    "of_nodes",
    "parse_trace",
    "pccheck_data",
    "read_bench",
    "run_study",
    "simulate",
    "stretch",
    "young_s",
]
