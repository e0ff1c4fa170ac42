"""Exact resume of the order in which a run sees its data.

    loader = ResumableLoader(dataset, batch_size=32, shuffle=True, num_workers=4)
    state = {"model": model, "optimizer": optimizer, "data": loader}
    ck.restore(state)
    for epoch in range(loader.epoch, epochs):
        for batch in loader:                  # goes on in the middle of the epoch, if that is where it was
            ...
            ck.save(step, state)

The idea: the order of an epoch is a function of (seed, epoch), and all ranks together walk along it, rank
r of R taking every R-th sample. So one number, how many samples *all* ranks have consumed, says what
is left of an epoch, to any number of ranks; and resuming is one slice, not a walk over what is skipped.

`ResumableSampler` knows the order. `ResumableLoader` knows, in addition, what training has really got:
workers that fetch ahead do not count.

Source: CheckFreq (FAST '21), the resumable data iterator: each sample of an epoch exactly once.
"""

from ckpt_core.data.loader import ResumableLoader
from ckpt_core.data.sampler import ResumableSampler

__all__ = ["ResumableLoader", "ResumableSampler"]
