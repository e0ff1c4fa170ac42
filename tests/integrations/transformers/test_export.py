"""A step as a directory of Hugging Face's: `from_pretrained` reads it, of whole models and of adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import ckpt_core
from ckpt_core import Checkpointer, ConfigError, NotCommitted
from ckpt_transformers import export
from tests.integrations.transformers.jobs import DiesAt, gpt, run, trainer_of


def _same(first: Any, second: Any) -> bool:
    return list(first) == list(second) and all(
        torch.equal(first[key], second[key]) for key in first
    )


def test_from_pretrained_reads_the_newest_step(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=4)
    trainer.train()
    folder = export(tmp_path / "ckpts", tmp_path / "model")
    read = AutoModelForCausalLM.from_pretrained(folder)
    assert _same(read.state_dict(), trainer.model.state_dict())
    assert (folder / "config.json").is_file()
    with pytest.raises(ConfigError, match="is there already"):
        export(tmp_path / "ckpts", folder)


def test_a_root_without_steps_or_of_another_kind_is_named(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "ckpts") as checkpointer:
        with pytest.raises(NotCommitted):
            export(tmp_path / "ckpts", tmp_path / "model")
        checkpointer.save(1, {"weights": torch.zeros(3)})
    with pytest.raises(ConfigError, match=r"not saved by ckpt_transformers\.AsyncCheckpoint"):
        export(tmp_path / "ckpts", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def _lora() -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    return peft.get_peft_model(gpt(), config)


def test_an_adapter_goes_on_bit_for_bit_and_is_exported(tmp_path: Path) -> None:
    expected = run(tmp_path / "whole", model=_lora(), max_steps=8)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", DiesAt(5), model=_lora(), max_steps=8)
    model = _lora()
    assert run(tmp_path / "cut", model=model, max_steps=8) == expected
    folder = export(tmp_path / "cut" / "ckpts", tmp_path / "adapter")
    read = pytest.importorskip("peft").PeftModel.from_pretrained(gpt(), folder)
    assert _same(read.state_dict(), model.state_dict())


def test_a_model_of_ones_own_is_given(tmp_path: Path) -> None:
    run(tmp_path, max_steps=2)
    mine = gpt(seed=1)
    export(tmp_path / "ckpts", tmp_path / "model", model=mine)
    assert _same(mine.state_dict(), ckpt_core.load(tmp_path / "ckpts", only=["model"])["model"])
