"""A save, from the call on the training thread to the committed step. Straight down:

plain | layerwise, layers | named_files    what the caller does: one call, or begin - stage - seal (open_save)
  -> admission                             a place among those in flight; or the way out
  -> staging                               leaves into chunks: now, and behind training
     still_files, still_group, unchanged   what has not changed is a link to an earlier step's file
     still_looks                           whether it may be: by a few cache lines
     still_bytes                           whether it is: the stager compares, and writers help
     still_named                           the same for a named file
  -> shards                                a file of the save, made late; its chunks to the writers
  -> pipeline                              the threads and the memory of all saves
  -> flights, in_flight                    all saves with their deadlines; one save's life
  -> commit, contents                      agreed with the other ranks, published, retired

journal       undoes what an interrupt cut short      barriers   what training waits for
failures      told once, to the next call             opening    the root, on all ranks or none
gauges        what a policy may ask                   handle     what the caller is given
further       what is asked of levels beyond         closing    who is told of the end
within_step   saves that come behind a barrier
"""

from ckpt_core.save.admission import Admission
from ckpt_core.save.barriers import Barriers
from ckpt_core.save.closing import OnClose, closed_meanwhile, refuse_fork, refuse_on
from ckpt_core.save.commit import Committer
from ckpt_core.save.failures import Failures
from ckpt_core.save.flights import Flights
from ckpt_core.save.further import Followed, LevelGauge, NoLevels, Reaching
from ckpt_core.save.gauges import Gauges
from ckpt_core.save.handle import SaveHandle
from ckpt_core.save.in_flight import Surroundings
from ckpt_core.save.journal import Journal, stalling
from ckpt_core.save.layers import LayerPlanner
from ckpt_core.save.layerwise import LayerwiseSave, LayerwiseSaves
from ckpt_core.save.named_files import FilesSave, FilesSaves
from ckpt_core.save.open_save import in_flight_of
from ckpt_core.save.opening import look_together, make_store, open_together
from ckpt_core.save.pipeline import Pipeline
from ckpt_core.save.plain import PlainSaves
from ckpt_core.save.shards import Shards
from ckpt_core.save.within_step import OwnBarriers

__all__ = [
    "Admission",
    "Barriers",
    "Committer",
    "Failures",
    "FilesSave",
    "FilesSaves",
    "Flights",
    "Followed",
    "Gauges",
    "Journal",
    "LayerPlanner",
    "LayerwiseSave",
    "LayerwiseSaves",
    "LevelGauge",
    "NoLevels",
    "OnClose",
    "OwnBarriers",
    "Pipeline",
    "PlainSaves",
    "Reaching",
    "SaveHandle",
    "Shards",
    "Surroundings",
    "closed_meanwhile",
    "in_flight_of",
    "look_together",
    "make_store",
    "open_together",
    "refuse_fork",
    "refuse_on",
    "stalling",
]
