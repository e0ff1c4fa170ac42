"""The small files beside weights in Hugging Face's layout: gathered once, saved within every step."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.utils.import_utils import is_peft_available

ADAPTER = "ckpt_transformers_adapter.json"
"""Which entries of the model make up the adapter's file, and under which names. Missing where none do."""

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
    return {name: _tensor(data) for name, data in (found | _adapter(model)).items() if data}


def contents(files: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """The files again."""
    return {name: bytes(data.tolist()) for name, data in files.items()}


def _with_class(config: bytes, model: Any) -> bytes:
    """`save_pretrained` of a model notes its class; that of a configuration does not."""
    kept = json.loads(config)
    # What is there may be the class of a checkpoint, which a new head was put on. FSDP2 renames classes.
    kept["architectures"] = [type(model).__name__.removeprefix("FSDP")]
    kept.setdefault("dtype", str(getattr(model, "dtype", torch.float32)).removeprefix("torch."))
    return json.dumps(kept, indent=2, sort_keys=True).encode()


def _adapter(model: Any) -> dict[str, bytes]:
    """The adapter's configuration, and where its weights lie in the model."""
    if not _is_peft(model):
        return {}
    adapter = model.active_adapters[0]
    config = model.peft_config[adapter].to_dict() | {"inference_mode": True}
    found = {ADAPTER_CONFIG: json.dumps(config, indent=2, sort_keys=True, default=sorted).encode()}
    names = _names_of(model, adapter)
    return found if names is None else {**found, ADAPTER: json.dumps(names).encode()}


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


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
