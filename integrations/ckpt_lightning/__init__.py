"""Asynchronous, crash-proof checkpoints for Lightning: one callback.

    from ckpt_lightning import AsyncCheckpoint

    trainer = Trainer(callbacks=[AsyncCheckpoint("ckpts", every_n_steps=50)])
    trainer.fit(model, datamodule)       # run the same script again after a crash: it goes on where it was

`trainer.validate/test/predict(model, ckpt_path=)` takes a root, a step directory, "last" or "best" as well,
and `MyModule.load_from_checkpoint(path)` a root or a step directory. `ckpt_lightning.load(path)` gives the
checkpoint as Lightning's own dict.

The callback translates hooks into calls of `ckpt_core.Checkpointer`, which copies, writes and reads:

    on_train_batch_end            the state after a step: saved if one is due   (capture, session)
    on_before_optimizer_step      the barrier: what a save still reads must not change yet
    on_train_epoch_start          the state between two epochs
    setup, on_load_checkpoint     resume                                         (resume, position)
"""

from ckpt_lightning.callback import AsyncCheckpoint
from ckpt_lightning.checkpoint_io import StepIO
from ckpt_lightning.fabric import FabricCheckpoint
from ckpt_lightning.naming import register
from ckpt_lightning.resume import load
from ckpt_lightning.texts import CheckpointWarning

__all__ = ["AsyncCheckpoint", "CheckpointWarning", "FabricCheckpoint", "StepIO", "load"]

register()
