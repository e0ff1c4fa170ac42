"""Committed steps, read without Horovod, against what the run without checkpoints had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ckpt_core import committed_steps, load, step_path


def torn_steps(root: Path, ranks: int) -> dict[int, list[str]]:
    """The committed steps under `root` that are not, leaf by leaf, the reference; and where they differ."""
    truth = [torch.load(root / f"reference.{rank}.pt", weights_only=False) for rank in range(ranks)]
    torn: dict[int, list[str]] = {}
    for step in committed_steps(root / "ckpts"):
        for rank in range(ranks):
            found = load(step_path(root / "ckpts", step), rank=rank)
            wrong = differences(found, _expected(truth, rank, step))
            if wrong:
                torn.setdefault(step, []).extend(f"rank {rank}: {place}" for place in wrong)
    return torn


def _expected(truth: list[list[dict[str, Any]]], rank: int, step: int) -> dict[str, Any]:
    """Of each rank its own; buffers of the first one."""
    mine = truth[rank][step - 1]
    if "model" not in mine:
        return mine
    first = truth[0][step - 1]
    buffers = {name: value for name, value in first["model"].items() if _is_buffer(name)}
    expected = {**mine, "model": {**mine["model"], **buffers}}
    if "ema" in mine:
        ema = {name: value for name, value in first["ema"].items() if _is_buffer(name)}
        expected["ema"] = {**mine["ema"], **ema}
    return expected


def _is_buffer(name: str) -> bool:
    return "running_" in name or "num_batches" in name or name == "n_averaged"


def differences(found: Any, expected: Any, place: str = "") -> list[str]:
    """Where `found` lacks something of `expected`, or has it otherwise, bit by bit."""
    if isinstance(expected, torch.Tensor):
        same = isinstance(found, torch.Tensor) and _bits(found) == _bits(expected)
        return [] if same else [place]
    if isinstance(expected, dict):
        if not set(expected) <= set(found):
            return [f"{place}: {set(expected) - set(found)}"]
        return [at for k in expected for at in differences(found[k], expected[k], f"{place}.{k}")]
    if isinstance(expected, list | tuple):
        if len(found) != len(expected):
            return [place]
        pairs = enumerate(zip(found, expected, strict=True))
        return [at for i, (one, other) in pairs for at in differences(one, other, f"{place}.{i}")]
    return [] if found == expected else [f"{place}: {found!r}, not {expected!r}"]


def _bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    flat = tensor.detach().contiguous().view(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()
