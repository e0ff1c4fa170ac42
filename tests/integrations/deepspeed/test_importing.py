"""What `ckpt-core import` says of tags that it does not take; real ones are imported in test_engine.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import ConfigError, CorruptCheckpoint, verify
from ckpt_core.cli.importing import import_source
from ckpt_core.cli.requests import ImportRequest

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


def test_what_is_no_file_of_torch_is_refused(tag: Path, tmp_path: Path) -> None:
    (tag / "nvme").mkdir()
    with pytest.raises(ConfigError, match="holds nvme"):
        import_source(ImportRequest(tag, str(tmp_path / "new")))
