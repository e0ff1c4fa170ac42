"""One rank of a job that trains: `python -m ...ddp_program RANK RANKS PORT`.

Reads jobs, one line of JSON each, and answers each with a line. All ranks are given the same jobs, or ones
that differ in `mine`, by rank.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ckpt_core.data import ResumableLoader
from ckpt_lightning import fsdp
from tests.integrations.lightning.models import FEATURES, Net, val_loader
from tests.integrations.lightning.running import SMALL, ending, preset, saver, trainer_of

SAMPLES, BATCH_SIZE = 48, 4


class Stop(Exception):
    pass


class Recording(Net):
    """Notes which samples each step has seen on this rank; fails in the step after `stop_at`."""

    def __init__(
        self, stop_at: int | None = None, pause_at: int | None = None, width: int = 0
    ) -> None:
        super().__init__()
        self.stop_at, self.pause_at = stop_at, pause_at
        self.samples: list[Any] = []
        self.paused = Path()
        if width:
            self.extra = nn.Linear(width, width, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, ids = batch
        if self.global_step == self.stop_at:
            raise Stop
        if self.global_step == self.pause_at:
            self.paused.touch()
            while not self.trainer.received_sigterm:  # or until it is killed
                time.sleep(0.01)
        self.samples.append([self.current_epoch, self.global_step, ids.tolist()])
        loss = self.loss((x, y))
        self.log("loss", loss.detach() + self.global_rank)
        if hasattr(self, "extra"):
            loss = loss + 0.01 * self.extra.weight.square().mean()
        return loss


class Sharded(Recording):
    """The same by FSDP2, if there is a mesh; without BatchNorm, whose buffers nobody would keep equal."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        self.net[1] = nn.LayerNorm(8)
        if self._device_mesh is None:
            return
        mesh = self._device_mesh["data_parallel"]
        for layer in (self.net[0], self.net[4]):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


class Flat(Recording):
    """The same for FSDP1, which wraps it by itself; with a buffer that changes in each forward pass."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("seen", torch.zeros(()))

    def configure_model(self) -> None:
        self.net[1] = nn.LayerNorm(8)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.add_(len(batch[0]))
        return super().training_step(batch, batch_idx)


class Drifting(Flat):
    """Has a buffer that each step replaces by another tensor."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("mean", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.mean = self.mean * 0.5 + 1
        return super().training_step(batch, batch_idx)


class OwnState(Flat):
    """Has more to save than its parameters and buffers."""

    def get_extra_state(self) -> Any:
        return torch.full((1,), 3.0)

    def set_extra_state(self, state: Any) -> None:
        assert state.tolist() == [3.0]


class InFlat(Flat):
    """For use_orig_params=False: the optimizer has the flat parameters themselves, the root's too."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.trainer.model.parameters(), lr=0.01)


class ByHand:
    """Before one of the modules: it steps by itself, with the gradients of four batches, also of two epochs.

    They are cleared when the next are to come, so that there are some at any time. DDP makes the buffers of
    BatchNorm equal in the first batch alone.
    """

    def __init__(self: Any, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        count = self.trainer.fit_loop.epoch_loop.total_batch_idx
        if count % 4 == 0:
            self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        if count % 4 == 3:
            self.optimizers().step()


class Resting:
    """Before one of the modules: it has a layer, a unit of FSDP, that no forward pass comes to."""

    def __init__(self: Any, *args: Any) -> None:
        super().__init__(*args)
        self.spare = nn.Linear(8, 8)


_FLAT = {"plain": Flat, "drifting": Drifting, "own state": OwnState, "in flat": InFlat}


class Watch(Callback):
    """Keeps the state with which training begins, and calls `trainer.save_checkpoint`."""

    def __init__(self, save_to: dict[str, Any] | None = None) -> None:
        self.begin: Any = None
        self.save_to = save_to

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        states = [optimizer.state_dict() for optimizer in trainer.optimizers]
        # FSDP1 is asked as a whole: a part of it, asked first, would take itself for the whole.
        model = trainer.strategy.model if isinstance(pl_module, Flat) else pl_module
        self.begin = whole({"state_dict": model.state_dict(), "optimizer_states": states})

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self.save_to is not None and trainer.global_step == self.save_to["step"]:
            trainer.save_checkpoint(self.save_to["path"])


class Apart:
    """Before one of the modules: rank 1 fails while rank `ahead` is behind a validation, the other before it.

    That one waits for the file `there` in batch 2, behind the collectives with which its step begins.
    """

    ahead: int
    there: Path

    def training_step(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        while batch_idx == 2 and self.global_rank != self.ahead and not self.there.exists():
            time.sleep(0.01)
        if batch_idx == 2 and self.global_rank != self.ahead:
            self._fail()
        return super().training_step(batch, batch_idx)

    def on_train_start(self: Any) -> None:
        super().on_train_start()
        loop = self.trainer.fit_loop.epoch_loop
        real = loop.update_lr_schedulers

        def update(interval: str, update_plateau_schedulers: bool) -> None:
            real(interval, update_plateau_schedulers)
            # Behind the hooks of callbacks, and before the next collective.
            if update_plateau_schedulers and loop.batch_idx == 2 and self.global_rank == self.ahead:
                self.there.touch()
                self._fail()

        loop.update_lr_schedulers = update

    def _fail(self: Any) -> None:
        if self.global_rank == 1:
            raise Stop


class Rank:
    """What this process is."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def fit(self, job: dict[str, Any]) -> dict[str, Any]:
        """Train as the job says; the answer says how it went, and `out` holds the tensors."""
        torch.manual_seed(job.get("seed", 7) + self.rank)  # dropout differs from rank to rank
        sharded = job.get("sharded", False)
        kind = (
            Sharded if sharded else _FLAT[job.get("flat", "plain")] if "fsdp" in job else Recording
        )
        if job.get("by_hand"):
            kind = type(f"{kind.__name__}ByHand", (ByHand, kind), {})
        if job.get("resting"):
            kind = type(f"{kind.__name__}Resting", (Resting, kind), {})
        if "apart" in job:
            kind = type(f"{kind.__name__}Apart", (Apart, kind), {"ahead": job["apart"]})
        mine = {**job, **job.get("mine", {}).get(str(self.rank), {})}
        module = kind(mine.get("stop_at"), mine.get("pause_at"), job.get("width", 0))
        module.paused = Path(f"{job['out']}.paused{self.rank}")
        module.there = Path(f"{job['out']}.there")
        watch = Watch(job.get("save_to"))
        saving = dict(mine.get("saving", {}))
        if "preset" in mine:
            saving["options"] = preset(**mine["preset"])
        if "timeout" in mine:
            saving["options"] = replace(SMALL, timeout=mine["timeout"])
        callbacks = [saver(Path(job["root"]), **saving)] if "root" in job else []
        averaging = [pl.callbacks.EMAWeightAveraging(decay=0.8)] if job.get("averages") else []
        trainer = trainer_of(
            watch,
            *averaging,
            *callbacks,
            strategy=self._strategy(job),
            devices=self.ranks,
            **{"max_epochs": 2, **job.get("trainer", {})},
        )
        with contextlib.suppress(Stop):
            data = loader((self.ranks, self.rank) if job.get("plain") else None)
            val = val_loader() if job.get("validates") else None
            trainer.fit(module, data, val, ckpt_path=job.get("ckpt_path"))
        model = trainer.strategy.model if "fsdp" in job else module
        last = whole(ending(trainer, model)) if mine.get("stop_at") is None else None
        torch.save({"begin": watch.begin, "last": last}, f"{job['out']}.{self.rank}")
        ways = {"cut": _is_cut(trainer.strategy)} if "fsdp" in job else {}
        return {"samples": module.samples, "best": [c.best_model_path for c in callbacks], **ways}

    def _strategy(self, job: dict[str, Any]) -> Any:
        if "fsdp" in job:
            return flat_sharding(**job["fsdp"])
        return _sharding(self.ranks) if job.get("sharded") else job.get("strategy", "ddp")


def flat_sharding(**options: Any) -> Any:
    """FSDPStrategy on CPUs, which Lightning has for GPUs alone."""
    from ckpt_lightning_tools.bench.sharded_fitting import FsdpOnCpus

    policy = {"auto_wrap_policy": {nn.Linear}, "process_group_backend": "gloo"}
    return FsdpOnCpus(**{**policy, **options})


def _is_cut(strategy: Any) -> list[bool]:
    """Whether FSDP1's model, and then each optimizer, was saved without FSDP's own collectives."""
    known = getattr(strategy, fsdp._KNOWN, None)
    if known is None:
        return []
    return [known.cuts is not None, *[forms is not None for forms in known.forms.values()]]


def _sharding(ranks: int) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    return ModelParallelStrategy(
        data_parallel_size=ranks, tensor_parallel_size=1, process_group_backend="gloo"
    )


def loader(plain: tuple[int, int] | None = None) -> Any:
    """Of torch alone for one of so many ranks, else one that resumes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(SAMPLES))
    if plain:
        return DataLoader(
            data, batch_size=BATCH_SIZE, sampler=DistributedSampler(data, *plain, seed=3)
        )
    return ResumableLoader(data, batch_size=BATCH_SIZE, shuffle=True, seed=3)


def whole(value: Any) -> Any:
    """A copy in which distributed tensors are whole. Called on every rank."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [whole(item) for item in value]
    if isinstance(value, torch.Tensor):
        return value.full_tensor() if hasattr(value, "full_tensor") else value.detach().clone()
    return value


class _Said(logging.Handler):
    """Keeps what Lightning's log says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def answer(rank: Rank, job: dict[str, Any], said: _Said) -> dict[str, Any]:
    """Do a job; how it went."""
    said.lines.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = rank.fit(job)
        except BaseException as exc:
            # Lightning ends the process on some errors; the job is over, the process goes on.
            text = f"{type(exc).__name__}: {exc}"
            found = {"error": text, "traceback": traceback.format_exc()}
    told = [str(w.message) for w in caught if w.category.__name__ == "CheckpointWarning"]
    return {**found, "warnings": told, "said": list(said.lines)}


def main() -> None:
    rank, ranks, port = map(int, sys.argv[1:4])
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    said = _Said()
    logging.getLogger("lightning.pytorch").addHandler(said)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Whatever else is printed must not look like an answer.
    one = Rank(rank, ranks)
    for line in sys.stdin:
        print(json.dumps(answer(one, json.loads(line), said)), file=replies, flush=True)


if __name__ == "__main__":
    main()
