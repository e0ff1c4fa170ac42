"""A user's script, which is killed and run again: `python -m ...killed_program ROOT LOG LAST`.

Each training step writes a line to LOG: epoch, step, ids of its samples. The end is written to LAST.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch.utils.data import TensorDataset

from ckpt_core.data import ResumableLoader
from tests.integrations.lightning.models import FEATURES, Net
from tests.integrations.lightning.running import ending, saver, trainer_of

SAMPLES, BATCH_SIZE, EPOCHS = 40, 4, 4


class Recording(Net):
    """Says which samples each step has seen."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.log_path = log

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, ids = batch
        with self.log_path.open("a") as log:
            shown = ",".join(str(int(number)) for number in ids)
            log.write(f"{self.current_epoch} {self.global_step} {shown}\n")
        return self.loss((x, y))


def loader() -> Any:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(SAMPLES))
    return ResumableLoader(data, batch_size=BATCH_SIZE, shuffle=True, seed=3, num_workers=2)


def run(root: Path, log: Path) -> dict[str, Any]:
    """Train, from wherever the root says, to the end."""
    seed_everything(7, verbose=False)
    module = Recording(log)
    trainer = trainer_of(saver(root, every_n_steps=2), max_epochs=EPOCHS)
    trainer.fit(module, loader())
    return ending(trainer, module)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    result = run(Path(sys.argv[1]), Path(sys.argv[2]))
    torch.save(result, sys.argv[3])
