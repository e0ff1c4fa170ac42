"""Trainer's directories, for `ckpt-core import`, and Hugging Face's layout, for its `export`."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckpt_core import ConfigError, CorruptCheckpoint
from ckpt_core.cli.elsewhere import Target
from ckpt_core.cli.importing import Asked, Source, Tree, load_torch, step_of

_INSTALL = "pip install 'ckpt-core[transformers]'"
_STATE = "trainer_state.json"
_PARTS = ("optimizer", "scheduler", "scaler")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_INDEX = ".index.json"
_ADAPTER = "adapter_config.json"
_NO_FILES = (".safetensors", ".bin", ".pt", ".pth", _INDEX)
_SHOWN = 4


def _recognises(path: Path) -> bool:
    if not path.is_dir() or (path / ".metadata").exists():
        return False
    return (path / _STATE).is_file() or (
        (path / "config.json").is_file() and any(path.glob("*.safetensors"))
    )


def _read(asked: Asked) -> Tree:
    """The tree that AsyncCheckpoint goes on from; what Trainer does not save is left to what Trainer does."""
    folder = asked.path
    _check(folder)
    text = (folder / _STATE).read_text()
    try:
        step = step_of(asked, json.loads(text)["global_step"])
    except (ValueError, KeyError, TypeError) as exc:
        raise CorruptCheckpoint(f"{folder / _STATE} cannot be read: {exc}", path=folder) from exc
    parts = {
        name: load_torch(path, trusted=asked.trusted)
        for name in _PARTS
        if (path := folder / f"{name}.pt").is_file()
    }
    tree = {"model": _weights(folder, trusted=asked.trusted), **parts, "trainer": text}
    loop = {"imported": True, "loss": _zero(), "last_logged": step, "boundary": False}
    loop |= dict.fromkeys(("epoch", "updates", "length", "best", "best_before"), 0)
    rng = {"ranks": list(_generators(folder, trusted=asked.trusted))}
    return Tree(step, {**tree, "loop": loop, "rng": rng, "files": dict(_files(folder))})


def _check(folder: Path) -> None:
    """Raises ConfigError for what no step can be made of, with what to do."""
    why = ""
    if not (folder / _STATE).is_file() or not (folder / "optimizer.pt").is_file():
        why = (
            "has weights, and not the state of a training (optimizer.pt, trainer_state.json): "
            "from_pretrained takes it as it is"
        )
    if any(folder.rglob(_ADAPTER)):
        why = "has an adapter without its base"
    if any(folder.glob("pytorch_model_fsdp*")):
        why = "was saved under FSDP"
    if any(folder.glob("global_step*")):
        why = "was saved under DeepSpeed: import the tag in it, --format deepspeed; or Trainer"
    if why:
        raise ConfigError(
            f"{folder} {why}. Trainer itself goes on from a directory of its own, by "
            f"train(resume_from_checkpoint={str(folder)!r}), and what follows is saved here",
            path=folder,
        )


def _weights(folder: Path, *, trusted: bool) -> dict[str, Any]:
    """All that the model's `state_dict()` has: a file has one name of weights that are tied."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    files, names = _files_of_weights(folder)
    for name in files:
        try:
            if name.endswith(".safetensors"):
                found |= load_file(folder / name)
            else:
                found |= load_torch(folder / name, trusted=trusted)
        except (SafetensorError, OSError) as exc:
            raise CorruptCheckpoint(
                f"{folder / name} cannot be read, and nothing was imported: {exc}", path=folder
            ) from exc
    if lacking := sorted(names - found.keys()):
        shown = ", ".join(lacking[:_SHOWN]) + (", ..." if lacking[_SHOWN:] else "")
        raise CorruptCheckpoint(
            f"{folder} lacks {shown}, which its index names, and nothing was imported: its files are of "
            f"two saves, or not all of them are there",
            path=folder,
        )
    return _with_tied(found, folder)


def _files_of_weights(folder: Path) -> tuple[list[str], set[str]]:
    """The files that Transformers takes, the first that there are; and what they must hold.

    One that is whole comes before an index, which a later save into the directory leaves behind.
    """
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return [name], set()
        index = folder / f"{name}{_INDEX}"
        if index.is_file():
            try:
                held = json.loads(index.read_text())["weight_map"]
                return sorted(set(held.values())), set(held)
            except (ValueError, KeyError, TypeError, AttributeError) as exc:
                raise CorruptCheckpoint(f"{index} cannot be read: {exc}", path=folder) from exc
    return [_WEIGHTS[0]], set()


def _with_tied(weights: dict[str, Any], folder: Path) -> dict[str, Any]:
    from ckpt_transformers.exporting import model_of_config

    model = model_of_config(folder)
    if model is None:
        return weights
    model.tie_weights()
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    for tied in names.values():
        there = [name for name in tied if name in weights]
        weights |= {name: weights[there[0]] for name in tied if there}
    live = model.state_dict()
    if any(name not in live or live[name].shape != weights[name].shape for name in weights):
        weights = _converted(type(model), folder, weights) or weights
    return {name: weights[name] for group in (live, weights) for name in group if name in weights}


def _converted(kind: Any, folder: Path, weights: dict[str, Any]) -> dict[str, Any] | None:
    """Under the names that the model has: the file may have others, as of experts that are one tensor.

    None where something was added to the model, or taken from it: then the file's names are the model's.
    """
    import torch

    # What config.json says may round.
    widest = functools.reduce(torch.promote_types, {value.dtype for value in weights.values()})
    model, told = kind.from_pretrained(
        folder, dtype=widest, output_loading_info=True, ignore_mismatched_sizes=True
    )
    wrong = any(told[f"{what}_keys"] for what in ("missing", "unexpected", "mismatched"))
    return None if wrong else model.state_dict()


def _zero() -> Any:
    import torch

    return torch.tensor(0.0)


def _generators(folder: Path, *, trusted: bool) -> Iterator[dict[str, Any]]:
    """Of each rank, as RngState has them."""
    alone = folder / "rng_state.pth"
    ranks = sorted(
        folder.glob("rng_state_*.pth"), key=lambda path: int(path.stem.rpartition("_")[2])
    )
    for path in [alone] if alone.is_file() else ranks:
        state = load_torch(path, trusted=trusted)
        made = {"python": state["python"], "torch": state["cpu"], "numpy": state["numpy"]}
        for kind in state.keys() - {"python", "cpu", "numpy"}:
            value = state[kind]
            made[kind] = list(value) if isinstance(value, list | tuple) else [value]
        yield made


def _files(folder: Path) -> Iterator[tuple[str, Any]]:
    """Configuration, tokenizer and the like, as `export` writes them."""
    from ckpt_transformers.files import as_tensor

    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not path.is_file() or name == _STATE or name.endswith(_NO_FILES):
            continue
        yield name, as_tensor(path.read_bytes())


def _write(step: str, folder: Path) -> None:
    from ckpt_transformers import export

    export(step, folder)


SOURCE = Source(
    name="transformers",
    what="a checkpoint of Hugging Face's Trainer",
    place=20,
    recognises=_recognises,
    read=_read,
    install=_INSTALL,
)
TARGET = Target(name="transformers", write_directory=_write, install=_INSTALL)
