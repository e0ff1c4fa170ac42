"""A user's script under DeepSpeedStrategy: `python -m ...program RANK RANKS PORT FOLDER begin|go_on`.

Lightning has this strategy for CUDA alone; DeepSpeed itself trains on CPUs as well, and so do these ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckpt_core import ConfigError, Options, committed_directories
from ckpt_lightning import AsyncCheckpoint
from ckpt_lightning_tools.bench.sharded_fitting import DeepSpeedOnCpus

STEPS, STOPS_AT, DIES_AT = 9, 5, 7
EVERY = 2


class Net(LightningModule):
    """Dropout, so that generators count, and a scheduler that Lightning steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.3), nn.Linear(40, 1))

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        (x,) = batch
        return (self.layers(x) - x.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Dies(Callback):
    def __init__(self, root: Path) -> None:
        self._root = root

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        deadline = time.monotonic() + 100
        while trainer.global_step == DIES_AT and time.monotonic() < deadline:
            if committed_directories(self._root):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)


class SavesAtStep4(Callback):
    """As a user does by hand, under Lightning's own names."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 2 * EVERY and not self._path.exists():
            trainer.save_checkpoint(self._path)
            assert (self._path / "checkpoint" / "manifest.json").is_file(), "not durable yet"


def refused(folder: Path, **arguments: Any) -> str:
    """What a run says that cannot be."""
    saver = AsyncCheckpoint(folder / "root2", **arguments)
    try:
        trainer_of(2, STEPS, saver).fit(Net(), data())
    except ConfigError as exc:
        return str(exc)
    return "it ran"


def trainer_of(stage: int, steps: int, *callbacks: Callback, **section: Any) -> Trainer:
    config = {
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": 2,
        **section,
    }
    return Trainer(
        accelerator="cpu",
        devices=int(sys.argv[2]),
        strategy=DeepSpeedOnCpus(config=config),
        callbacks=list(callbacks),
        max_steps=steps,
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def data() -> Any:
    rows = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(rows), batch_size=2, shuffle=True)


def fit(stage: int, root: Path | None, *more: Callback, steps: int = STEPS, **fitted: Any) -> Any:
    """One run, from wherever its root says; what it ended with."""
    options = Options(staging_bytes="4MiB", writers=1, readers=1)
    savers = [AsyncCheckpoint(root, every_n_steps=EVERY, options=options)] if root else []
    trainer, net = trainer_of(stage, steps, *savers, *more), Net()
    torch.manual_seed(7 + int(sys.argv[1]))
    trainer.fit(net, data(), **fitted)
    found = {
        "step": trainer.global_step,
        "rng": torch.get_rng_state(),
        "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
    }
    for name, param in net.named_parameters():
        found[name] = safe_get_full_fp32_param(param).clone()
        found[f"{name}.avg"] = safe_get_full_optimizer_state(param, "exp_avg").clone()
    return found


def begin(folder: Path) -> None:
    for stage in (2, 3):
        torch.save(fit(stage, None), _file(folder, "undisturbed", stage))
    fit(2, folder / "root2", SavesAtStep4(folder / "by_hand.ckpt"), steps=STOPS_AT)
    told = [refused(folder, resume="never"), refused(folder, monitor="loss")]
    (folder / f"refused-{sys.argv[1]}").write_text("\n".join(told))
    fit(3, folder / "root3", Dies(folder / "root3"))


def go_on(folder: Path) -> None:
    for stage in (2, 3):
        torch.save(fit(stage, folder / f"root{stage}"), _file(folder, "resumed", stage))
    tag = str(folder / "root2" / f"global_step{2 * EVERY}")
    torch.save(fit(2, folder / "other", ckpt_path=tag), _file(folder, "by_path", 2))
    weights = fit(2, None, steps=2 * EVERY + 1, ckpt_path=str(folder / "by_hand.ckpt"))
    torch.save(weights, _file(folder, "by_hand", 2))


def _file(folder: Path, what: str, stage: int) -> Path:
    return folder / f"{what}{stage}-{sys.argv[1]}.pt"


def main() -> None:
    rank, _, port = map(int, sys.argv[1:4])
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    deepspeed.logger.setLevel("ERROR")
    {"begin": begin, "go_on": go_on}[sys.argv[5]](Path(sys.argv[4]))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
    # Else gloo's own thread, which DeepSpeed's groups keep alive, may abort a rank that has done all.
    os._exit(0)
