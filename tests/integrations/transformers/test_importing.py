"""A run changes over in its middle, from what Trainer saved by itself: to the same bits. And back."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import ckpt_core
from ckpt_core import ConfigError, CorruptCheckpoint, committed_steps
from ckpt_core.cli.exporting import export_step
from ckpt_core.cli.importing import import_source
from ckpt_core.cli.requests import ExportRequest, ImportRequest
from tests.integrations.transformers.jobs import DiesAt, gpt, own, plain, run, run_stock

WEIGHTS = "model.safetensors"
PLACES = (4, 6)
"""In the middle of the first epoch, and at its end."""
ARGUMENTS: dict[str, Any] = {
    "max_steps": 10,
    "logging_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "metric_for_best_model": "loss",
    "greater_is_better": True,  # of a loss: the first evaluation is the best, and stays so
    "load_best_model_at_end": True,
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stock")
    run_stock(folder, **ARGUMENTS)
    return folder / "out"


@pytest.mark.parametrize("place", PLACES)
def test_a_run_changes_over_in_its_middle(place: int, stock: Path, tmp_path: Path) -> None:
    source = stock / f"checkpoint-{place}"
    import_source(ImportRequest(source, str(tmp_path / "ckpts")))
    assert committed_steps(tmp_path / "ckpts") == (place,)
    expected = run_stock(tmp_path / "stock", resume=str(source), **ARGUMENTS)
    shutil.copytree(tmp_path / "ckpts", tmp_path / "cut" / "ckpts")
    assert run(tmp_path, **ARGUMENTS) == expected
    assert committed_steps(tmp_path / "ckpts")[-1] == 10
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", DiesAt(place + 3), **ARGUMENTS)
    again = run(tmp_path / "cut", **ARGUMENTS)
    assert again["model"] == expected["model"], "the best is still that of Trainer"
    assert again["optimizer"] == expected["optimizer"]


def test_the_step_goes_back_by_export(stock: Path, tmp_path: Path) -> None:
    root = tmp_path / "ckpts"
    source = Path(shutil.copytree(stock / "checkpoint-4", tmp_path / "c"))
    (source / "merges.txt").touch()  # as of a tokenizer that merges nothing
    import_source(ImportRequest(source, str(root)))
    export_step(ExportRequest(str(root), tmp_path / "model", to="transformers"))
    assert (tmp_path / "model" / "merges.txt").read_bytes() == b""
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    expected = AutoModelForCausalLM.from_pretrained(stock / "checkpoint-4").state_dict()
    assert list(found) == list(expected)
    assert all(map(torch.equal, found.values(), expected.values()))


def _in_parts(stock: Path, folder: Path) -> Path:
    """A checkpoint whose weights are in several files."""
    shutil.copytree(stock / "checkpoint-4", folder)
    (folder / "model.safetensors").unlink()
    gpt().save_pretrained(folder, max_shard_size="8KB")
    return folder


def _imported(folder: Path, root: Path) -> dict[str, torch.Tensor]:
    import_source(ImportRequest(folder, str(root)))
    found: dict[str, torch.Tensor] = ckpt_core.load(root, only=["model"])["model"]
    return found


@pytest.mark.parametrize("parts", ["gone", "left"])
def test_the_weights_are_those_that_transformers_takes(
    parts: str, stock: Path, tmp_path: Path
) -> None:
    folder = _in_parts(stock, tmp_path / "c")
    if parts == "gone":  # as a save in one file leaves it: with the index of the one before
        for file in folder.glob("model-*"):
            file.unlink()
    later = gpt(seed=1)
    save_file({name: one.clone() for name, one in later.state_dict().items()}, folder / WEIGHTS)
    found = _imported(folder, tmp_path / "r")
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    assert all(torch.equal(found[name], one) for name, one in later.state_dict().items())


def test_weights_in_several_files_of_torch_are_imported(stock: Path, tmp_path: Path) -> None:
    folder = _in_parts(stock, tmp_path / "c")
    expected = _imported(folder, tmp_path / "a")
    index = folder / "model.safetensors.index.json"
    held = json.loads(index.read_text())["weight_map"]
    for name in set(held.values()):
        torch.save(load_file(folder / name), folder / f"{name}.bin")
        (folder / name).unlink()
    index.unlink()
    text = json.dumps({"weight_map": {key: f"{name}.bin" for key, name in held.items()}})
    (folder / "pytorch_model.bin.index.json").write_text(text)
    found = _imported(folder, tmp_path / "b")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())


def test_weights_that_the_index_names_are_all_there(stock: Path, tmp_path: Path) -> None:
    folder = _in_parts(stock, tmp_path / "c")
    part = max(folder.glob("model-*"))
    *_, name = weights = load_file(part)
    del weights[name]
    save_file(weights, part)
    with pytest.raises(CorruptCheckpoint, match=f"lacks {name}, which its index names"):
        import_source(ImportRequest(folder, str(tmp_path / "r")))
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CorruptCheckpoint, match=r"index\.json cannot be read"):
        import_source(ImportRequest(folder, str(tmp_path / "r")))
    assert not (tmp_path / "r").exists()


def test_what_is_no_file_in_the_directory_is_left_alone(stock: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(stock / "checkpoint-4", tmp_path / "c"))
    os.mkfifo(folder / "progress")
    import_source(ImportRequest(folder, str(tmp_path / "r")))
    assert "progress" not in ckpt_core.load(tmp_path / "r", only=["files"])["files"]


def _experts() -> Any:
    """The file of its weights has a name for each expert, the model one for all."""
    torch.manual_seed(0)
    size: dict[str, Any] = {"vocab_size": 64, "hidden_size": 8, "intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    return MixtralForCausalLM(
        MixtralConfig(**size, **heads, num_hidden_layers=1, max_position_embeddings=16)
    )


def test_weights_that_have_other_names_in_the_file_are_those_of_the_model(tmp_path: Path) -> None:
    more: dict[str, Any] = {"max_steps": 6, "logging_steps": 2, "collator": plain}
    # Not one that Trainer goes on with itself: it would leave the experts as they were made.
    expected = run_stock(tmp_path / "stock", model=_experts(), **more)
    source = tmp_path / "stock" / "out" / "checkpoint-4"
    import_source(ImportRequest(source, str(tmp_path / "ckpts")))
    assert run(tmp_path, model=_experts(), **more) == expected


def test_what_was_added_to_a_model_is_imported_as_it_is(tmp_path: Path) -> None:
    def with_a_scale() -> Any:
        model = gpt()
        model.scale = torch.nn.Parameter(torch.full((2,), 3.0))
        return model

    run_stock(tmp_path / "stock", model=with_a_scale(), max_steps=4)
    source = tmp_path / "stock" / "out" / "checkpoint-2"
    import_source(ImportRequest(source, str(tmp_path / "ckpts")))
    found = ckpt_core.load(tmp_path / "ckpts", only=["model"])["model"]
    assert sorted(found) == sorted(with_a_scale().state_dict())


def test_a_class_and_a_configuration_of_ones_own_are_imported_and_gone_on_with(
    tmp_path: Path,
) -> None:
    more: dict[str, Any] = {"max_steps": 6, "logging_steps": 2, "collator": plain}
    expected = run_stock(tmp_path / "stock", model=own(), **more)
    source = tmp_path / "stock" / "out" / "checkpoint-4"
    import_source(ImportRequest(source, str(tmp_path / "ckpts")))
    assert run(tmp_path, model=own(), **more) == expected


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("optimizer.pt", "from_pretrained takes it as it is"),
        ("trainer_state.json", "from_pretrained takes it as it is"),
        ("+adapter_config.json", "an adapter without its base"),
        ("+mine/adapter_config.json", "an adapter without its base"),
        ("+pytorch_model_fsdp_0", "saved under FSDP"),
        ("+global_step4", "--format deepspeed"),
    ],
)
def test_what_no_step_can_be_made_of_is_refused(
    wrong: str, text: str, stock: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(stock / "checkpoint-4", tmp_path / "c"))
    if wrong.startswith("+"):
        (folder / wrong[1:]).parent.mkdir(exist_ok=True)
        (folder / wrong[1:]).touch()
    else:
        (folder / wrong).unlink()
    with pytest.raises(ConfigError, match=text):
        import_source(ImportRequest(folder, str(tmp_path / "r")))
    assert not (tmp_path / "r").exists()


def test_damaged_weights_are_told_and_nothing_is_published(stock: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(stock / "checkpoint-4", tmp_path / "c"))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors cannot be read"):
        import_source(ImportRequest(folder, str(tmp_path / "r")))
    assert not (tmp_path / "r").exists()
