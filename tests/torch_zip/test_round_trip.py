"""A filled file reads as what `torch.save` gives of the same tree with its tensors detached and cloned."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ckpt_core.torch_zip import plan_zip
from tests.torch_zip.zip_files import (
    TREES,
    Cloner,
    assert_alike,
    filled,
    loaded,
    planned,
    saved,
    ties,
    write,
)


@pytest.fixture(params=TREES)
def tree(request: pytest.FixtureRequest, seeded: int) -> Any:
    return TREES[request.param]()


@pytest.fixture
def no_crc() -> Iterator[None]:
    """`torch.save` writes no checksums, so that its files can equal ours."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(before)


def test_it_reads_as_what_torch_saves_of_detached_clones(tree: Any) -> None:
    ours, theirs = loaded(planned(tree)), loaded(saved(Cloner()(tree)))
    assert_alike(ours, theirs)
    assert ties(ours) == ties(theirs)


def test_it_is_byte_for_byte_what_torch_saves_without_checksums(tree: Any, no_crc: None) -> None:
    assert planned(tree) == saved(Cloner()(tree))


def test_every_way_to_load_gives_what_it_gives_of_torchs_file(tree: Any, tmp_path: Path) -> None:
    write(plan_zip(tree), tmp_path / "ours.pt")
    torch.save(Cloner()(tree), tmp_path / "theirs.pt")
    ways: list[dict[str, Any]] = [
        {"mmap": True, "weights_only": False},
        {"mmap": True, "weights_only": True},
        {"map_location": "cpu", "weights_only": True},
        {"map_location": torch.device("meta"), "weights_only": False},
        {"map_location": lambda storage, location: storage, "weights_only": False},
    ]
    for how in ways:
        assert_alike(_outcome(tmp_path / "ours.pt", how), _outcome(tmp_path / "theirs.pt", how))


def _outcome(path: Path, how: dict[str, Any]) -> Any:
    try:
        return torch.load(path, **how)
    except Exception as exc:  # the file cannot be read this way
        return type(exc)


def test_locations_in_the_file_are_those_of_the_tensors(tree: Any) -> None:
    def locations(data: bytes) -> list[str]:
        seen: list[str] = []
        loaded(data, map_location=lambda storage, location: seen.append(location))
        return seen

    assert locations(planned(tree)) == locations(saved(Cloner()(tree)))


def test_tensors_lie_where_torch_looks_for_them(tree: Any) -> None:
    plan = plan_zip(tree)
    reader = torch._C.PyTorchFileReader(io.BytesIO(filled(plan)))
    for extent in plan.layout.extents:
        assert reader.get_record_offset(extent.name) == extent.offset
        assert extent.offset % 64 == 0


def test_frames_and_extents_cover_the_file_once_and_ascend(tree: Any) -> None:
    layout = plan_zip(tree).layout
    spans = [(offset, len(data)) for offset, data in layout.frames]
    assert spans == sorted(spans)
    extents = [(extent.offset, extent.nbytes) for extent in layout.extents]
    assert extents == sorted(extents)
    end = 0
    for offset, nbytes in sorted(spans + extents):
        assert offset == end and nbytes > 0
        end += nbytes
    assert end == layout.file_bytes


def test_tensors_are_plain_and_flat_where_their_bytes_are_one_run(tree: Any) -> None:
    plan = plan_zip(tree)
    for extent, tensor in zip(plan.layout.extents, plan.tensors, strict=True):
        assert type(tensor) is Tensor and tensor.nbytes == extent.nbytes
        assert not tensor.requires_grad and not tensor.is_conj() and not tensor.is_neg()
        assert tensor.dim() == 1 or not tensor.is_contiguous()


def test_but_for_the_checksums_of_tensor_data_other_zip_programs_read_it(tree: Any) -> None:
    plan = plan_zip(tree)
    image = filled(plan)
    ours = zipfile.ZipFile(io.BytesIO(image))
    for extent in plan.layout.extents:
        info = ours.getinfo(f"archive/{extent.name}")
        assert info.CRC == 0
        info.CRC = zlib.crc32(image[extent.offset : extent.offset + extent.nbytes])
    assert ours.testzip() is None
    theirs = zipfile.ZipFile(io.BytesIO(saved(Cloner()(tree))))
    assert ours.namelist() == theirs.namelist()
    for name in ours.namelist():
        assert ours.read(name) == theirs.read(name) or name.endswith("serialization_id")


def test_without_checksums_zip_programs_complain_of_tensor_data() -> None:
    broken = zipfile.ZipFile(io.BytesIO(planned([torch.ones(3)]))).testzip()
    assert broken == "archive/data/0"


def test_a_loaded_file_is_planned_to_the_same_bytes(tree: Any) -> None:
    once = planned(tree)
    assert planned(loaded(once)) == once


def test_other_alignments_of_torch_are_followed() -> None:
    config = pytest.importorskip("torch.utils.serialization.config")
    if not hasattr(config.save, "storage_alignment"):
        pytest.skip("this torch knows one alignment")
    with config.patch("save.storage_alignment", 4096):
        plan = plan_zip([torch.ones(3), torch.zeros(5)])
    assert [extent.offset % 4096 for extent in plan.layout.extents] == [0, 0]
    assert_alike(loaded(filled(plan)), [torch.ones(3), torch.zeros(5)])


# -- random trees ------------------------------------------------------------------------------

_DTYPES = [torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.bool, torch.uint16]


@st.composite
def _views(draw: st.DrawFn, buffers: list[Tensor]) -> Tensor:
    """A view of one of the buffers, so that views overlap and repeat."""
    view = draw(st.sampled_from(buffers))
    for _ in range(draw(st.integers(0, 3))):
        if view.dim() == 0:
            break
        dim = draw(st.integers(0, view.dim() - 1))
        first, last = sorted(draw(st.tuples(*[st.integers(0, view.shape[dim])] * 2)))
        kinds = [
            view.transpose(0, dim),
            view.narrow(dim, first, last - first),
            view[draw(st.integers(0, view.shape[0] - 1))] if view.shape[0] else view,
            view[:: draw(st.integers(1, 3))],
            view.unsqueeze(dim),
            view.unsqueeze(dim).expand(*view.shape[:dim], 2, *view.shape[dim:]),
        ]
        view = draw(st.sampled_from(kinds))
    return view


@st.composite
def _trees(draw: st.DrawFn) -> Any:
    shapes = st.lists(st.integers(0, 5), max_size=3)
    buffers = [
        torch.randint(0, 2, draw(shapes)).to(draw(st.sampled_from(_DTYPES))) for _ in range(3)
    ]
    leaves = _views(buffers) | st.integers() | st.text(max_size=3) | st.none()
    keys = st.text(max_size=3) | st.integers(0, 9)
    trees = st.recursive(
        leaves,
        lambda parts: st.lists(parts, max_size=4) | st.dictionaries(keys, parts, max_size=4),
        max_leaves=12,
    )
    return draw(trees)


@given(tree=_trees())
def test_any_tree_of_views_reads_as_its_clones(tree: Any) -> None:
    plan = plan_zip(tree)
    ours, theirs = loaded(filled(plan), weights_only=True), loaded(saved(Cloner()(tree)))
    assert_alike(ours, theirs)
    assert ties(ours) == ties(theirs)
    assert len(saved(Cloner()(tree))) == plan.layout.file_bytes
