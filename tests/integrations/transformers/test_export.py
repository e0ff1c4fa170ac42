"""A step as a directory of Hugging Face's: `from_pretrained` reads it, of whole models and of adapters."""

from __future__ import annotations

import errno
import json
import os
import resource
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2ForSequenceClassification,
    TrainerCallback,
)

import ckpt_core
from ckpt_core import (
    Checkpointer,
    ConfigError,
    CorruptCheckpoint,
    NotCommitted,
    UntrustedData,
    committed_steps,
    step_path,
)
from ckpt_transformers import AsyncCheckpoint, export
from ckpt_transformers.files import as_tensor
from tests.integrations.transformers.jobs import SMALL, DiesAt, gpt, own, plain, run, trainer_of


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
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere")
    for taken in (folder, dangling):
        with pytest.raises(ConfigError, match="is there already"):
            export(tmp_path / "ckpts", taken)
    (tmp_path / "link").symlink_to(step_path(tmp_path / "ckpts", 4))
    for within in (step_path(tmp_path / "ckpts", 4) / "a" / "b", tmp_path / "link" / "model"):
        with pytest.raises(ConfigError, match="is in a committed step"):
            export(tmp_path / "ckpts", within)
        assert not within.exists()


class Own:
    """A class that nobody knows to be harmless."""


def test_where_no_directory_is_meant_or_a_step_would_be_taken_for_one_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer_of(tmp_path, max_steps=2).train()
    root = tmp_path / "ckpts"
    monkeypatch.chdir(tmp_path)
    there = sorted(tmp_path.iterdir())
    for url in ("s3://bucket/model", Path("s3://bucket/model")):
        with pytest.raises(ConfigError, match="is a URL"):
            export(root, url)
    for folder in (root, tmp_path):
        with pytest.raises(ConfigError, match="has the name of a step"):
            export(root, step_path(folder, 999))
    assert sorted(tmp_path.iterdir()) == there
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert export(root, "~/model") == tmp_path / "home" / "model"


def test_what_is_no_tensor_is_named_and_no_trust_is_asked_for(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "ckpts") as ck:
        ck.save(1, {"model": {"w": torch.ones(3), "extra": Own()}, "files": {}})
    with pytest.raises(UntrustedData, match=r"Own, and from_pretrained .* without --to") as caught:
        export(tmp_path / "ckpts", tmp_path / "model")
    assert "trusted" not in str(caught.value)


def test_how_it_generates_is_exported_as_save_model_writes_it(tmp_path: Path) -> None:
    model = gpt()
    model.generation_config.update(max_new_tokens=7, do_sample=True)
    trainer = trainer_of(tmp_path, model=model, max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "stock"))
    expected = (tmp_path / "stock" / "generation_config.json").read_text()
    made = export(tmp_path / "ckpts", tmp_path / "made")
    filled = export(tmp_path / "ckpts", tmp_path / "filled", model=gpt(seed=1))
    assert (made / "generation_config.json").read_text() == expected
    assert (filled / "generation_config.json").read_text() == expected


class Letters:
    """A tokenizer that merges nothing, and says so."""

    def save_pretrained(self, folder: str | Path) -> None:
        (Path(folder) / "merges.txt").touch()


def test_a_file_of_the_tokenizer_may_be_empty(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=2)
    trainer.processing_class = Letters()  # type: ignore[assignment]
    trainer.train()
    folder = export(tmp_path / "ckpts", tmp_path / "model")
    assert (folder / "merges.txt").read_bytes() == b""


def test_all_is_durable_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, max_steps=2)
    synced: list[int] = []
    fsync, rename = os.fsync, os.rename

    def syncs(file: int) -> None:
        fsync(file)
        synced.append(os.fstat(file).st_ino)

    def renames(source: Path, target: Path) -> None:
        wanted = {path.stat().st_ino for path in (source, *Path(source).rglob("*"))}
        assert len(wanted) > 3
        assert wanted <= set(synced)
        rename(source, target)
        synced.clear()

    monkeypatch.setattr(os, "fsync", syncs)
    monkeypatch.setattr(os, "rename", renames)
    export(tmp_path / "ckpts", tmp_path / "new" / "model")
    assert (tmp_path / "new").stat().st_ino in synced


def test_a_root_without_steps_or_of_another_kind_is_named(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "ckpts") as checkpointer:
        with pytest.raises(NotCommitted):
            export(tmp_path / "ckpts", tmp_path / "model")
        checkpointer.save(1, {"weights": torch.zeros(3)})
    with pytest.raises(ConfigError, match=r"not saved by ckpt_transformers\.AsyncCheckpoint"):
        export(tmp_path / "ckpts", tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    "name", ["../../out.sh", "a/../../out.sh", "{}/out.sh", "mine/../../../adapter_config.json", ""]
)
def test_a_name_in_a_step_never_leads_out_of_the_directory(name: str, tmp_path: Path) -> None:
    wrong = name.format(tmp_path)
    files = {"config.json": as_tensor(b"{}"), wrong: as_tensor(b"{}")}
    with Checkpointer(tmp_path / "ckpts") as checkpointer:
        checkpointer.save(1, {"model": {"w": torch.ones(3)}, "files": files})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CorruptCheckpoint, match="no name of a file in a directory"):
        export(tmp_path / "ckpts", tmp_path / "model")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_disk_that_is_full_is_an_error_of_the_system_and_nothing_is_left(tmp_path: Path) -> None:
    run(tmp_path, max_steps=2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))  # its error comes the same way
    try:
        with pytest.raises(OSError, match=r"model") as raised:
            export(tmp_path / "ckpts", tmp_path / "made" / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG
    assert list((tmp_path / "made").iterdir()) == []


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


def _with_two() -> Any:
    model = _lora()
    model.add_adapter("other", model.peft_config["default"])
    return model


def _named() -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    return peft.get_peft_model(gpt(), config, adapter_name="mine")


@pytest.mark.parametrize("make", [_with_two, _named])
def test_all_adapters_are_exported_where_save_model_writes_them(make: Any, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, model=make(), max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "stock"))
    folder = export(tmp_path / "ckpts", tmp_path / "adapters")
    wanted = {path.relative_to(tmp_path / "stock") for path in tmp_path.glob("stock/**/adapter_*")}
    assert {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()} == wanted
    for name in wanted:
        ours, stock = folder / name, tmp_path / "stock" / name
        if name.suffix == ".json":
            assert json.loads(ours.read_text()) == json.loads(stock.read_text())
        else:
            assert _same(
                dict(sorted(load_file(ours).items())), dict(sorted(load_file(stock).items()))
            )


def _prompted(kind: str) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=2)
    return peft.get_peft_model(gpt(), config)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")  # PEFT does so
@pytest.mark.parametrize(
    "kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"]
)
def test_a_prompt_goes_on_bit_for_bit_and_is_exported_by_peft(kind: str, tmp_path: Path) -> None:
    expected = run(tmp_path / "whole", model=_prompted(kind), max_steps=6)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", DiesAt(3), model=_prompted(kind), max_steps=6)
    model = _prompted(kind)
    assert run(tmp_path / "cut", model=model, max_steps=6) == expected
    root, folder = tmp_path / "cut" / "ckpts", tmp_path / "adapter"
    with pytest.raises(ConfigError, match="pass model=, a PeftModel"):
        export(root, folder)
    assert not folder.exists()
    export(root, folder, model=_prompted(kind))
    read = pytest.importorskip("peft").PeftModel.from_pretrained(gpt(), folder).eval()
    words = torch.arange(10)[None]
    assert torch.equal(read(words).logits, model.eval()(words).logits)


class Waits(TrainerCallback):
    """Only a file of a committed step is shared, and these steps take no time."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        deadline = time.monotonic() + 60
        while state.global_step and state.global_step not in committed_steps(self._root):
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_the_frozen_base_of_an_adapter_is_not_written_again(tmp_path: Path) -> None:
    sharing = replace(SMALL, share_unchanged=True)
    saver = AsyncCheckpoint(tmp_path / "ckpts", options=sharing)
    waits = Waits(tmp_path / "ckpts")
    run(tmp_path, waits, saver=saver, model=_lora(), max_steps=8, save_steps=1)
    names = [
        {shard.stat().st_ino for shard in step_path(tmp_path / "ckpts", step).glob("shard-*")}
        for step in range(5, 9)
    ]
    assert all(first & second for first, second in pairwise(names)), names
    model = _lora()
    assert run(tmp_path, saver=AsyncCheckpoint(tmp_path / "ckpts"), model=model, max_steps=8)
    assert _same(ckpt_core.load(tmp_path / "ckpts", only=["model"])["model"], model.state_dict())


def test_a_model_of_ones_own_is_given(tmp_path: Path) -> None:
    run(tmp_path, max_steps=2)
    mine = gpt(seed=1)
    export(tmp_path / "ckpts", tmp_path / "model", model=mine)
    assert _same(mine.state_dict(), ckpt_core.load(tmp_path / "ckpts", only=["model"])["model"])


def test_weights_of_a_class_that_transformers_does_not_know_are_exported_as_they_are(
    tmp_path: Path,
) -> None:
    model = own()
    run(tmp_path, model=model, collator=plain, max_steps=2, eval_strategy="no")
    folder = export(tmp_path / "ckpts", tmp_path / "model")
    assert _same(type(model).from_pretrained(folder).state_dict(), model.state_dict())


def _with_a_new_head(folder: Path) -> Any:
    gpt().save_pretrained(folder)
    return GPT2ForSequenceClassification.from_pretrained(folder, num_labels=3, pad_token_id=0)


def _labelled(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = plain(rows)
    return {**batch, "labels": batch["labels"][:, 0] % 3}


def test_a_pretrained_model_with_a_new_head_is_exported_as_what_it_is(tmp_path: Path) -> None:
    model = _with_a_new_head(tmp_path / "base")
    run(tmp_path, model=model, collator=_labelled, max_steps=2)
    folder = export(tmp_path / "ckpts", tmp_path / "model")
    read = AutoModelForSequenceClassification.from_pretrained(folder)
    assert type(read) is GPT2ForSequenceClassification
    assert _same(read.state_dict(), model.state_dict())


def test_weights_of_another_model_than_the_given_one_are_told(tmp_path: Path) -> None:
    run(tmp_path, max_steps=2)
    other = _with_a_new_head(tmp_path / "base")
    with pytest.raises(ConfigError, match=r"another model than GPT2ForSeq.*pass model="):
        export(tmp_path / "ckpts", tmp_path / "model", model=other)
    assert not (tmp_path / "model").exists()
