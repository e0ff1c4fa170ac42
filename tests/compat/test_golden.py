"""Every release reads every golden step, whichever release wrote it."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_core

HERE = Path(__file__).parent
STEPS = sorted(path for path in HERE.glob("golden-v*/step-*") if path.is_dir())
GOLDEN = [
    (path, int(name.stem.removeprefix("rank-")))
    for path in STEPS
    for name in sorted(path.glob("rank-*.json"))
]
FILES = HERE / "golden-v3" / "global_step7"
STATES = {"golden-v1": "golden_state", "golden-v2": "golden_state_2"}
"""Name of the function of make_golden.py that builds what a version's step holds."""


def expected_state(step_dir: Path, rank: int) -> Any:
    version = step_dir.parent.name
    build = runpy.run_path(str(HERE / "make_golden.py"))[STATES[version]]
    return build() if version == "golden-v1" else build(rank)


def _label(value: object) -> str:
    return f"{value.parent.name}/{value.name}" if isinstance(value, Path) else f"rank {value}"


every_rank = pytest.mark.parametrize(("step_dir", "rank"), GOLDEN, ids=_label)
every_step = pytest.mark.parametrize("step_dir", STEPS, ids=_label)


def same(found: Any, expected: Any, place: str = "state") -> None:
    """Both have the same types and bits all the way down."""
    assert type(found) is type(expected), place
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), place
        assert bits(found) == bits(expected), place
    elif isinstance(expected, dict):
        assert list(found) == list(expected), place
        for key, value in expected.items():
            same(found[key], value, f"{place}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), place
        for index, value in enumerate(expected):
            same(found[index], value, f"{place}[{index}]")
    else:
        assert found == expected, place
        if isinstance(expected, float):
            assert math.copysign(1, found) == math.copysign(1, expected), place


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def test_there_is_a_golden_step_of_every_version_up_to_this_one() -> None:
    from ckpt_core.layout import FORMAT_VERSION

    wanted = {f"golden-v{version}" for version in range(1, FORMAT_VERSION + 1)}
    assert {path.parent.name for path in (*STEPS, FILES)} == wanted == {*STATES, "golden-v3"}


@every_rank
def test_a_golden_step_loads_as_the_state_that_was_saved(step_dir: Path, rank: int) -> None:
    same(ckpt_core.load(step_dir, rank=rank), expected_state(step_dir, rank))


@every_rank
def test_tied_weights_of_a_golden_step_are_one_tensor(step_dir: Path, rank: int) -> None:
    model = ckpt_core.load(step_dir, rank=rank)["model"]
    assert model["embedding"].data_ptr() == model["head"].data_ptr()


@every_rank
def test_every_manifest_of_a_golden_step_is_encoded_to_the_same_bytes(
    step_dir: Path, rank: int
) -> None:
    from ckpt_core.layout import MANIFEST_NAME, Manifest, RankManifest, rank_manifest_name

    kinds = {MANIFEST_NAME: Manifest, rank_manifest_name(rank): RankManifest}
    for name, kind in kinds.items():
        data = (step_dir / name).read_bytes()
        found = kind.decode(data, path=step_dir / name)
        assert f"golden-v{found.version}" == step_dir.parent.name
        assert found.encode() == data


def test_the_golden_directory_of_files_loads_as_what_was_saved() -> None:
    expected = runpy.run_path(str(HERE / "make_golden.py"))["golden_files"]()
    for name, tree in expected.items():
        same(torch.load(FILES / name, weights_only=True), tree)
        same(torch.load(FILES / name, weights_only=True, mmap=True), tree)
    assert (FILES.parent / "latest").read_text() == FILES.name
    report = ckpt_core.verify(FILES)
    assert report.ok
    assert (report.unchecked_bytes, report.steps[0].step) == (0, None)


def test_every_manifest_of_the_golden_directory_is_encoded_to_the_same_bytes() -> None:
    from ckpt_core.layout import Manifest, RankManifest

    for name, kind in (("manifest.json", Manifest), ("rank-00000.json", RankManifest)):
        data = (FILES / name).read_bytes()
        found = kind.decode(data, path=FILES / name)
        assert found.version == 3
        assert found.encode() == data


@every_step
def test_a_golden_step_is_whole(step_dir: Path) -> None:
    report = ckpt_core.verify(step_dir)
    assert report.ok
    assert report.checked_bytes > 0
    assert report.unchecked_bytes == 0


def test_the_golden_step_of_two_ranks_has_every_kind_of_slice() -> None:
    from ckpt_core.layout import RankManifest, uncovered
    from ckpt_core.layout import itemsize as size_of

    (step_dir,) = [path for path in STEPS if path.parent.name == "golden-v2"]
    ranks = [
        RankManifest.decode(path.read_bytes(), path=path)
        for path in sorted(step_dir.glob("rank-*.json"))
    ]
    assert [[leaf.spec.name for leaf in rank.leaves] for rank in ranks] == [["own.rng"]] * 2
    parts = [{entry.spec.name: entry for entry in rank.slices} for rank in ranks]
    both = parts[0].keys() & parts[1].keys()
    cut = {"model.embedding", "boxed.rows", "boxed.columns", "boxed.held by both"}
    assert cut <= both
    assert parts[0].keys() - both
    assert parts[1].keys() - both
    for name in parts[0].keys() | parts[1].keys():
        found = [rank[name] for rank in parts if name in rank]
        (spec,) = {entry.spec for entry in found}
        pieces = [entry.slice for entry in found]
        assert uncovered(spec.shape, size_of(spec.dtype), pieces) is None
        for index in range(len(pieces)):
            rest = pieces[:index] + pieces[index + 1 :]
            empty = pieces[index].nbytes == 0
            assert (uncovered(spec.shape, size_of(spec.dtype), rest) is None) == empty
    assert len({rank["boxed.held by both"].slice.block for rank in parts}) == 1
