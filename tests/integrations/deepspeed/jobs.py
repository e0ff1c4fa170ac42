"""What ranks do in the tests. Each job makes engines of its own and returns what was found."""

from __future__ import annotations

import hashlib
import shutil
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import ckpt_core
import ckpt_deepspeed

STEPS, AT = 5, 3


def config(zero: int, dtype: str, *, ours: bool, **section: Any) -> dict[str, Any]:
    """A DeepSpeed configuration; `section` goes to `checkpoint_engine`."""
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": zero, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if dtype == "bf16":
        found["bf16"] = {"enabled": True}
    if ours:
        found["checkpoint_engine"] = {"type": "ckpt_core", **section}
    return found


class Model(nn.Module):
    """A frozen layer, shared weights and a buffer that every forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(32, 32)
        self.frozen.requires_grad_(False)
        self.first = nn.Linear(32, 32)
        self.tied = nn.Linear(32, 32)
        self.tied.weight = self.first.weight
        self.last = nn.Linear(32, 8)
        self.register_buffer("seen", torch.zeros(6000))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.last(self.tied(torch.relu(self.first(self.frozen(data)))))


def engine(zero: int, dtype: str, *, ours: bool = True, seed: int = 0, **section: Any) -> Any:
    """A fresh engine with its optimizer and a scheduler."""
    torch.manual_seed(seed)
    model = Model()
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    made, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2),
        config=config(zero, dtype, ours=ours, **section),
    )
    return made


def train(made: Any, begin: int, end: int) -> None:
    """Steps `begin` to `end`, each with its own data on each rank."""
    dtype = torch.bfloat16 if made.bfloat16_enabled() else torch.float32
    for step in range(begin, end):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        data = torch.randn(4, 32, generator=generator).to(dtype)
        made.backward(made(data).float().square().mean())
        made.step()


def digest(made: Any) -> str:
    """SHA-256 of parameters, buffer, optimizer state of this rank and scheduler."""
    found = hashlib.sha256()
    for tensor in _tensors(made):
        found.update(tensor.detach().float().contiguous().numpy().tobytes())
    found.update(repr(made.lr_scheduler.state_dict()).encode())
    return found.hexdigest()


def _tensors(made: Any) -> list[torch.Tensor]:
    params = list(made.module.parameters())
    if made.zero_optimization_stage() == 3:
        params = [param.ds_tensor for param in params]
    state = made.optimizer.state_dict()
    return [*params, made.module.seen, *_in(state)]


def _in(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [tensor for key in sorted(tree, key=str) for tensor in _in(tree[key])]
    if isinstance(tree, list | tuple):
        return [tensor for item in tree for tensor in _in(item)]
    return []


# -- jobs ------------------------------------------------------------------------------------------


def exact(folder: Path, zero: int, dtype: str) -> dict[str, Any]:
    """Train with a save at each step, and again from the one in the middle, by us and by plain DeepSpeed."""
    root = folder / "ours"
    made = engine(zero, dtype)
    kind = type(made.checkpoint_engine).__name__
    for step in range(STEPS):
        train(made, step, step + 1)
        made.save_checkpoint(str(root), client_state={"step": step + 1})
    ckpt_deepspeed.wait(root)
    end = digest(made)
    made.destroy()
    plain = engine(zero, dtype, ours=False)
    for step in range(AT):
        train(plain, step, step + 1)
    plain.save_checkpoint(str(folder / "plain"), client_state={"step": AT})
    train(plain, AT, STEPS)
    plain_end = digest(plain)
    plain.destroy()
    tag = f"global_step{AT}"
    return {
        "engine": kind,
        "latest": (root / "latest").read_text(),
        "whole": [ckpt_core.verify(path).ok for path in sorted(root.glob("global_step*"))],
        "end": end,
        "plain_end": plain_end,
        "ours_from_ours": _resumed(root, tag, zero, dtype, ours=True),
        "plain_from_ours": _resumed(root, tag, zero, dtype, ours=False),
        "ours_from_plain": _resumed(folder / "plain", tag, zero, dtype, ours=True),
    }


def _resumed(root: Path, tag: str, zero: int, dtype: str, *, ours: bool) -> str:
    made = engine(zero, dtype, ours=ours, seed=7)
    path, client = made.load_checkpoint(str(root), tag=tag)
    assert path is not None
    train(made, client["step"], STEPS)
    found = digest(made)
    made.destroy()
    return found


def tools(folder: Path, zero: int) -> dict[str, Any]:
    """DeepSpeed's own reader of ZeRO files, in this process, right after the save returned."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    made = engine(zero, "bf16")
    train(made, 0, 2)
    made.save_checkpoint(str(folder / "c"))
    state = get_fp32_state_dict_from_zero_checkpoint(str(folder / "c"))
    names = sorted(state)
    made.save_16bit_model(str(folder / "weights"))
    dist.barrier()
    flat = torch.load(folder / "weights" / "pytorch_model.bin")
    same = all(torch.equal(state[name].bfloat16(), flat[name]) for name in names)
    made.destroy()
    return {"names": names, "same": bool(same)}


def arguments(folder: Path) -> dict[str, Any]:
    """Tags, save_latest=False, client_state that changes at once, a tag saved twice, load_module_only."""
    root = folder / "c"
    made = engine(2, "bf16")
    train(made, 0, 1)
    client = {"tensor": torch.ones(50_000), "note": "first"}
    made.save_checkpoint(str(root), tag="best", client_state=client)
    client["tensor"].zero_()
    train(made, 1, 2)
    made.save_checkpoint(str(root), tag="aside", save_latest=False)
    made.save_checkpoint(str(root), tag="best", client_state={"note": "second"})
    ckpt_deepspeed.wait(root)
    again = engine(2, "bf16", seed=3)
    _, first = again.load_checkpoint(str(root), load_module_only=True)
    seen = again.module.seen[0].item()
    return {
        "latest": (root / "latest").read_text(),
        "tags": sorted(
            path.name for path in root.iterdir() if path.is_dir() and path.name[0] != "."
        ),
        "note": first["note"],
        "seen": seen,
        "left": "tensor" in first,
    }


def client_state(folder: Path) -> dict[str, Any]:
    """What is passed as client_state, and buffers, are those of the call."""
    root = folder / "c"
    made = engine(1, "fp32")
    train(made, 0, 1)
    client = {"tensor": torch.ones(500_000), "deep": {"list": [torch.ones(500_000)]}}
    made.save_checkpoint(str(root), client_state=client)
    client["tensor"].zero_()
    client["deep"]["list"][0].zero_()
    made.module.seen.zero_()
    _, found = engine(1, "fp32").load_checkpoint(str(root))
    state = torch.load(root / "global_step1" / "mp_rank_00_model_states.pt", weights_only=False)
    return {
        "tensor": found["tensor"].sum().item(),
        "deep": found["deep"]["list"][0].sum().item(),
        "seen": state["module"]["seen"][0].item(),
    }


def damaged(folder: Path) -> dict[str, Any]:
    """The newest tag loses a byte: without a tag the one before is taken, with one it is refused."""
    root = folder / "c"
    made = engine(1, "bf16")
    for step in range(3):
        train(made, step, step + 1)
        made.save_checkpoint(str(root), client_state={"step": step + 1})
    ckpt_deepspeed.wait(root)
    dist.barrier()
    if dist.get_rank() == 0:
        path = next((root / "global_step3").glob("*rank_1*optim_states.pt"), None)
        path = path or next((root / "global_step3").glob("*optim_states.pt"))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    dist.barrier()
    again = engine(1, "bf16", seed=5)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        path, client = again.load_checkpoint(str(root))
    refused = ""
    try:
        again.load_checkpoint(str(root), tag="global_step3")
    except ckpt_core.CorruptCheckpoint as exc:
        refused = str(exc)
    return {
        "path": path,
        "step": client["step"],
        "refused": refused,
        "told": [str(one.message) for one in told if "damaged" in str(one.message)],
    }


def failing(folder: Path) -> dict[str, Any]:
    """A directory that cannot be written to: the save that follows says so, and training goes on."""
    root = folder / "c"
    made = engine(1, "bf16")
    train(made, 0, 1)
    made.save_checkpoint(str(root))
    ckpt_deepspeed.wait(root)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root / ".inflight", ignore_errors=True)
        (root / ".inflight").write_text("in the way")
    dist.barrier()
    problems = []
    for step in range(1, 4):
        train(made, step, step + 1)
        try:
            made.save_checkpoint(str(root))
            ckpt_deepspeed.wait(root)
        except ckpt_core.CkptError as exc:
            problems.append(str(exc))
        dist.barrier()
        if dist.get_rank() == 0 and step == 2:
            (root / ".inflight").unlink()
        dist.barrier()
    return {"problems": problems, "latest": (root / "latest").read_text()}
