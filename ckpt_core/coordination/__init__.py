"""The ranks of one run agree that a step is persisted everywhere before it is published.

    every rank:  persist its own shard -> agree(...) -> settle(...)   (in the background)
    leaders:     agree returned -> write the manifest -> publish -> settle(...)

One process needs no agreement: `NoCoordination` is that null object, and the engine asks it as it
asks any other.

Source: PCcheck (ASPLOS '25) section 4.1, checkpointing in distributed training.
"""

from ckpt_core.coordination.agreement import (
    Ballot,
    Coordination,
    Json,
    NoCoordination,
    Reference,
)

__all__ = ["Ballot", "Coordination", "Json", "NoCoordination", "Reference"]
