"""What `ckpt-core import` says of tags that it does not take; real ones are imported in test_engine.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import ConfigError, CorruptCheckpoint, verify
from ckpt_core.cli.importing import import_source
from ckpt_core.cli.requests import ImportRequest
from ckpt_core.system.files import Files
from tests.crash.layers import hooked

MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"


@pytest.fixture
def tag(tmp_path: Path) -> Path:
    """Files of a tag's names, with plain contents."""
    folder = tmp_path / "old" / "global_step6"
    folder.mkdir(parents=True)
    torch.save({"module": {"w": torch.arange(50_000.0)}, "global_steps": 6}, folder / MODEL)
    torch.save({"optimizer_state_dict": {"m": torch.ones(9)}}, folder / OPTIMIZER)
    (folder.parent / "latest").write_text(folder.name)
    return folder


@pytest.mark.parametrize("named", ["the tag", "its directory"])
def test_the_files_of_a_tag_are_committed_as_one(named: str, tag: Path, tmp_path: Path) -> None:
    root = tmp_path / "new"
    import_source(ImportRequest(tag if named == "the tag" else tag.parent, str(root)))
    assert (root / "latest").read_text() == tag.name and verify(root / tag.name).ok
    for name in (MODEL, OPTIMIZER):
        old, new = torch.load(tag / name), torch.load(root / tag.name / name)
        assert list(old) == list(new)
    assert torch.equal(torch.load(root / tag.name / MODEL)["module"]["w"], torch.arange(50_000.0))
    with pytest.raises(ConfigError, match="is there already: --force"):
        import_source(ImportRequest(tag, str(root)))
    with pytest.raises(ConfigError, match="saved by this engine"):
        import_source(ImportRequest(root, str(tmp_path / "other")))
    tag.rename(tag.with_name("global_step7"))
    with pytest.raises(ConfigError, match="go on from global_step7 instead"):
        import_source(ImportRequest(tag.with_name("global_step7"), str(root)))


def test_a_tag_is_replaced_in_its_place(tag: Path) -> None:
    import_source(ImportRequest(tag.parent, str(tag.parent), force=True))
    assert verify(tag).ok


def test_the_tag_may_be_the_working_directory(
    tag: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tag)
    import_source(ImportRequest(Path(), str(tmp_path / "new")))
    assert (tmp_path / "new" / "latest").read_text() == tag.name
    assert verify(tmp_path / "new" / tag.name).ok


def test_a_tag_that_changes_meanwhile_is_not_committed(
    tag: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hook(name: str, args: tuple[Any, ...], do: Callable[[], Any]) -> Any:
        if args[0].name == MODEL:
            # What lies beside the tag, as of a job that goes on, is none of it.
            (tag.parent / "latest").write_text("global_step7")
            os.utime(changing, ns=(1, 1))
        return do()

    monkeypatch.setattr("ckpt_core.checkpointer.Files", lambda: hooked(Files, hook, ("create",)))
    changing = tag.parent / "latest"
    import_source(ImportRequest(tag.parent, str(tmp_path / "new")))
    (tag.parent / "latest").write_text(tag.name)
    changing = tag / OPTIMIZER
    with pytest.raises(CorruptCheckpoint, match=f"{OPTIMIZER} changed while it was read"):
        import_source(ImportRequest(tag.parent, str(tmp_path / "other")))
    assert not (tmp_path / "other" / tag.name).exists()


def test_a_damaged_file_publishes_nothing(tag: Path, tmp_path: Path) -> None:
    data = (tag / OPTIMIZER).read_bytes()
    (tag / OPTIMIZER).write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptCheckpoint, match="nothing was imported"):
        import_source(ImportRequest(tag, str(tmp_path / "new")))
    found = [path.name for path in (tmp_path / "new").iterdir() if path.name[0] != "."]
    assert found == []


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({"dp_world_size": 2}, "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ({"mp_world_size": 2}, "mp_rank_01_model_states.pt, zero_pp_rank_0_mp_rank_01"),
        ({"without": OPTIMIZER}, OPTIMIZER),
    ],
    ids=["a rank", "a slice of the model", "all optimizers"],
)
def test_a_tag_that_lacks_files_of_ranks_is_refused(
    tag: Path, tmp_path: Path, changes: dict[str, Any], lacks: str
) -> None:
    model = {"global_steps": 6, "dp_world_size": 1, "mp_world_size": 1, "param_shapes": [{}]}
    torch.save(model | changes, tag / MODEL)
    if "without" in changes:
        (tag / changes["without"]).unlink()
    with pytest.raises(ConfigError, match=f"lacks {lacks}"):
        import_source(ImportRequest(tag, str(tmp_path / "new")))
    assert not (tmp_path / "new" / tag.name).exists()


def layered(tag: Path, numbers: tuple[int, ...], **says: Any) -> None:
    """Make it a tag of a pipeline with files of these layers."""
    torch.save({"global_steps": 6, "module": None} | says, tag / MODEL)
    for number in numbers:
        torch.save({"w": torch.ones(3)}, tag / f"layer_{number:02d}-model_states.pt")


SHAPES = {"0.w": (3,), "2.w": (3,), "3.w": (3,)}


@pytest.mark.parametrize(
    ("numbers", "says", "lacks"),
    [
        ((0, 2, 3), {}, "layer_01"),
        ((1, 2, 11), {}, "layer_00-model_states.pt, layer_03.*, ...: if each"),
        ((0, 3), {"param_shapes": [SHAPES]}, "layer_02-model_states.pt: if"),
        (
            (0, 3),
            {"param_shapes": [{"0.w": (3,)}], "frozen_param_shapes": {"2.w": (3,)}},
            "layer_02",
        ),
        ((0, 3), {"param_shapes": [{"0.w": (3,)}], "buffer_names": ["2.seen"]}, "layer_02"),
        ((0, 2, 3), {"param_shapes": [SHAPES, {"tied_modules.ends.w": (3,)}]}, "layer_01"),
        ((0, 1, 2, 3), {}, None),
        ((0, 2, 3), {"param_shapes": [SHAPES]}, None),
    ],
)
def test_a_pipeline_without_a_layer_is_refused_unless_that_layer_holds_nothing(
    tag: Path, tmp_path: Path, numbers: tuple[int, ...], says: dict[str, Any], lacks: str | None
) -> None:
    layered(tag, numbers, **says)
    if lacks is not None:
        with pytest.raises(ConfigError, match=f"lacks {lacks}"):
            import_source(ImportRequest(tag, str(tmp_path / "new")))
        assert not (tmp_path / "new" / tag.name).exists()
    import_source(ImportRequest(tag, str(tmp_path / "new"), force=lacks is not None))
    assert verify(tmp_path / "new" / tag.name).ok


@pytest.mark.parametrize(
    ("without", "is_zero"),
    [
        ("layer_1_expert_2_mp_rank_00_model_states.pt", True),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", False),
        ("expp_rank_0_mp_rank_00_optim_states.pt", False),
        (None, True),
        (None, False),
    ],
)
def test_a_tag_that_lacks_files_of_experts_is_refused(
    tag: Path, tmp_path: Path, without: str | None, is_zero: bool
) -> None:
    says = {"num_experts": [4, 3], "param_shapes": [{}] if is_zero else None}
    torch.save({"global_steps": 6, "module": {}} | says, tag / MODEL)
    experts = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)]
    names = [f"layer_{of}_expert_{one}_mp_rank_00_model_states.pt" for of, one in experts]
    names += [] if is_zero else [f"expp_rank_{n}_mp_rank_00_optim_states.pt" for n in range(2)]
    for name in names:
        if name != without:
            torch.save({"w": torch.ones(3)}, tag / name)
    if without is None:
        import_source(ImportRequest(tag, str(tmp_path / "new")))
        return
    with pytest.raises(ConfigError, match=f"lacks {without}"):
        import_source(ImportRequest(tag, str(tmp_path / "new"), force=True))
    assert not (tmp_path / "new" / tag.name).exists()


def test_what_is_no_file_of_torch_is_refused(tag: Path, tmp_path: Path) -> None:
    (tag / "nvme").mkdir()
    with pytest.raises(ConfigError, match="holds nvme"):
        import_source(ImportRequest(tag, str(tmp_path / "new")))
