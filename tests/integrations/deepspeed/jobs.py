"""What ranks do in the tests. Each job makes engines of its own and returns what was found."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import ckpt_core
import ckpt_deepspeed
from ckpt_core.cli.importing import import_source
from ckpt_core.cli.requests import ImportRequest
from ckpt_deepspeed import engine as engine_module
from tests.integrations.deepspeed.modes import SMALL, Disk
from tests.integrations.deepspeed.plain import attempt
from tests.integrations.deepspeed.training import Model, config, digest, engine, train

STEPS, AT = 5, 3
PRESETS = {(1, "fp32"): "pccheck", (2, "fp32"): "deepfreeze"}


# -- jobs ------------------------------------------------------------------------------------------


def exact(folder: Path, zero: int, dtype: str) -> dict[str, Any]:
    """Train with a save at each step, and again from the one in the middle, by us and by plain DeepSpeed."""
    root = folder / "ours"
    preset = PRESETS.get((zero, dtype), "default")
    made = engine(zero, dtype, preset=preset)
    kind = type(made.checkpoint_engine).__name__
    options = made.checkpoint_engine.settings.options
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
    imported = _imported(folder, zero, dtype) if dtype == "fp32" else {}
    return imported | {
        "engine": kind,
        "preset": options == ckpt_core.Options.preset(preset),
        "latest": (root / "latest").read_text(),
        "whole": [ckpt_core.verify(path).ok for path in sorted(root.glob("global_step*"))],
        "end": end,
        "plain_end": plain_end,
        "ours_from_ours": _resumed(root, tag, zero, dtype, ours=True),
        "plain_from_ours": _resumed(root, tag, zero, dtype, ours=False),
        "ours_from_plain": _resumed(folder / "plain", tag, zero, dtype, ours=True),
    }


def _imported(folder: Path, zero: int, dtype: str) -> dict[str, Any]:
    """The same from what `ckpt-core import` has made of the plain tag, by both engines."""
    root = folder / "imported"
    if dist.get_rank() == 0:
        import_source(ImportRequest(folder / "plain", str(root), trusted=True, no_progress=True))
        assert ckpt_core.verify(root / f"global_step{AT}").ok
        with contextlib.suppress(ckpt_core.ConfigError):
            import_source(ImportRequest(folder / "plain", str(root), trusted=True))
            raise AssertionError("it is there already")
    dist.barrier()
    ways = {"ours": True, "plain": False}
    return {
        f"{way}_from_imported": _resumed(
            root, (root / "latest").read_text(), zero, dtype, ours=ours
        )
        for way, ours in ways.items()
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


class Restless(torch.nn.Module):
    """A frozen parameter and a tensor of the extra state that every forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(32, 600)
        self.key = torch.nn.Parameter(torch.zeros(20_000), requires_grad=False)
        self.count = torch.zeros(20_000)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.key.add_(1)
            self.count += 1
        return self.first(data)

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count.copy_(state["count"])


def restless(folder: Path, zero: int, most: int) -> dict[str, Any]:
    """What forward passes right behind a save, of which nothing can be written yet, make of it."""
    kept, engine_module._MOST_CLONED_BYTES = engine_module._MOST_CLONED_BYTES, most
    root, disk, model = folder / "c", Disk(), Restless()
    adam = torch.optim.AdamW(model.first.parameters())
    with disk.inside():
        made, *_ = deepspeed.initialize(
            model=model, optimizer=adam, config=config(zero, "fp32", ours=True, **SMALL)
        )
        data = torch.randn(4, 32)
        for step in range(2):
            made.backward(made(data).square().mean())
            made.step()
            if step == 0:
                made.save_checkpoint(str(root))
        with disk.still(root):
            timer = threading.Timer(0.3, disk.go_on)
            if most == 0:
                timer.start()
            made.save_checkpoint(str(root))
            for _ in range(3):
                made(data)
            disk.go_on()
            timer.cancel()
        made.destroy()
    engine_module._MOST_CLONED_BYTES = kept
    state = torch.load(root / "global_step2" / "mp_rank_00_model_states.pt", weights_only=False)
    found = [state["module"]["key"], state["module"]["_extra_state"]["count"]]
    return {
        "values": [tensor.unique().tolist() for tensor in found],
        "latest": (root / "latest").read_text(),
    }


def damaged(folder: Path) -> dict[str, Any]:
    """The newest tag is damaged, and asked for by name, too; then the one before is damaged as well."""
    root = folder / "c"
    made = engine(1, "bf16")
    for step in range(3):
        train(made, step, step + 1)
        made.save_checkpoint(str(root), client_state={"step": step + 1})
    ckpt_deepspeed.wait(root)
    dist.barrier()
    _damage(root / "global_step3")
    again = engine(1, "bf16", seed=5)
    found = _loaded(again, root)
    refused = ""
    try:
        again.load_checkpoint(str(root), tag="global_step3")
    except ckpt_core.CorruptCheckpoint as exc:
        refused = str(exc)
    _damage(root / "global_step2")
    return {**found, "refused": refused, "then": _loaded(again, root)}


def _damage(tag: Path) -> None:
    if dist.get_rank() == 0:
        path = next(tag.glob("*rank_1*optim_states.pt"), None) or next(tag.glob("*optim_states.pt"))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    dist.barrier()


def _loaded(made: Any, root: Path) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        path, client = made.load_checkpoint(str(root))
    damaged = [str(one.message) for one in told if "damaged" in str(one.message)]
    return {"path": path, "step": client["step"], "told": damaged}


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


def late(folder: Path) -> list[str]:
    """The key is there, and the engine was made before anybody knew of it."""
    made = engine(0, "fp32", ours=False)
    made.config["checkpoint_engine"] = {"type": "ckpt_core"}
    train(made, 0, 1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            made.save_checkpoint(str(folder / "c"))
    return [str(one.message) for one in told if "checkpoint_engine" in str(one.message)]


def untrained(folder: Path) -> dict[str, Any]:
    """ZeRO 3 without an optimizer, as a reference model has it: what is told, and what the advice gives."""
    torch.manual_seed(0)
    model = Model(tied=False)
    wanted = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    made, *_ = deepspeed.initialize(model=model, config=config(3, "bf16", ours=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told = [
            attempt(lambda: made.save_checkpoint(str(folder / "c"))),
            attempt(lambda: ckpt_deepspeed.attach(made)),
        ]
    with deepspeed.zero.GatheredParameters(list(made.module.parameters())):
        same = all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    made.destroy()
    return {"told": told, "left": (folder / "c").exists(), "same": same}


def scripts(folder: Path) -> dict[str, Any]:
    """DeepSpeed's scripts in the directory: left alone while they are as they should be."""
    import deepspeed.utils

    root = folder / "c"
    made = engine(1, "bf16")
    # The second one is in newer releases alone.
    utils = Path(deepspeed.utils.__file__).parent
    scripts = [utils / name for name in ("zero_to_fp32.py", "zero_to_torch.py")]
    scripts = [script for script in scripts if script.exists()]
    paths, found = [root / script.name for script in scripts], []
    for step in range(4):
        train(made, step, step + 1)
        made.save_checkpoint(str(root))
        dist.barrier()
        found.append([path.stat().st_mtime_ns for path in paths])
        dist.barrier()
        if step == 1 and dist.get_rank() == 0:
            paths[-1].write_text("damaged")
        dist.barrier()
    first, second, third, fourth = found
    return {
        "left alone": first == second and third == fourth,
        "replaced": third[-1] != second[-1],
        "whole": paths[-1].read_bytes() == scripts[-1].read_bytes(),
        "can be run": all(path.stat().st_mode & 0o100 for path in paths),
    }


def apart(folder: Path) -> list[int]:
    """How many of DeepSpeed's barriers have been passed whenever `client_state` is pickled."""
    made, passed, found = engine(3, "bf16"), [0], []
    runtime_dist = sys.modules["deepspeed.runtime.engine"].dist
    barrier = runtime_dist.barrier

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = barrier(*args, **kwargs)
        passed[0] += 1
        return result

    class Seen:
        def __reduce__(self) -> Any:
            found.append(passed[0])
            return int, ()

    train(made, 0, 1)
    runtime_dist.barrier = counted
    try:
        made.save_checkpoint(str(folder / "c"), client_state={"seen": Seen()})
    finally:
        runtime_dist.barrier = barrier
    ckpt_deepspeed.wait()
    return found
