"""Copy a state out of the way of training: a bounded pool of chunks, one stager thread, barriers.

Call order: `plan_pool` -> `StagingPool` once; per checkpoint a `ShardImage` for each file and one `Snapshot`
for the barriers. `save` fills the front of the image on the training thread, the `Stager` the rest; filled
chunks leave as `Piece`s to a `ChunkSink` while later leaves are still being copied. Sources: CheckFreq
(FAST '21), snapshot(); LightCheck III-B; PCcheck 3.1.
"""

from ckpt_core.snapshot.cuda import (
    device_name,
    event_now,
    on_stream,
    side_stream,
    synchronize,
    uses_cuda,
)
from ckpt_core.snapshot.cuda import free_bytes as device_free_bytes
from ckpt_core.snapshot.cuda import has_room as device_has_room
from ckpt_core.snapshot.image import ChunkSink, ImageSpec, Piece, ShardImage
from ckpt_core.snapshot.pool import (
    PoolDemand,
    PoolPlan,
    StagingPool,
    budget_bytes,
    plan_pool,
    too_small,
)
from ckpt_core.snapshot.stager import Snapshot, StageItem, Stager

__all__ = [
    "ChunkSink",
    "ImageSpec",
    "Piece",
    "PoolDemand",
    "PoolPlan",
    "ShardImage",
    "Snapshot",
    "StageItem",
    "Stager",
    "StagingPool",
    "budget_bytes",
    "device_free_bytes",
    "device_has_room",
    "device_name",
    "event_now",
    "on_stream",
    "plan_pool",
    "side_stream",
    "synchronize",
    "too_small",
    "uses_cuda",
]
