"""Asynchronous, crash-proof checkpoints for Hugging Face's Trainer and Accelerate.

    from ckpt_transformers import AsyncCheckpoint

    trainer = Trainer(model, args, train_dataset=data, callbacks=[AsyncCheckpoint("ckpts")])
    trainer.train(resume_from_checkpoint=True)  # run it again after a crash: it goes on where it was

TrainingArguments say when to save, as ever. `ckpt_transformers.export("ckpts", "model")` writes the newest
step as a directory that `from_pretrained` reads.

A loop of one's own with Accelerate: `AcceleratorCheckpoint`.

The callback stands in for the methods of its Trainer that save and load, and translates them into calls of
`ckpt_core.Checkpointer`, which copies, writes and reads:

    train                   opens the root, chooses the step                         (doors, settings)
    _init_training_state    restores it                                              (run)
    _run_epoch              the epoch goes on with the same data and generators      (fetching)
    _save_checkpoint        saves behind training                                    (capture, files)
"""

from ckpt_transformers.accelerating import AcceleratorCheckpoint
from ckpt_transformers.callback import AsyncCheckpoint
from ckpt_transformers.exporting import export
from ckpt_transformers.texts import CheckpointWarning

__all__ = ["AcceleratorCheckpoint", "AsyncCheckpoint", "CheckpointWarning", "export"]
