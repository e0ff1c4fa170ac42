"""A job of a few epochs that tells each batch it trains on, and resumes from its root by itself."""

from __future__ import annotations

import sys

import torch

from ckpt_core import Checkpointer
from ckpt_core.data import ResumableLoader
from tests.data.data_helpers import Noisy, ids

LENGTH, SIZE, STEPS, EVERY = 40, 3, 33, 3


def main(root: str) -> None:
    torch.set_num_threads(1)
    loader = ResumableLoader(
        Noisy(LENGTH), batch_size=SIZE, shuffle=True, seed=5, num_workers=2, persistent_workers=True
    )
    total = torch.zeros(4, dtype=torch.float64)
    state = {"data": loader, "total": total}
    with Checkpointer(root) as ck:
        restored = ck.restore(state)
        step = restored.step if restored else 0
        print(f"start {step}", flush=True)
        while step < STEPS:
            for batch in loader:
                ck.wait_staged()
                total += batch.sum(0)
                step += 1
                bits = batch.numpy().tobytes().hex()
                print(f"step {step} {','.join(map(str, ids([batch])))} {bits}", flush=True)
                if step % EVERY == 0:
                    ck.save(step, state)
                    ck.wait()  # so that the next line told means that this step is committed
                if step == STEPS:
                    break
    print(f"end {total.numpy().tobytes().hex()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
