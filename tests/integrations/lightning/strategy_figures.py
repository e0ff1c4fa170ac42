"""What saves cost under sharding: `python -m ...strategy_figures fsdp|deepspeed FOLDER [MB [ROUNDS]]`.

Two ranks of gloo train the same model with AsyncCheckpoint, with ModelCheckpoint, and without saves, in
random order. Each way resumes from what it has saved twice: when the page cache holds nothing of it, as after
the restart of a machine, and once more, when it holds all. Figures are rank 0's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from tests.ports import free_port

RANKS, EVERY, SAVES, LEAD = 2, 3, 2, 5
WAYS = ("AsyncCheckpoint", "ModelCheckpoint", "no saves")
HEADINGS = (
    *("step, ms", "stall of a save, ms", "longest step, ms"),
    *("resumed from the disk, ms", "from the page cache, ms"),
)


def train(strategy: str, folder: Path, nbytes: int, rounds: int) -> None:
    """What one rank does."""
    from ckpt_core.bench.settings import model_of

    size = dataclasses.asdict(model_of(nbytes))
    order, rows = random.Random(0), {way: [] for way in WAYS}
    fit(strategy, WAYS[0], folder / "warm", size)
    for _ in range(rounds):
        for way in order.sample(WAYS, len(WAYS)):
            root = folder / way.replace(" ", "")
            if int(os.environ["LOCAL_RANK"]) == 0:
                shutil.rmtree(root, ignore_errors=True)
            rows[way].append(fit(strategy, way, root, size))
    if int(os.environ["LOCAL_RANK"]) == 0:
        print(
            f"| {strategy}, {nbytes / 1e6:.0f} MB | "
            + " | ".join(HEADINGS)
            + " |\n|---|---|---|---|---|---|"
        )
        for way, found in rows.items():
            columns = zip(*found, strict=True)
            print(f"| {way} | " + " | ".join(map(_cell, columns)) + " |", flush=True)


def _cell(values: Any) -> str:
    ms = [value * 1e3 for value in values if value is not None]
    return f"{statistics.median(ms):.3g} ({min(ms):.3g}-{max(ms):.3g})" if ms else ""


def fit(strategy: str, way: str, root: Path, size: dict[str, Any]) -> tuple[float | None, ...]:
    """One fit, and two that go on from it."""
    from ckpt_core.bench.fit_clock import FitClock
    from ckpt_core.bench.proc import processor_s
    from ckpt_core.bench.window import Window
    from ckpt_lightning_tools.bench import fitting

    window = Window(EVERY, LEAD, EVERY * SAVES)
    clock, savers = FitClock(window), _savers(way, root)
    steps = LEAD + EVERY * SAVES
    for saver in savers:
        clock.watch(saver, fitting._HOOKS)
    data, module = fitting._data(size, steps), fitting.LanguageModel(size)
    trainer = trainer_of(strategy, [fitting.Clock(clock), *savers], steps)
    trainer.fit(module, data)
    found = clock.found(fit_s=0.0, processor_s=processor_s(os.getpid()), state={})
    if not savers:
        return found.step_s, None, found.longest_step_s, None, None
    if int(os.environ["LOCAL_RANK"]) == 0:
        _forget(root)
    trainer.strategy.barrier()
    resumed = [_resume(strategy, way, root, size) for _ in range(2)]
    return found.step_s, found.stall_s, found.longest_step_s, *resumed


def _forget(root: Path) -> None:
    """Have the page cache hold nothing of the files."""
    os.sync()
    for path in root.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _resume(strategy: str, way: str, root: Path, size: dict[str, Any]) -> float:
    """Seconds until the first batch."""
    import torch.distributed as dist

    from ckpt_core.bench.fit_clock import Begun
    from ckpt_lightning_tools.bench import fitting

    again = trainer_of(strategy, [fitting.Ends(), *_savers(way, root)], 1000)
    path = None if way == WAYS[0] else str(fitting._newest(root))
    data, module = fitting._data(size, 1000), fitting.LanguageModel(size)
    dist.barrier()
    began = time.perf_counter()
    with contextlib.suppress(Begun):
        again.fit(module, data, ckpt_path=path, weights_only=False)
    return time.perf_counter() - began


def _savers(way: str, root: Path) -> list[Any]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from ckpt_lightning import AsyncCheckpoint

    if way == WAYS[0]:
        return [AsyncCheckpoint(root, every_n_steps=EVERY, save_last=False, on_error="raise")]
    return [ModelCheckpoint(root, every_n_train_steps=EVERY)] if way == WAYS[1] else []


def trainer_of(strategy: str, callbacks: list[Any], steps: int) -> Any:
    """A quiet Trainer on CPUs."""
    from lightning.pytorch import Trainer
    from torch import nn

    if strategy == "fsdp":
        from tests.integrations.lightning.ddp_program import flat_sharding

        blocks = {nn.TransformerEncoderLayer}
        chosen = flat_sharding(auto_wrap_policy=blocks, state_dict_type="sharded")
    else:
        from tests.integrations.lightning.deepspeed_program import OnCpus

        zero = {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
        chosen = OnCpus(config={**zero, "train_micro_batch_size_per_gpu": 2})
    return Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=chosen,
        callbacks=callbacks,
        enable_checkpointing=len(callbacks) > 1,
        max_epochs=-1,
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main() -> None:
    strategy, folder, *more = sys.argv[1:]
    megabytes, rounds = [*map(int, more), 200, 5][:2] if len(more) != 1 else [int(more[0]), 5]
    if "LOCAL_RANK" in os.environ:
        import torch

        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        train(strategy, Path(folder), megabytes * 10**6, rounds)
        return
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "tests.integrations.lightning.strategy_figures", *sys.argv[1:]]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **place, "LOCAL_RANK": str(rank)})
        for rank in range(RANKS)
    ]
    try:
        sys.exit(max(process.wait() for process in ranks))
    finally:
        for process in ranks:
            process.kill()


if __name__ == "__main__":
    main()
