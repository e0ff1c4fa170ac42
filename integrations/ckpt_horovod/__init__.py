"""Checkpoints for Horovod, taken layer by layer: wrap the optimizer.

    import horovod.torch as hvd
    import ckpt_horovod
    from ckpt_core import Checkpointer

    with Checkpointer("ckpts", coordination=ckpt_horovod.coordination()) as ck:
        opt = ckpt_horovod.DistributedOptimizer(
            opt, named_parameters=model.named_parameters(), checkpointer=ck, every_n_steps=10)
        opt.attach(model=model, scheduler=scheduler)
        opt.restore()                                  # newest step, the same on every rank; None if none
        for i in range(opt.iterations, total):
            with opt.iteration():
                opt.zero_grad(); loss(model, i).backward(); opt.step(); scheduler.step()

A step that is saved is made layer by layer, in the order in which the all-reduces finish; the snapshot of a
layer is copied behind training, and the layer's next update waits for that copy and no other:

    step()   reductions -> substeps -> layers          (stepping: which may be updated, in which order)
    end      iterations -> tree -> Checkpointer        (scheduler, buffers, random numbers as of the end)

Source: LightCheck (ICCD '23) section III.
"""

from ckpt_horovod.coordinating import coordination
from ckpt_horovod.layers import Layerwise
from ckpt_horovod.optimizer import Checkpoints, DistributedOptimizer

__all__ = ["Checkpoints", "DistributedOptimizer", "Layerwise", "coordination"]
