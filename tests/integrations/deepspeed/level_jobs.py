"""What ranks do with a level behind their directory of tags."""

from __future__ import annotations

import os
import shutil
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist

import ckpt_core
import ckpt_deepspeed
from tests.integrations.deepspeed.training import config, digest, engine, engine_for, train

STEPS, AT, EVERY = 6, 4, 2
_LIMIT_S = 100.0


def killed(folder: Path) -> None:
    """Train, save at each step, wait until a tag is at the level; then all ranks die within a save."""
    made = _engine(folder)
    for step in range(AT + 1):
        train(made, step, step + 1)
        made.save_checkpoint(str(folder / "c"), client_state={"step": step + 1})
        if step + 1 == AT:
            deadline = time.monotonic() + _LIMIT_S
            while _named(folder / "far") != f"global_step{AT}":
                assert time.monotonic() < deadline, os.listdir(folder / "far")
                time.sleep(0.01)
            dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def resumed(folder: Path) -> dict[str, Any]:
    """Go on with an empty directory; beside it a run that nobody interrupts."""
    straight = engine(2, "bf16", ours=False)
    train(straight, 0, STEPS)
    end = digest(straight)
    straight.destroy()
    made = _engine(folder, seed=7)
    found: dict[str, Any] = {"end": end}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        path, client = made.load_checkpoint(str(folder / "c"))
        found["told"] = [str(one.message) for one in told if "further" in str(one.message)]
    assert path is not None
    found |= {"path": path, "latest": _named(folder / "c"), "step": client["step"]}
    train(made, client["step"], STEPS)
    found["resumed_end"] = digest(made)
    # A tag that is damaged here and whole there.
    if dist.get_rank() == 0:
        tag = folder / "c" / f"global_step{AT}"
        file = max(tag.glob("*.pt"), key=lambda path: path.stat().st_size)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.unlink()
        file.write_bytes(data)
        found["damaged"] = not ckpt_core.verify(tag).ok
    dist.barrier()
    again, _ = made.load_checkpoint(str(folder / "c"), tag=f"global_step{AT}")
    assert again is not None
    train(made, AT, STEPS)
    found["mended_end"] = digest(made)
    found["whole"] = ckpt_core.verify(folder / "c" / f"global_step{AT}").ok
    made.destroy()
    # Plain DeepSpeed reads the level as it is.
    plain = engine(2, "bf16", ours=False, seed=9)
    plain.load_checkpoint(str(folder / "far"))
    train(plain, AT, STEPS)
    found["plain_end"] = digest(plain)
    plain.destroy()
    return found


def nothing(folder: Path) -> dict[str, Any]:
    """Neither the directory nor the level has anything; then levels for storage of each node."""
    made = _engine(folder)
    found = {"path": made.load_checkpoint(str(folder / "c"))[0]}
    made.destroy()
    settings = config(2, "bf16", ours=True, levels=[str(folder / "far")])
    try:
        engine_for(settings | {"checkpoint": {"use_node_local_storage": True}})
    except ckpt_core.ConfigError as exc:
        found["refused"] = str(exc)
    ckpt_deepspeed.close()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "c", ignore_errors=True)
    return found


def _engine(folder: Path, *, seed: int = 0) -> Any:
    levels = [{"url": str(folder / "far"), "every": EVERY}]
    return engine(2, "bf16", seed=seed, levels=levels)


def _named(place: Path) -> str | None:
    path = place / "latest"
    return path.read_text() if path.exists() else None
