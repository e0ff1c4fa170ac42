"""A transformer that trains on the device, with saves and without, and where its time goes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from ckpt_core.bench.contenders import Handle
from ckpt_core.bench.device.accelerator import Accelerator, Marks
from ckpt_core.bench.worker import Stalls
from ckpt_core.bench.workloads import Training, language_model, next_word_loss, token_batches


@dataclass
class DeviceTraining(Training):
    """Parameters and AdamW in float32, computing in bfloat16; gradients of a few batches in each step."""

    kind: str
    parts: int

    @classmethod
    def on(cls, accelerator: Accelerator, size: dict[str, Any], parts: int) -> Self:
        """As `Training.start`."""
        torch.manual_seed(0)
        with accelerator.device:
            model = language_model(size["width"], size["layers"], size["vocabulary"])
        batches = [accelerator.put(one) for one in token_batches(size, torch.default_generator)]
        try:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        except RuntimeError:  # not for this backend
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        training = cls(model, optimizer, itertools.cycle(batches), accelerator.device.type, parts)
        training.step(lambda: None)
        return training

    def _backward(self) -> None:
        self.optimizer.zero_grad()
        for _ in range(self.parts):
            batch = next(self.batches)
            with torch.autocast(self.kind, torch.bfloat16):
                loss = next_word_loss(self.model(batch[:, :-1]), batch)
            loss.backward()  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class Window:
    """Steps that followed one another without a pause.

    Attributes:
        step_s: of each, as the device has it; waiting for the host counts.
        call_s: of each call of save.
        stall_s: of each save: the call, and the host's wait before the update.
    """

    step_s: list[float] = field(default_factory=list)
    call_s: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)


def window(
    training: Training,
    accelerator: Accelerator,
    save: Callable[[], Handle],
    *,
    every: int,
    steps: int,
) -> Window:
    """So many steps, saving after each `every`-th from the first on; 0 saves never.

    Nobody waits for a step, so that the host runs ahead as it does in training. What is in flight at the
    end is waited for outside the clock.
    """
    found, stalls, marks = Window(), Stalls(), Marks(accelerator)

    def timed() -> Handle:
        began = time.perf_counter()
        handle = save()
        found.call_s.append(time.perf_counter() - began)
        return handle

    accelerator.drain()
    marks.mark()
    for number in range(steps):
        training.step(stalls.before_update)
        if every and number % every == 0:
            stalls.start(timed)
        marks.mark()
    found.step_s = marks.seconds()
    stalls.finish()
    found.stall_s = stalls.seconds
    return found
