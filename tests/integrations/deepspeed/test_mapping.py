"""What is loaded through a mapping stays what it was, whatever becomes of the file."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_deepspeed.mapping import Mappings

PAGE = mmap.PAGESIZE
ODD = b"disk\xe9\xe2\x80\xa8"
"""A name of bytes that are no UTF-8, and of some that Python takes for an end of line."""


def stay(storage: Any, location: str) -> Any:
    """As DeepSpeed has it for the model's file."""
    return storage


def saved(path: Path) -> dict[str, Any]:
    large = torch.randn(700_001)
    tree = {"module": {"w": large, "tied": large[5:], "small": torch.randn(9)}, "step": 3}
    torch.save(tree, path)
    return tree


def same(found: dict[str, Any], tree: dict[str, Any]) -> bool:
    names = ("w", "tied", "small")
    return found["step"] == 3 and all(
        torch.equal(found["module"][name], tree["module"][name]) for name in names
    )


def mapped(path: Path) -> bool:
    return os.fsencode(path) in Path("/proc/self/maps").read_bytes()


def test_what_is_kept_of_a_mapped_file_does_not_follow_it(tmp_path: Path) -> None:
    path = tmp_path / "mp_rank_00_model_states.pt"
    tree, mappings = saved(path), Mappings()
    with mappings.while_loading(allowed=True):
        found = mappings.load(path, stay)
        assert mapped(path) and same(found, tree)
        assert found["module"]["w"].data_ptr() + 20 == found["module"]["tied"].data_ptr()
    path.write_bytes(bytes(path.stat().st_size))
    assert same(found, tree)
    with path.open("r+b") as file:
        file.truncate(0)  # what were still the file's would end the process now
    assert same(found, tree)
    found["module"]["w"].zero_()
    assert not found["module"]["tied"].any()


def test_what_else_is_mapped_may_have_any_name(tmp_path: Path) -> None:
    path, other = tmp_path / "mp_rank_00_model_states.pt", tmp_path / os.fsdecode(ODD)
    tree, mappings = saved(path), Mappings()
    other.write_bytes(bytes(PAGE))
    with (
        other.open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ),
        mappings.while_loading(allowed=True),
    ):
        found = mappings.load(path, stay)
    assert same(found, tree) and not mapped(path)


def test_nothing_stays_mapped_for_what_is_small(tmp_path: Path) -> None:
    path = tmp_path / "mp_rank_00_model_states.pt"
    tree, mappings = saved(path), Mappings()
    with mappings.while_loading(allowed=True):
        small = mappings.load(path, stay)["module"]["small"]
        assert not mapped(path)
    assert torch.equal(small, tree["module"]["small"])


@pytest.mark.parametrize(
    ("name", "allowed", "location"),
    [
        ("mp_rank_00_model_states.pt", False, stay),
        ("mp_rank_00_model_states.pt", True, "cpu"),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", True, stay),
    ],
)
def test_all_else_is_read(tmp_path: Path, name: str, allowed: bool, location: Any) -> None:
    tree, mappings = saved(tmp_path / name), Mappings()
    with mappings.while_loading(allowed=allowed):
        found = mappings.load(tmp_path / name, location)
        assert not mapped(tmp_path / name)
    assert same(found, tree)


def test_a_file_is_read_where_mappings_are_shared_or_it_is_no_archive(tmp_path: Path) -> None:
    path, mappings = tmp_path / "mp_rank_00_model_states.pt", Mappings()
    tree = saved(path)
    with (
        torch.serialization.set_default_mmap_options(mmap.MAP_SHARED),
        mappings.while_loading(allowed=True),
    ):
        found = mappings.load(path, stay)
        assert not mapped(path) and same(found, tree)
    torch.save(tree, path, _use_new_zipfile_serialization=False)
    with mappings.while_loading(allowed=True):
        assert same(mappings.load(path, stay), tree)
