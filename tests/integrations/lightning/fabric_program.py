"""A user's loop with Fabric: `python -m ...fabric_program RANK RANKS PORT FOLDER DIES`.

A rank that is to die trains undisturbed first, and then to a root, where it ends itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn

from ckpt_core import committed_steps
from ckpt_lightning import FabricCheckpoint
from tests.integrations.lightning.running import SMALL

STEPS, DIES_AT = 10, 7


class Stop(Exception):
    pass


def net() -> nn.Sequential:
    """Dropout, so that generators count; LayerNorm, since ranks share no statistics."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 1))


def train(
    fabric: Fabric, saving: FabricCheckpoint | None, *, stop: Any = None, seed: int = 7
) -> dict[str, Any]:
    """Train, from wherever the root says, to the end; `stop` is called after each step."""
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    model, optimizer = fabric.setup(module, optimizer)
    state = {"model": model, "optimizer": optimizer, "step": 0, "seen": []}
    torch.manual_seed(seed + fabric.global_rank)
    if saving is not None:
        saving.attach(fabric)
        saving.restore(state)
    while state["step"] < STEPS:
        data = torch.Generator().manual_seed(100 * state["step"] + fabric.global_rank)
        x = torch.randn(4, 6, generator=data)
        optimizer.zero_grad()
        fabric.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
        optimizer.step()
        state["step"] += 1
        state["seen"] = [*state["seen"], state["step"]]
        fabric.call("on_train_batch_end", state=state)
        if stop is not None:
            stop(state["step"])
    fabric.call("on_train_end", state=state)
    return {
        "model": {name: value.clone() for name, value in module.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "seen": state["seen"],
        "rng": torch.get_rng_state(),
    }


def made(*callbacks: Any, ranks: int = 1) -> Fabric:
    fabric = Fabric(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        callbacks=list(callbacks),
    )
    fabric.launch()
    return fabric


def saver(root: Path, **options: Any) -> FabricCheckpoint:
    return FabricCheckpoint(root, **{"every_n_steps": 2, "options": SMALL, **options})


def main() -> None:
    rank, ranks, port = map(int, sys.argv[1:4])
    folder, dies = Path(sys.argv[4]), sys.argv[5] == "dies"
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    root = folder / "root"

    def die(step: int) -> None:
        deadline = time.monotonic() + 60
        while step == DIES_AT and time.monotonic() < deadline:
            if committed_steps(root):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)

    if dies:
        torch.save(train(made(ranks=ranks), None), folder / f"undisturbed{rank}.pt")
    saving = saver(root)
    ended = train(
        made(saving, ranks=ranks), saving, stop=die if dies else None, seed=7 if dies else 99
    )
    saving.close()
    torch.save(ended, folder / f"resumed{rank}.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
