"""A training program from its start to its first step, with a clock: run as a file, so that it imports
what a user's program would, in that order, and nothing before.

    started.py save|start WAY ROOT STATE_BYTES BEGAN

`save` makes what `start` begins with. `start` prints seconds for each part as JSON; BEGAN is the monotonic
clock when the process was asked for.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

_WIDE, _NARROW = 1024, 128
_WIDE_FROM_BYTES = 2**28


class Ours:
    """`Checkpointer` with its defaults, every byte verified."""

    def load_library(self) -> None:
        from ckpt_core import Checkpointer, Options

        self._make: Any = lambda root: Checkpointer(root, Options(keep_last=1))

    def open(self, root: Path) -> None:
        self._engine = self._make(root / "steps")

    def save(self, model: Any, optimizer: Any) -> None:
        self._engine.save(1, {"model": model, "optimizer": optimizer})
        self._engine.close()

    def restore(self, model: Any, new_optimizer: Any) -> Any:
        optimizer = new_optimizer(model.to_empty(device="cpu"))
        if self._engine.restore({"model": model, "optimizer": optimizer}) is None:
            raise LookupError("no committed step to restore")
        return optimizer

    def close(self) -> None:
        self._engine.close()


class TorchLoad:
    """`torch.load(mmap=True)`, and what it gives in the place of the model's own tensors."""

    def load_library(self) -> None:
        """It is torch."""

    def open(self, root: Path) -> None:
        self._path = root / "state.pt"

    def save(self, model: Any, optimizer: Any) -> None:
        import torch

        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, self._path)

    def restore(self, model: Any, new_optimizer: Any) -> Any:
        import torch

        saved = torch.load(self._path, mmap=True, weights_only=True)
        model.load_state_dict(saved["model"], assign=True)
        optimizer = new_optimizer(model)
        optimizer.load_state_dict(saved["optimizer"])
        return optimizer

    def close(self) -> None:
        """Nothing is open."""


class Dcp(TorchLoad):
    """`dcp.load` into the states of a model and an optimizer that are there."""

    def load_library(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import state_dict

        self._dcp: Any = dcp
        self._states: Any = state_dict

    def open(self, root: Path) -> None:
        self._path = root / "dcp"

    def save(self, model: Any, optimizer: Any) -> None:
        self._dcp.save(self._state(model, optimizer), checkpoint_id=self._path, no_dist=True)

    def restore(self, model: Any, new_optimizer: Any) -> Any:
        optimizer = new_optimizer(model.to_empty(device="cpu"))
        state = self._state(model, optimizer)
        self._dcp.load(state, checkpoint_id=self._path, no_dist=True)
        self._states.set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return optimizer

    def _state(self, model: Any, optimizer: Any) -> dict[str, Any]:
        model_state, optimizer_state = self._states.get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}


WAYS: dict[str, type[Ours | TorchLoad]] = {
    "ckpt_core": Ours,
    "torch_save": TorchLoad,
    "dcp_save": Dcp,
}


class Laps:
    """Seconds of each part since the one before."""

    def __init__(self, began_s: float) -> None:
        self.seconds: dict[str, float] = {}
        self._last_s = began_s

    def end(self, part: str) -> None:
        now_s = time.monotonic()
        self.seconds[part] = now_s - self._last_s
        self._last_s = now_s


def make_model(state_bytes: int, device: str) -> Any:
    """With so many bytes of parameters and of what AdamW keeps for them, about."""
    import torch

    width = _WIDE if state_bytes >= _WIDE_FROM_BYTES else _NARROW
    layers = max(1, state_bytes // (12 * width * (width + 1)))
    with torch.device(device):
        return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])


def new_optimizer(model: Any) -> Any:
    """Fused, as whoever is in a hurry has it."""
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def step(model: Any, optimizer: Any) -> None:
    """Of training, on one sample."""
    import torch

    model(torch.ones(1, model[0].in_features)).sum().backward()
    optimizer.step()


def save(way: Ours | TorchLoad, root: Path, state_bytes: int) -> None:
    """A state that has taken one step."""
    way.load_library()
    way.open(root)
    model = make_model(state_bytes, "cpu")
    optimizer = new_optimizer(model)
    step(model, optimizer)
    way.save(model, optimizer)


def start(way: Ours | TorchLoad, root: Path, state_bytes: int, laps: Laps) -> None:
    """All that a program does until its first step is over."""
    laps.end("python")
    import torch.nn

    laps.end("torch")
    way.load_library()
    laps.end("import")
    model = make_model(state_bytes, "meta")
    # Its first use imports as much of torch again, which no way to restore is to pay for.
    new_optimizer(torch.nn.Linear(1, 1))
    laps.end("build")
    way.open(root)
    laps.end("open")
    optimizer = way.restore(model, new_optimizer)
    laps.end("restore")
    step(model, optimizer)
    laps.end("step")


def main(arguments: list[str]) -> None:
    """See the head of this file."""
    task, name, root, state_bytes, began = arguments
    laps, way = Laps(float(began)), WAYS[name]()
    if task == "save":
        save(way, Path(root), int(state_bytes))
        return
    start(way, Path(root), int(state_bytes), laps)
    way.close()
    print(json.dumps(laps.seconds))


if __name__ == "__main__":
    main(sys.argv[1:])
