"""Jobs around DeepSpeed's own tools: what they read is written here, and what they made is loaded again.

plain.py has the jobs in between, of ranks that know nothing of us.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

import ckpt_deepspeed
from tests.integrations.deepspeed.modes import Disk
from tests.integrations.deepspeed.plain import AT, BOTH, END, LEAN, TAG, attempt
from tests.integrations.deepspeed.training import (
    config,
    digest,
    engine,
    engine_for,
    train,
    weights,
)

LOADS: dict[str, dict[str, Any]] = {
    "all": {},
    "no optimizer": {"load_optimizer_states": False},
    "module": {"load_module_only": True},
}


# -- one state, twice ------------------------------------------------------------------------------


def written(folder: Path, zero: int, dtype: str, tied: bool) -> dict[str, Any]:
    """Saved by us and by plain DeepSpeed."""
    made = engine(zero, dtype, tied=tied)
    train(made, 0, AT)
    _save_all(made, folder / "ours")
    ckpt_deepspeed.wait()
    names = [_names(folder / "ours"), _names(folder / "ours" / TAG)]
    with plainly(made):
        _save_all(made, folder / "plain")
    found = {"weights": weights(made), "saved": digest(made), "names": names}
    train(made, AT, END)
    found["end"] = digest(made)
    made.destroy()
    return found


def _save_all(made: Any, root: Path) -> None:
    made.save_checkpoint(str(root), tag=LEAN, exclude_frozen_parameters=True)
    made.save_checkpoint(str(root), client_state={"step": AT})
    made.save_16bit_model(str(root))


@contextmanager
def plainly(made: Any) -> Iterator[None]:
    """Inside, DeepSpeed's own engine saves."""
    kept, made.checkpoint_engine = made.checkpoint_engine, TorchCheckpointEngine(made._config)
    try:
        yield
    finally:
        made.checkpoint_engine = kept


def _names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


# -- loaded on other numbers of ranks --------------------------------------------------------------


def from_universal(
    folder: Path, zero: int, dtype: str, tied: bool, loads: list[str]
) -> dict[str, Any]:
    """By our engine from the directory made of our tag, and by a plain one from that of a plain tag."""
    found: dict[str, Any] = {}
    for what in loads:
        for kind in BOTH:
            settings = config(zero, dtype, ours=kind == "ours")
            settings["checkpoint"] = {"load_universal": True}
            made = engine_for(settings, tied=tied)
            found[f"{what} {kind}"] = _outcome(made, folder / kind, LOADS[what])
            if what == "all" and kind == "ours":
                found["weights"] = weights(made)
            train(made, AT, END)
            found[f"{what} {kind}"].append(digest(made))
            made.destroy()
    return found


def saved_beside_universal(folder: Path) -> dict[str, Any]:
    """A job goes on in the directory that holds what ds_to_universal.py has made."""
    root = folder / "ours"
    made = engine(1, "bf16")
    path, client = made.load_checkpoint(str(root))
    train(made, client["step"], END)
    made.save_checkpoint(str(root))
    ckpt_deepspeed.wait()
    settings = config(1, "bf16", ours=True) | {"checkpoint": {"load_universal": True}}
    made = engine_for(settings)
    again, _ = made.load_checkpoint(str(root))
    with Disk().inside():
        made.save_checkpoint(str(folder / "elsewhere"))
        durable = (folder / "elsewhere" / "latest").exists()
    ckpt_deepspeed.wait()
    return {
        "durable": durable,
        "from": Path(path).parent.name,
        "latest": (root / "latest").read_text(),
        "universal": Path(again).parent.name,
    }


class Counting(torch.optim.AdamW):
    """Keeps the number of steps in its groups, where elastic checkpoints look for it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for group in self.param_groups:
            group["step"] = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] += 1
        return super().step(closure)


def _elastic(zero: int, elastic: bool, *, ours: bool) -> Any:
    settings = config(zero, "bf16", ours=ours)
    settings["zero_optimization"]["elastic_checkpoint"] = elastic
    return engine_for(settings, seed=0 if ours else 7, optimizer=Counting)


def elastic_written(folder: Path, zero: int, elastic: bool) -> dict[str, Any]:
    """Tags for `elastic_loaded`."""
    made = _elastic(zero, elastic, ours=True)
    train(made, 0, AT)
    made.save_checkpoint(str(folder / "ours"), client_state={"step": AT})
    with plainly(made):
        made.save_checkpoint(str(folder / "plain"), client_state={"step": AT})
    found = {"saved": digest(made)}
    train(made, AT, END)
    found["end"] = digest(made)
    ckpt_deepspeed.wait()
    return found


def elastic_loaded(folder: Path, zero: int) -> dict[str, Any]:
    """By elastic engines and others, with the optimizer's states and without; what plain DeepSpeed raises."""
    found: dict[str, Any] = {}
    for elastic in (False, True):
        for what in ("all", "no optimizer"):
            for kind in BOTH:
                made = _elastic(zero, elastic, ours=kind == "ours")
                name = f"{'elastic' if elastic else 'rigid'} {what} {kind}"
                found[name] = _outcome(made, folder / kind, LOADS[what])
                if found[name][0][:1] == "/":
                    train(made, AT, END)
                    found[name].append(digest(made))
                made.destroy()
    return found


def _outcome(made: Any, root: Path, arguments: dict[str, Any]) -> list[Any]:
    """What was loaded; or what was raised."""
    loaded = attempt(lambda: made.load_checkpoint(str(root), **arguments))
    if isinstance(loaded, str):
        return [loaded.replace(str(root), "")]
    path, client = loaded
    return [str(path).replace(str(root), ""), client.get("step"), digest(made)]
