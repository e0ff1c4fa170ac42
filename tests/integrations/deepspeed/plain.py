"""Jobs of ranks that never import ckpt_deepspeed: DeepSpeed and its tools alone, on what tools.py wrote.

Each folder holds one state twice: `ours`, and `plain`, which DeepSpeed's own engine wrote.
"""

from __future__ import annotations

import contextlib
import functools
import io
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint import DeepSpeedCheckpoint, ZeROCheckpoint, ds_to_universal

from tests.integrations.deepspeed.training import Model, config, digest, engine, train, weights

BOTH = ("ours", "plain")
TAG, LEAN, AT, END = "global_step2", "lean", 2, 4
UNIVERSAL = f"{TAG}_universal"

FP32: dict[str, list[str]] = {
    "whole": [],
    "sharded": ["--max_shard_size", "5KB"],
    "without frozen": ["--exclude_frozen_parameters"],
    "of a tag": ["--tag", LEAN, "--exclude_frozen_parameters"],
}
"""Arguments of zero_to_fp32.py, as in a shell."""
SAFE = ["--safe_serialization", "--max_shard_size", "9KB"]
"""For models that share no weights: safetensors refuses the others, after DeepSpeed has read them."""


# -- jobs ------------------------------------------------------------------------------------------


def converted(folder: Path, tied: bool) -> dict[str, Any]:
    """zero_to_fp32.py and zero_to_torch.py, the copies that lie beside the tags: what differs."""
    _alone()
    found: dict[str, Any] = {}
    if dist.get_rank() == 0:
        for name, arguments in FP32.items() if tied else [("safetensors", SAFE)]:
            found[name] = _compared(folder, name, "zero_to_fp32.py", arguments)
        found["bf16"] = _compared(folder, "bf16", "zero_to_torch.py", ["--dtype", "bf16"])
    dist.barrier()
    return found


def universal(folder: Path) -> dict[str, Any]:
    """ds_to_universal.py, into the save directories, as its users do: what differs."""
    _alone()
    found: dict[str, Any] = {}
    if dist.get_rank() == 0:
        for kind in BOTH:
            arguments = ["--input_folder", str(folder / kind / TAG)]
            arguments += ["--output_folder", str(folder / kind / UNIVERSAL)]
            arguments += ["--inject_missing_state", "--num_extract_workers", "1"]
            found[f"said of {kind}"] = run_script(
                ds_to_universal.__file__, [*arguments, "--num_merge_workers", "1"]
            )
        found["differ"] = differences(*(folder / kind / UNIVERSAL for kind in BOTH))
        found["files"] = len([*(folder / "ours" / UNIVERSAL).rglob("*.pt")])
        found["latest"] = (folder / "ours" / "latest_universal").read_text()
    dist.barrier()
    return found


def resumed(folder: Path, zero: int, dtype: str, tied: bool) -> dict[str, Any]:
    """Plain DeepSpeed loads our directory, without a tag and with one, and trains on."""
    _alone()
    found = {}
    for tag in (None, TAG):
        made = engine(zero, dtype, ours=False, seed=7, tied=tied)
        path, client = made.load_checkpoint(str(folder / "ours"), tag=tag)
        loaded = digest(made)
        train(made, AT, END)
        found[str(tag)] = [Path(path).parent.name, client["step"], loaded, digest(made)]
        made.destroy()
    return found


def opened(folder: Path) -> dict[str, Any]:
    """Every file of the tags through torch.load, in each way that DeepSpeed's tools use: what differs."""
    _alone()
    ways: dict[str, dict[str, Any]] = {
        "plainly": {"weights_only": False},
        "mapped": {"weights_only": False, "mmap": True, "map_location": "cpu"},
        "by a function": {"weights_only": False, "map_location": lambda storage, _: storage},
        "by a device": {"weights_only": False, "map_location": torch.device("cpu")},
        "on meta": {"weights_only": False, "map_location": "meta"},
        "weights only": {"weights_only": True},
        "weights only, mapped": {"weights_only": True, "mmap": True},
    }
    names = sorted(path.relative_to(folder / "ours") for path in folder.glob("ours/*/*.pt"))
    differ = []
    for name in names:
        for way, arguments in ways.items():
            loads = [
                functools.partial(torch.load, folder / kind / name, **arguments) for kind in BOTH
            ]
            found = [attempt(load) for load in loads]
            if not same(*found):
                differ.append(f"{name} {way}")
    return {"files": [str(name) for name in names], "differ": differ}


def inspected(folder: Path, zero: int) -> dict[str, Any]:
    """The classes of deepspeed.checkpoint that walk a tag: what they find in each."""
    _alone()
    found: dict[str, Any] = {"differ": []}
    if zero == 3:  # they know no ZeRO-3: DeepSpeedCheckpoint looks for mp_rank_*
        return found
    states = []
    for kind in BOTH:
        whole, parts = DeepSpeedCheckpoint(folder / kind / TAG), ZeROCheckpoint(folder / kind / TAG)
        whole.validate_files()
        found[kind] = {
            "models": [Path(path).name for path in whole.mp_rank_files],
            "parts": [Path(path).name for path in parts.file_list],
            "degrees": [whole.tp_degree, whole.pp_degree, whole.dp_degree, whole.world_size],
        }
        ranks = [whole.get_zero_checkpoint_state(0, 0, rank) for rank in range(whole.dp_degree)]
        narrower = DeepSpeedCheckpoint(folder / kind / TAG, dp_degree=1)
        merged = attempt(functools.partial(narrower.get_zero_checkpoint_state, 0, 0, 0))
        states.append([*ranks, whole.get_2d_parallel_state(0, 0), merged])
    found["differ"] = [
        number for number, pair in enumerate(zip(*states, strict=True)) if not same(*pair)
    ]
    return found


def inference(folder: Path, dtype: str, tied: bool) -> dict[str, Any]:
    """A ZeRO-3 engine without an optimizer: the partitions of the weights that it has loaded."""
    _alone()
    found = {}
    for kind in BOTH:
        torch.manual_seed(7)
        made, *_ = deepspeed.initialize(
            model=Model(tied=tied), config=config(3, "bf16", ours=False)
        )
        load = functools.partial(
            made.load_checkpoint, str(folder / kind), load_optimizer_states=False
        )
        attempt(load)  # 0.19.8 has loaded by the time it raises
        found[kind] = weights(made)
    return found


# -- commands --------------------------------------------------------------------------------------


def _compared(folder: Path, name: str, script: str, arguments: list[str]) -> dict[str, Any]:
    said, places = {}, []
    for kind in BOTH:
        places.append(folder / "converted" / name / kind)
        root = folder / kind
        said[kind] = run_script(str(root / script), [str(root), str(places[-1]), *arguments])
    return {
        "said": said,
        "differ": differences(*places),
        "files": sorted(path.name for path in places[0].glob("*")),
    }


def run_script(script: str, arguments: list[str]) -> str:
    """As `python script arguments` would, in this process; what it raised, or ''."""
    with _as_main(script, arguments), contextlib.redirect_stdout(io.StringIO()):
        said = attempt(functools.partial(runpy.run_path, script, run_name="__main__"))
    return said if isinstance(said, str) else ""


def attempt(act: Callable[[], Any]) -> Any:
    """What it returns, or what it raises as a text: plain DeepSpeed fails here and there, and so shall we."""
    try:
        return act()
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"


@contextlib.contextmanager
def _as_main(script: str, arguments: list[str]) -> Iterator[None]:
    kept = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    sys.modules.pop("zero_to_fp32", None)  # zero_to_torch.py takes the one beside it
    try:
        yield
    finally:
        sys.argv, sys.path = kept


# -- comparing -------------------------------------------------------------------------------------


def differences(first: Path, second: Path) -> list[str]:
    """Files that only one directory has, or that hold other things; whole paths if there is nothing."""
    names = [{path.relative_to(root) for path in root.rglob("*")} for root in (first, second)]
    if not names[0]:
        return [f"{first} is empty"]
    found = sorted(str(name) for name in names[0] ^ names[1])
    for name in sorted(names[0] & names[1]):
        if (first / name).is_file() and not _same_files(first / name, second / name):
            found.append(str(name))
    return found


def _same_files(first: Path, second: Path) -> bool:
    if first.suffix not in (".pt", ".bin"):
        return first.read_bytes() == second.read_bytes()
    return same(*(torch.load(path, weights_only=False) for path in (first, second)))


def same(first: Any, second: Any) -> bool:
    """Whether two trees hold the same, bit for bit, in tensors and objects of the same kinds.

    Whether a tensor asks for gradients is not compared: torch.save keeps that mark for a tensor inside a
    graph, such as DeepSpeed's fp32 partitions, and we do not.
    """
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return _form(first) == _form(second) and (first.is_meta or torch.equal(first, second))
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if hasattr(first, "__dict__") and not callable(first):
        return same(vars(first), vars(second))
    return bool(first == second)


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.device)


def _alone() -> None:
    assert "ckpt_deepspeed" not in sys.modules and "ckpt_core" not in sys.modules
