"""A user's script, which is killed and run again: `python -m ...program FOLDER`, alone or as one of two.

It prints a line for each step that it has trained, and writes how it ended.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ckpt_core import Options
from ckpt_transformers import AsyncCheckpoint
from tests.integrations.transformers.jobs import run


class Tells(TrainerCallback):
    """Says where training is."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        print(f"step {state.global_step}", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    saver = AsyncCheckpoint(folder / "ckpts", options=Options(keep_last=3, staging_bytes="4MiB"))
    last = run(folder, Tells(), saver=saver, eval_strategy="epoch", num_train_epochs=4)
    rank = os.environ.get("RANK", "0")
    (folder / f"last-{rank}.json").write_text(json.dumps(last))
