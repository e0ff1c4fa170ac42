"""Correctness before figures: the bits of every committed step, beside a training that writes late."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ckpt_core
from ckpt_core.bench.device.accelerator import Accelerator
from ckpt_core.checkpointer import Checkpointer
from ckpt_core.options import Options

_SMALL_LEAVES = 100
_OPTIONS: dict[str, Any] = {"keep_last": None, "chunk_bytes": "256KiB", "staging_bytes": "4MiB"}
"""Chunks that are used again many times in one save."""


class _Job:
    """Leaves of many forms. Half of them change right behind the barrier, the others right before a save."""

    def __init__(self, machine: Accelerator, leaf_bytes: int) -> None:
        self._machine = machine
        torch.manual_seed(0)
        many = leaf_bytes // 4
        made = {f"large{n}": torch.rand(many) for n in range(4)}
        made |= {f"small{n}": torch.rand(200).bfloat16() for n in range(_SMALL_LEAVES)}
        made |= {"turned": torch.rand(many // 64, 64).t(), "count": torch.tensor(7)}
        self.on_device = {name: machine.put(tensor) for name, tensor in made.items()}
        self.state = {**self.on_device, "host": torch.rand(many)}

    def change(self, *, late: bool) -> None:
        """Every second leaf, in the device's own time."""
        for tensor in list(self.on_device.values())[late::2]:
            self._machine.run(partial(tensor.add_, 1))
        if late:
            self.state["host"].add_(1)

    def scramble(self) -> None:
        """Nothing is equal by accident afterwards."""
        for tensor in self.on_device.values():
            self._machine.run(partial(tensor.fill_, -1))
        self.state["host"].fill_(-1)

    def bits(self) -> dict[str, Tensor]:
        """As they are when the device comes to it; whole after a `drain`."""
        found = {"host": self.state["host"].clone()}
        for name, tensor in self.on_device.items():
            self._machine.run(partial(_note, found, name, tensor))
        return found


def _note(found: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    found[name] = tensor.clone()


def wrong_steps(
    root: Path, machine: Accelerator, *, mode: str, leaf_bytes: int, steps: int
) -> list[str]:
    """Save every step of a small job, and restore the last one in place.

    Returns:
        What does not hold the bits that training had: "step 3", "restored".
    """
    job, expected = _Job(machine, leaf_bytes), {}
    with Checkpointer(root, Options(mode=mode, **_OPTIONS), devices=machine.devices) as ck:
        for step in range(steps):
            ck.wait_staged()
            job.change(late=False)
            machine.run(machine.spin)
            job.change(late=True)
            expected[f"step {step}"] = job.bits()
            ck.save(step, job.state)
        ck.wait()
        job.scramble()
        ck.restore(job.state)
        restored = job.bits()
    machine.drain()
    wanted = expected[f"step {steps - 1}"]
    wrong = [name for name, bits in expected.items() if not _equal(_saved(root, name), bits)]
    return wrong if _equal(restored, wanted) else [*wrong, "restored"]


def _saved(root: Path, name: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = ckpt_core.load(root / f"step-{int(name.split()[1]):012d}")
    return found


def _equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    pairs: Iterable[tuple[Tensor, Tensor]] = ((found[name], wanted[name]) for name in wanted)
    return all(torch.equal(one.cpu(), other.cpu()) for one, other in pairs)
