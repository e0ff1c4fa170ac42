"""Copy a state out of the way of training: a bounded pool of chunks, one stager thread, barriers.

Call order: `plan_pool` -> `StagingPool` once; per checkpoint a `ShardImage` for each file and one `Snapshot`
for the barriers. `save` fills the front of the image on the training thread, the `Stager` the rest; filled
chunks leave as `Piece`s to a `ChunkSink` while later leaves are still being copied. Sources: CheckFreq
(FAST '21), snapshot(); LightCheck III-B; PCcheck 3.1.
"""

from ckpt_core.snapshot.clones import DeviceClones
from ckpt_core.snapshot.copying import Buffer, buffers_at
from ckpt_core.snapshot.image import ChunkSink, ImageSpec, Piece, ShardImage
from ckpt_core.snapshot.items import Items, StageItem, batches
from ckpt_core.snapshot.planning import PoolDemand, PoolPlan, budget_bytes, plan_pool, too_small
from ckpt_core.snapshot.pool import StagingPool
from ckpt_core.snapshot.runs import EagerCopies, frozen
from ckpt_core.snapshot.sampling import Sampler
from ckpt_core.snapshot.stager import Snapshot, Stager
from ckpt_core.snapshot.staging_memory import StagingMemory
from ckpt_core.snapshot.streams import CopyStreams
from ckpt_core.snapshot.watching import LeafWatch

__all__ = [
    "Buffer",
    "ChunkSink",
    "CopyStreams",
    "DeviceClones",
    "EagerCopies",
    "ImageSpec",
    "Items",
    "LeafWatch",
    "Piece",
    "PoolDemand",
    "PoolPlan",
    "Sampler",
    "ShardImage",
    "Snapshot",
    "StageItem",
    "Stager",
    "StagingMemory",
    "StagingPool",
    "batches",
    "budget_bytes",
    "buffers_at",
    "frozen",
    "plan_pool",
    "too_small",
]
