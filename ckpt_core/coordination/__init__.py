"""The ranks of one run agree that a step is persisted everywhere before it is published.

    every rank:  persist its own shard -> agree(...)        (once per attempt, in the background)
    rank 0:      agree returned -> write the manifest -> publish

One process needs no agreement: `NoCoordination` is that null object, and the engine asks it as it
asks any other.

Source: PCcheck (ASPLOS '25) section 4.1, checkpointing in distributed training.
"""

from ckpt_core.coordination.agreement import Coordination, NoCoordination

__all__ = ["Coordination", "NoCoordination"]
