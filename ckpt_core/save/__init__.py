"""A save, from the call on the training thread to the committed step.

plain | layerwise | named_files    what the caller does: one call, or begin - stage - seal
  -> admission                     a place among those in flight
  -> pipeline, staging, shards     leaves into chunks, chunks to the writers
  -> in_flight, flights            one save's life; all of them, with their deadlines
  -> commit                        agreed with the other ranks, published, retired

journal       undoes what an interrupt cut short      barriers   what training waits for
failures      told once, to the next call             opening    the root, on all ranks or none
gauges        what a policy may ask
"""

from ckpt_core.save.admission import Admission
from ckpt_core.save.barriers import Barriers
from ckpt_core.save.commit import Committer
from ckpt_core.save.failures import Failures
from ckpt_core.save.flights import Flights
from ckpt_core.save.gauges import Gauges
from ckpt_core.save.handle import SaveHandle
from ckpt_core.save.journal import stalling
from ckpt_core.save.layerwise import LayerwiseSave
from ckpt_core.save.named_files import Destinations, FilesSave
from ckpt_core.save.opening import make_store, open_together
from ckpt_core.save.pipeline import Pipeline

__all__ = [
    "Admission",
    "Barriers",
    "Committer",
    "Destinations",
    "Failures",
    "FilesSave",
    "Flights",
    "Gauges",
    "LayerwiseSave",
    "Pipeline",
    "SaveHandle",
    "make_store",
    "open_together",
    "stalling",
]
