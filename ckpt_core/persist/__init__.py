"""Make the bytes of a snapshot durable: p writers, direct or buffered or memory-mapped, checksummed.

Call order, per shard file: `ShardFile(request)` -> `WriterPool.submit(WriteJob)` for every piece, from the
stager -> when all are done `ShardFile.sync()` and `close()`, from the finisher. Idea and source: PCcheck
(ASPLOS '25) sections 3.3 and 4.1; one write of each byte, large, aligned and sequential.
"""

from ckpt_core.persist.held_file import HeldFile, WriteResult
from ckpt_core.persist.requests import SUM_BYTES, FilePlace, ShardRequest
from ckpt_core.persist.shard_file import ShardFile
from ckpt_core.persist.writers import HeldBack, WriteJob, WriterPool

__all__ = [
    "SUM_BYTES",
    "FilePlace",
    "HeldBack",
    "HeldFile",
    "ShardFile",
    "ShardRequest",
    "WriteJob",
    "WriteResult",
    "WriterPool",
]
