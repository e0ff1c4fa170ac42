"""One rank of a job that stops in the middle of an epoch; it leaves what it saw, and its state."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from ckpt_core.data import ResumableLoader
from tests.data.data_helpers import Noisy, ids, take

LENGTH, SIZE, BATCHES = 50, 4, 3


def main(rank: int, world_size: int, folder: Path) -> None:
    # Made before there is a process group, as scripts for Lightning do.
    loader = ResumableLoader(Noisy(LENGTH), batch_size=SIZE, shuffle=True, seed=6, num_workers=1)
    url = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world_size)
    try:
        seen = ids(take(loader, BATCHES))
        told = {"seen": seen, "state": loader.state_dict(), "batches": len(loader)}
        (folder / f"{rank}.json").write_text(json.dumps(told))
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
