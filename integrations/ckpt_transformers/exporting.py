"""A step in Hugging Face's layout: a directory that `from_pretrained` reads."""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file

import ckpt_core
from ckpt_core import ConfigError, UntrustedData, committed_steps, step_path
from ckpt_transformers.files import ADAPTER, ADAPTER_CONFIG, contents, step_named

_WEIGHTS = "model.safetensors"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_GENERATION = "generation_config.json"


def export(
    path: str | os.PathLike[str], directory: str | os.PathLike[str], *, model: Any = None
) -> Path:
    """Write a step as `Trainer.save_model` would: weights, configuration, tokenizer. Returns the directory.

    Takes no lock; works beside a run that is still training. Nothing is there before all of it is,
    durably. Of a model with adapters (PEFT) these are written, each where PEFT has it.

    Args:
        path: a step, or a root: then its newest step. A directory, or the URL of an object store.
        directory: must not be there yet; "~" is the home. No URL.
        model: one of the model's class, to be filled and written; for classes that are not of `transformers`
            itself, and for prompt, prefix and P-tuning. None: it is made of the configuration.

    Raises:
        ConfigError: `directory` is there, is a URL, or is within a step or named as one; the step was not
            saved by AsyncCheckpoint, or its weights are not those of `model`; or PEFT computes what an
            adapter's file holds, and `model` is None.
        NotCommitted: there is no step.
        UntrustedData: the model holds more than tensors and plain values.
        CorruptCheckpoint: a file of the step has a name that leads out of the directory; else, as
            UnknownFormat and RestoreError, as `ckpt_core.load`.
        OSError: the directory cannot be written. Nothing is left of it.
    """
    target = _place(directory)
    if os.path.lexists(target):
        raise ConfigError(f"directory={str(directory)!r} is there already: give another name")
    _check_outside(target)
    tree = _loaded(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    start = os.fsencode(target.name)[:100].decode(errors="ignore")
    with tempfile.TemporaryDirectory(prefix=f".{start}-", dir=target.parent) as name:
        folder = Path(name) / "export"
        folder.mkdir()
        files = contents(tree["files"], path=os.fspath(path))
        try:
            _write(folder, tree["model"], files, model)
        except SafetensorError as exc:  # of a write, as where the disk is full: no OSError
            raise OSError(*_reason(exc), str(target)) from exc
        _sync(folder, *folder.rglob("*"))  # first: a power cut leaves all of it there, or nothing
        os.rename(folder, target)
    _sync(target.parent)
    return target


def _loaded(path: str | os.PathLike[str]) -> Any:
    try:
        return ckpt_core.load(path, only=["model", "files"])
    except ConfigError as exc:
        text = f"{os.fspath(path)} was not saved by ckpt_transformers.AsyncCheckpoint: use ckpt-core export"
        raise ConfigError(text) from exc
    except UntrustedData as exc:
        raise UntrustedData(
            f"the model of {os.fspath(path)} holds a {exc.type_name}, and from_pretrained takes tensors "
            f"alone: leave it out of the model's state_dict(), or write its tensors by ckpt-core export, "
            f"without --to",
            type_name=exc.type_name,
            path=exc.path,
        ) from exc


def _place(directory: str | os.PathLike[str]) -> Path:
    text = os.fspath(directory)
    if "://" in text or re.match(r"[a-z0-9]+:/[^/]", text):  # a Path makes one "/" of two
        raise ConfigError(
            f"directory={text!r} is a URL, and from_pretrained reads directories: name one here, and copy it"
        )
    return Path(os.path.abspath(os.path.expanduser(text)))


def _check_outside(target: Path) -> None:
    """Raises ConfigError for a place within the directory of a step, which holds what was saved alone."""
    if step_named(target.name) is not None:
        raise ConfigError(f"{target} has the name of a step: readers would take it for one")
    folder = Path(os.path.realpath(target.parent))
    for place in (folder, *folder.parents):
        root = place.parent
        if place.name.startswith("step-") and place in [
            step_path(root, step) for step in committed_steps(root)
        ]:
            raise ConfigError(f"{target} is in a committed step: name a directory elsewhere")


def _reason(error: SafetensorError) -> tuple[int, str]:
    """The number and the text of the system's error that it tells of."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    number = int(found[1]) if found else errno.EIO
    return number, os.strerror(number) if found else str(error)


def _sync(*paths: Path) -> None:
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _write(
    folder: Path, weights: dict[str, torch.Tensor], files: dict[str, bytes], model: Any
) -> None:
    adapters = [Path(name).parent for name in files if Path(name).name == ADAPTER_CONFIG]
    homes = {at: files.pop(str(at / ADAPTER), None) for at in adapters}
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    if adapters and None not in homes.values():
        for at, names in homes.items():
            mine = {new: weights[old] for new, old in json.loads(names or "").items()}
            _save(mine, folder / at / _ADAPTER_WEIGHTS)
        return
    if model is None and adapters:
        raise ConfigError(
            "the step is of a model with an adapter whose file PEFT computes (prompt, prefix, P-tuning): "
            "pass model=, a PeftModel of the same configuration, which is filled, and written by PEFT"
        )
    model = model_of_config(folder) if model is None else model
    if model is None:
        _save(weights, folder / _WEIGHTS)
        return
    _fill(model, weights)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    model.save_pretrained(folder)
    if _GENERATION in files:  # over what is made of the configuration
        (folder / _GENERATION).write_bytes(files[_GENERATION])


def _fill(model: Any, weights: dict[str, torch.Tensor]) -> None:
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as exc:  # names or shapes that differ
        raise ConfigError(
            f"the step holds weights of another model than {type(model).__name__}: pass model=, one of the "
            f"class that was trained. {exc}"
        ) from exc


def model_of_config(folder: Path) -> Any:
    """A model without weights; None if its class or its configuration is none of `transformers`."""
    if not (folder / "config.json").is_file():
        return None
    read, _ = transformers.PreTrainedConfig.get_config_dict(folder, local_files_only=True)
    kind = getattr(transformers, (read.get("architectures") or [""])[0], None)
    if kind is None or read.get("model_type") not in transformers.CONFIG_MAPPING:
        return None
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        return kind(config)


def _save(weights: dict[str, torch.Tensor], path: Path) -> None:
    # Copies: safetensors takes no two names of the same memory.
    save_file({name: value.clone() for name, value in weights.items()}, path, {"format": "pt"})
