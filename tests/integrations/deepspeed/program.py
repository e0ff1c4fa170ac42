"""One rank: `torchrun -m tests.integrations.deepspeed.program PLACE` runs the jobs of PLACE/plan.json."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

import ckpt_deepspeed
from tests.integrations.deepspeed import jobs


def main() -> None:
    place = Path(sys.argv[1])
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    for number, (call, folder, arguments) in enumerate(
        json.loads((place / "plan.json").read_text())
    ):
        result = getattr(jobs, call)(Path(folder), **arguments)
        dist.barrier()
        partial = place / f"{number}.{rank}.part"
        partial.write_text(json.dumps(result))
        partial.rename(place / f"{number}.{rank}.json")
    ckpt_deepspeed.close()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
