"""What the engine did and when: one `Event` for each change of state.

    log = EventLog()
    log.subscribe(print)               any callable; called in the engine's threads
    log.emit(Event(...))               by the engine
    log.write_timeline("trace.json")   open it in Perfetto or chrome://tracing
    event_file("run.jsonl", log, ...)  or write each one down as it happens (`Options.events_file`)
    EventLines().read(path)            and read them back
    open_metrics("ckpt.prom", Figures(log, ...), ...)   or count them, for Prometheus (`Options.metrics`)
    Outlets(root, log, ...)            the log, that file and those figures of one Checkpointer
    Meter()                            or what each save has cost, for the loggers of a framework
    with progress_bar() as show: ...   or show how far a reader of many bytes is

Idea: layers emit facts, and every view (the log, counters, progress bars, timelines) is made from them.
"""

from ckpt_core.observe.costs import Meter, SaveCost
from ckpt_core.observe.event import Event, EventName
from ckpt_core.observe.event_file import event_file
from ckpt_core.observe.event_lines import EventLines
from ckpt_core.observe.figures import Figures
from ckpt_core.observe.log import EventLog
from ckpt_core.observe.metrics import open_metrics
from ckpt_core.observe.outlets import Outlets
from ckpt_core.observe.picture import check_plot
from ckpt_core.observe.progress import Show, progress_bar
from ckpt_core.observe.timeline import timeline

__all__ = [
    "Event",
    "EventLines",
    "EventLog",
    "EventName",
    "Figures",
    "Meter",
    "Outlets",
    "SaveCost",
    "Show",
    "check_plot",
    "event_file",
    "open_metrics",
    "progress_bar",
    "timeline",
]
