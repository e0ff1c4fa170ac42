"""A user's script, which is killed and run again: `python -m ...program FOLDER...`, alone or as one of two.

It trains in each folder in turn, prints a line for each step that it begins, and writes how it ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from transformers import TrainerCallback

from ckpt_core import Options, committed_steps
from ckpt_core.cli.importing import import_source
from ckpt_core.cli.requests import ImportRequest
from ckpt_transformers import AsyncCheckpoint
from tests.integrations.transformers.jobs import run, run_stock

COMMITTED_BY = 4
"""The step that begins when some step is committed."""

FSDP: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
}


class Tells(TrainerCallback):
    """Says where training is; waits where the tests want it, so that no clock decides them."""

    def __init__(self, root: Path) -> None:
        self._root, self._begun = root, 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begun += 1
        print(f"step {state.global_step}", flush=True)
        if self._begun == int(os.environ.get("STOP_AT", 0)) and args.process_index == 0:
            os.kill(os.getpid(), signal.SIGTERM)  # one rank hears of it; all have to stop
        if state.global_step == COMMITTED_BY:
            wait_until(lambda: bool(committed_steps(self._root)))
        if self._begun == int(os.environ.get("HOLD_AT", 0)):
            wait_until(lambda: False)  # to be killed


def wait_until(until: Callable[[], bool]) -> None:
    """Return when it holds, which must be soon."""
    deadline = time.monotonic() + 120
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def allow_fsdp_on_cpus() -> None:
    """Accelerate has FSDP on accelerators alone, and ignores it elsewhere; ranks of gloo run it as well."""
    own = AcceleratorState.__init__

    def with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        own(self, *args, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = with_fsdp


def train(folder: Path, **arguments: Any) -> None:
    """One run, from wherever its root says, to the end."""
    print(f"run {folder.name}", flush=True)
    saver = AsyncCheckpoint(folder / "ckpts", options=Options(keep_last=3, staging_bytes="4MiB"))
    last = run(
        folder,
        Tells(folder / "ckpts"),
        saver=saver,
        eval_strategy="epoch",
        num_train_epochs=4,
        **arguments,
    )
    rank = os.environ.get("RANK", "0")
    (folder / f"last-{rank}.json").write_text(json.dumps(last))


def change_over(folder: Path) -> None:
    """Trainer alone, then from its middle again, by itself and by us behind an import: how those end."""
    run_stock(folder, save_total_limit=None, max_steps=6)
    middle = folder / "out" / "checkpoint-4"
    if torch.distributed.get_rank() == 0:
        import_source(ImportRequest(middle, str(folder / "ckpts"), no_progress=True))
    torch.distributed.barrier()
    there = run_stock(folder / "again", resume=str(middle), max_steps=6)
    here = run(folder, max_steps=6)
    (folder / f"last-{os.environ['RANK']}.json").write_text(json.dumps([here, there]))


@contextmanager
def without(*names: str) -> Iterator[None]:
    """What is asked of the last run is not asked of those before."""
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    yield
    os.environ.update(kept)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    more: dict[str, Any] = {}
    if "FSDP" in os.environ:
        allow_fsdp_on_cpus()
        more = FSDP
    *whole, last = map(Path, sys.argv[1:])
    for folder in whole:
        with without("HOLD_AT", "STOP_AT"):
            train(folder, **more)
    train(last, **more)
    if "CHANGE_OVER" in os.environ:
        change_over(last.with_name("changed"))
