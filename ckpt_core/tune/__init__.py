"""`ckpt-core tune`: which settings are best on this disk, and how often to save with them.

    settings -> driver (a stand-in for training, or the user's own program) -> turns
      -> policy.tuning (search, interval) -> checks at that interval -> TuneReport -> tables, plot, JSON

The measuring half of PCcheck's tool; what to try next and what to recommend is decided by the pure functions
of `ckpt_core.policy.tuning`. All saves are real ones of a `Checkpointer`, timed from their start to their
commit, so everything counted is durable. Candidates take turns, and medians are compared.

Call order: `TuneSettings(...)` -> `tune(settings)` -> `as_json(report)`, `draw_tuning(report, path)`.

Source: PCcheck (ASPLOS '25) section 3.4; figures 12 to 14 are what the plot shows.
"""

from ckpt_core.tune.drawing import draw_tuning
from ckpt_core.tune.report import TuneReport, as_json
from ckpt_core.tune.running import tune
from ckpt_core.tune.settings import StandIn, TuneSettings

__all__ = ["StandIn", "TuneReport", "TuneSettings", "as_json", "draw_tuning", "tune"]
