"""The small files beside weights in Hugging Face's layout: gathered once, saved within every step."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.utils.import_utils import is_peft_available

from ckpt_core import CorruptCheckpoint, step_path

ADAPTER = "ckpt_transformers_adapter.json"
"""Which entries of the model make up an adapter's file, and under which names. Missing where none do."""

ADAPTER_CONFIG = "adapter_config.json"


def small_files(trainer: Trainer) -> dict[str, torch.Tensor]:
    """What `Trainer.save_model` writes beside weights: configuration, tokenizer; as bytes by name."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("config", "generation_config"):
            if hasattr(getattr(model, part, None), "save_pretrained") and not _is_peft(model):
                getattr(model, part).save_pretrained(folder)
        tokens = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
        if tokens is not None:
            tokens.save_pretrained(folder)
        found = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
    if "config.json" in found:
        found["config.json"] = _with_class(found["config.json"], model)
    return {name: as_tensor(data) for name, data in (found | _adapters(model)).items()}


def as_tensor(data: bytes) -> torch.Tensor:
    """A file as a leaf; one of no bytes too, which `frombuffer` refuses."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def contents(files: dict[str, torch.Tensor], *, path: str) -> dict[str, bytes]:
    """The files again, of the step at `path`.

    Raises:
        CorruptCheckpoint: a name leads out of a directory. Whoever wrote the step chose the names.
    """
    for name in files:
        # Joined to a folder, an absolute one takes the folder's place.
        if name.startswith("/") or ".." in name.split("/") or name in ("", "."):
            text = f"{path} names a file {name!r}, which is no name of a file in a directory"
            raise CorruptCheckpoint(text, path=path)
    return {name: bytes(data.tolist()) for name, data in files.items()}


def _with_class(config: bytes, model: Any) -> bytes:
    """`save_pretrained` of a model notes its class; that of a configuration does not."""
    kept = json.loads(config)
    # What is there may be the class of a checkpoint, which a new head was put on. FSDP2 renames classes.
    kept["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    kept.setdefault("dtype", str(getattr(model, "dtype", torch.float32)).removeprefix("torch."))
    return json.dumps(kept, indent=2, sort_keys=True).encode()


def _adapters(model: Any) -> dict[str, bytes]:
    """Configurations of adapters, and where their weights lie in the model; in the folders that PEFT has."""
    found: dict[str, bytes] = {}
    for adapter in model.peft_config if _is_peft(model) else ():
        folder = "" if adapter == "default" else f"{adapter}/"
        config = model.peft_config[adapter].to_dict() | {"inference_mode": True}
        if config["task_type"] is None:  # without one, this is what AutoPeftModel goes by
            config["auto_mapping"] = _base_class(model)
        text = json.dumps(config, indent=2, sort_keys=True, default=sorted)
        found[folder + ADAPTER_CONFIG] = text.encode()
        if (names := _names_of(model, adapter)) is not None:
            found[folder + ADAPTER] = json.dumps(names).encode()
    return found


def _base_class(model: Any) -> dict[str, str]:
    """As PEFT notes the class of the base. FSDP2 puts one of its own before it."""
    classes = type(model.get_base_model()).__mro__
    kind = next(each for each in classes if not each.__name__.startswith("FSDP"))
    return {"base_model_class": kind.__name__, "parent_library": kind.__module__}


def _names_of(model: Any, adapter: str) -> dict[str, str] | None:
    """Names in the adapter's file -> names in the model; None where the file holds what PEFT computes."""
    if model.peft_config[adapter].is_prompt_learning:
        return None  # what its encoder returns; asking for it may draw random numbers
    from peft import get_peft_model_state_dict

    state = model.state_dict(keep_vars=True)
    homes = {id(tensor): name for name, tensor in state.items()}
    weights = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter)
    names = {name: homes.get(id(tensor)) for name, tensor in weights.items()}
    known = {name: home for name, home in names.items() if home is not None}
    return known if len(known) == len(names) else None


def _is_peft(model: Any) -> bool:
    if not is_peft_available():
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def step_named(name: str) -> int | None:
    """The step of which this is the name of the directory; None for any other name."""
    digits = name.removeprefix("step-")
    named = digits.isdecimal() and name == step_path(".", int(digits)).name
    return int(digits) if named else None
