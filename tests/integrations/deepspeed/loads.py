"""Jobs: parts of a checkpoint are loaded, by this engine and by DeepSpeed's own, with the same outcome."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import ckpt_deepspeed
from tests.integrations.deepspeed.modes import SMALL, Disk
from tests.integrations.deepspeed.ways import WIDTH, Stack, Way, advance, parts, start

CHOICES: dict[str, dict[str, Any]] = {
    "no optimizer": {"load_optimizer_states": False},
    "no scheduler": {"load_lr_scheduler_states": False},
    "neither": {"load_optimizer_states": False, "load_lr_scheduler_states": False},
    "module": {"load_module_only": True},
}


def choices(folder: Path, **how: Any) -> dict[str, Any]:
    """Choice -> what is held after loading and after a step, and what was returned, with either engine."""
    way, root = Way(**how), folder / "c"
    _saved(way, root)
    found: dict[str, Any] = {}
    for name, arguments in CHOICES.items():
        found[name] = {
            who: _loaded(way, root, section, arguments) for who, section in _engines().items()
        }
    return found


def _engines() -> dict[str, dict[str, Any] | None]:
    return {"ours": SMALL, "plain": None}


def _saved(way: Way, root: Path) -> dict[str, str]:
    made = start(way, SMALL)
    for step in range(3):
        advance(made, way, step, step + 1)
        made.save_checkpoint(str(root), client_state={"step": step + 1})
    found = parts(made)
    made.destroy()
    return found


def _loaded(
    way: Way, root: Path, section: dict[str, Any] | None, arguments: dict[str, Any]
) -> dict[str, Any]:
    made = start(way, section, seed=7)
    path, client = made.load_checkpoint(str(root), **arguments)
    found = {"at once": parts(made), "path": path, "client": sorted(client), "step": client["step"]}
    advance(made, way, 3, 4)
    found["after a step"] = parts(made)
    made.destroy()
    return found


def edges(folder: Path, zero: int) -> dict[str, Any]:
    """Saved before the first step and loaded into the same engine; loaded and saved again at once."""
    way, root = Way(zero=zero, dtype="bf16"), folder / "c"
    made = start(way, SMALL)
    made.save_checkpoint(str(root))
    if zero < 3:  # DeepSpeed wants a pristine model there
        made.load_checkpoint(str(root), load_optimizer_states=False)
    advance(made, way, 0, 2)
    made.save_checkpoint(str(root), client_state={"step": 2})
    end = parts(made)
    made.destroy()
    again = start(way, SMALL, seed=7)
    again.load_checkpoint(str(root))
    loaded = parts(again)
    again.save_checkpoint(str(root), tag="again")
    again.destroy()
    last = start(way, None, seed=8)
    last.load_checkpoint(str(root))
    found = parts(last)
    last.destroy()
    return {"ends": [end, loaded, found], "latest": (root / "latest").read_text()}


def frozen(folder: Path, zero: int) -> dict[str, Any]:
    """`exclude_frozen_parameters` leaves out the same names; they stay as they are on loading."""
    way = Way(zero=zero)
    found: dict[str, Any] = {}
    for who, section in _engines().items():
        root = folder / who
        made = start(way, section)
        advance(made, way, 0, 1)
        made.save_checkpoint(str(root), tag="all")
        made.save_checkpoint(str(root), tag="some", exclude_frozen_parameters=True)
        ckpt_deepspeed.wait()
        made.destroy()
        dist.barrier()
        found[who] = [_keys(root / tag) for tag in ("all", "some")]
    made = start(way, SMALL, seed=7)
    before = [tensor.clone() for tensor in made.module.frozen.parameters()]
    made.load_checkpoint(str(folder / "ours"), load_module_strict=False)
    after = list(made.module.frozen.parameters())
    found["kept"] = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    made.destroy()
    return found


def _keys(tag: Path) -> dict[str, list[str]]:
    path = next(tag.glob("*model_states.pt"))
    state = torch.load(path, weights_only=False)
    fragments = state.get("frozen_param_fragments") or {}
    return {"module": sorted(state["module"]), "fragments": sorted(fragments)}


class Other(Stack):
    """Without one layer of `Stack`, and with one more."""

    def __init__(self) -> None:
        super().__init__()
        del self.last
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.head(self.counting(self.first(self.frozen(data))))


def models(folder: Path, zero: int) -> dict[str, Any]:
    """Another model takes what it knows, with load_module_strict=False; a function of the user's loads."""
    way, root = Way(zero=zero), folder / "c"
    _saved(way, root)
    found: dict[str, Any] = {}
    for who, section in _engines().items():
        torch.manual_seed(7)
        made, *_ = deepspeed.initialize(
            model=Other(), optimizer=_adam, config=way.configuration(section)
        )
        refused = ""
        try:
            made.load_checkpoint(str(root), load_optimizer_states=False)
        except RuntimeError as exc:
            refused = type(exc).__name__
        made.load_checkpoint(str(root), load_module_strict=False, load_optimizer_states=False)
        taken: list[str] = []
        made.load_checkpoint(
            str(root),
            load_module_only=True,
            custom_load_fn=lambda src, dst, taken=taken: taken.extend(sorted(src)),
        )
        tensors = [tensor.double().sum().item() for tensor in made.module.state_dict().values()]
        found[who] = {"refused": refused, "taken": taken, "tensors": tensors}
        made.destroy()
    return found


def _adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def older(folder: Path) -> dict[str, Any]:
    """ZeRO-3 without optimizer states: the weights are those of the tag that was asked for."""
    way, root = Way(zero=3, dtype="bf16"), folder / "c"
    _saved(way, root)
    found = []
    for tag, section, optimizer in (
        ("global_step1", None, True),
        ("global_step1", SMALL, False),
        ("global_step3", SMALL, False),
    ):
        made = start(way, section, seed=7)
        path, _ = made.load_checkpoint(str(root), tag=tag, load_optimizer_states=optimizer)
        found.append([Path(path).parent.name, parts(made)["parameters"]])
        made.destroy()
    return {"loaded": found}


def inference(folder: Path) -> dict[str, Any]:
    """A ZeRO-3 engine without optimizer, which has no checkpoint engine, loads right after the save."""
    way, root = Way(zero=3, dtype="bf16"), folder / "c"
    with Disk().inside():
        made = start(way, SMALL)
        advance(made, way, 0, 2)
        made.save_checkpoint(str(root))
        torch.manual_seed(7)
        model, *_ = deepspeed.initialize(model=Stack(), config=way.configuration(SMALL))
        assert model.checkpoint_engine is None
        # Once the weights are there, this release asks for a method that such an engine does not have.
        with contextlib.suppress(AttributeError):
            model.load_checkpoint(str(root), load_optimizer_states=False)
        found = [_sums(made), _sums(model)]
        made.destroy()
    return {"weights": found}


def _sums(made: Any) -> list[float]:
    params = list(made.module.parameters())
    with deepspeed.zero.GatheredParameters(params):
        return [param.double().sum().item() for param in params]


def experts(folder: Path, **how: Any) -> dict[str, Any]:
    """Bytes of the files of experts, and of the tensors in them."""
    way, root = Way(**how), folder / "c"
    _saved(way, root)
    dist.barrier()
    found = {}
    for path in sorted((root / "global_step3").glob("*_expert_*")):
        tensors = list(torch.load(path, weights_only=False).values())
        stored = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors
        }
        found[path.name] = [
            sum(tensor.nbytes for tensor in tensors),
            sum(storage.nbytes() for storage in stored.values()),
        ]
    return found
