"""One rank: `torchrun -m tests.integrations.deepspeed.program PLACE` runs the jobs of PLACE/plan.json."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch._dynamo  # DeepSpeed needs it for its first engine
import torch.distributed as dist

HERE = "tests.integrations.deepspeed"


def main() -> None:
    place = Path(sys.argv[1])
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    gc.freeze()  # DeepSpeed collects garbage with each engine that ends: what is imported is none
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    for number, (call, folder, arguments) in enumerate(
        json.loads((place / "plan.json").read_text())
    ):
        result = job_of(call)(Path(folder), **arguments)
        dist.barrier()
        partial = place / f"{number}.{rank}.part"
        partial.write_text(json.dumps(result))
        partial.rename(place / f"{number}.{rank}.json")
    ours = sys.modules.get("ckpt_deepspeed")
    if ours is not None:
        ours.close()
    dist.destroy_process_group()
    forget_buffers(os.environ["MASTER_PORT"])
    sys.stdout.flush()
    os._exit(0)


def forget_buffers(port: int | str) -> None:
    """Delete what DeepSpeed's all-reduce leaves of the ranks of a job: 66 MiB of memory for each."""
    for path in Path("/dev/shm").glob(f"deepspeed_*_{port}_*"):
        path.unlink(missing_ok=True)


def job_of(call: str) -> Callable[..., Any]:
    """`exact` is in jobs.py, `tools.write` in tools.py, which is imported when its turn comes."""
    module, _, name = call.rpartition(".")
    found: Callable[..., Any] = getattr(importlib.import_module(f"{HERE}.{module or 'jobs'}"), name)
    return found


if __name__ == "__main__":
    main()
