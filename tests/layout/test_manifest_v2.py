"""What version 2 adds: slices, and steps of several ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from ckpt_core.errors import ConfigError
from ckpt_core.layout import Manifest, RankEntry, RankManifest, SliceEntry, rank_manifest_name
from ckpt_core.types import Block, LeafSpec, Slice
from tests.layout.manifests import (
    PATH,
    RANK,
    RANK_2,
    STEP,
    STEP_2,
    SUM,
    Either,
    edit,
    plain,
    refused,
    sealed,
)

ONE = Manifest(
    120, "000000000120-0a1b2c3d", 1.0, (RankEntry(0, rank_manifest_name(0), 1, SUM),), 10
)


def test_a_step_of_one_rank_is_of_version_1_and_one_of_several_is_of_version_2() -> None:
    assert ONE.version == 1
    assert STEP_2.version == 2
    assert dataclasses.replace(ONE, world_size=2, version=0).version == 2
    assert plain(ONE)["version"] == 1
    assert plain(STEP_2)["version"] == 2


def test_a_manifest_of_version_1_has_as_many_ranks_as_rows_and_stays_what_it_was() -> None:
    found = Manifest.decode(STEP.encode(), path=PATH)
    assert (found.version, found.world_size) == (1, 3)
    assert found.encode() == STEP.encode()


def test_a_manifest_of_version_1_has_no_word_of_slices() -> None:
    assert "slices" not in plain(RANK)
    obj = plain(RANK) | {"slices": plain(RANK_2)["slices"]}
    assert RankManifest.decode(sealed(obj), path=PATH) == RANK


def test_a_rank_of_version_2_without_slices_says_so() -> None:
    bare = dataclasses.replace(RANK_2, slices=())
    assert plain(bare)["slices"] == []
    assert RankManifest.decode(bare.encode(), path=PATH) == bare


def test_the_rows_are_those_of_the_page() -> None:
    assert plain(RANK_2)["slices"] == [
        ["w", "float32", [40, 50], 0, 5120, 1024, 2048, None],
        ["box", "int16", [8, 6], 0, 8192, 32, 8, [[4, 1], [4, 5]]],
        ["empty", "int64", [0, 7], 0, 12288, 0, 0, None],
    ]


HUGE = 2**70
RANK_EDITS: list[tuple[tuple[Any, ...], Any]] = [
    *[((key,), KeyError) for key in ("rank", "files", "leaves", "skeleton", "slices")],
    *[(("slices",), value) for value in (None, {}, [None], [[]], [{}], 1)],
    *[(("slices", 0, 0), value) for value in (None, 1, "rng", "box", "\ud800", ["w"])],
    *[(("slices", 0, 1), value) for value in (None, 1, "float33", "qint8", ["float32"])],
    *[
        (("slices", 0, 2), value)
        for value in (None, 2000, [40.0, 50], [True], [-40, -50], [10], [2**62, 2], [1] * 300)
    ],
    *[(("slices", 0, 3), value) for value in (-1, 1, None, "0", 0.0, False)],
    *[(("slices", 0, 4), value) for value in (-4, 5122, 12288, HUGE, None, 5120.0, 4096, 7172)],
    *[(("slices", 0, 5), value) for value in (-4, 1022, 5956, HUGE, None, 1024.0, "1024")],
    *[(("slices", 0, 6), value) for value in (-4, 2050, 6980, HUGE, None, 2048.0, [2048])],
    *[
        (("slices", 1, 7), value)
        for value in (
            *(1, "box", {}, [], [[4, 1]], [[4, 1], [4, 5], []], [None, [4, 5]], [[4, 1], 4]),
            *([[4], [4]], [[4, 1, 0], [4, 5, 1]], [[4, 1], [4]], [[], []]),
            *([[4, 2], [4, 5]], [[5, 1], [4, 5]], [[-1, 1], [4, 5]], [[4, 1], [-4, -5]]),
            *([[4, 1], [4, HUGE]], [[HUGE, 1], [4, 5]], [[4.0, 1], [4, 5]], [[4, True], [4, 5]]),
            *([[4, 1], [1, 5]], [[4, 1], [0, 5]]),
        )
    ],
    *[(("slices", 2, 5), value) for value in (8, -8)],
    (("slices", 0), ["w", "float32", [40, 50], 0, 5120, 1024, 2048]),
    (("slices", 0), ["w", "float32", [40, 50], 0, 5120, 1024, 2048, None, None]),
]


@pytest.mark.parametrize(("place", "value"), RANK_EDITS, ids=repr)
def test_a_rank_manifest_with_one_wrong_value_is_refused(
    place: tuple[Any, ...], value: Any
) -> None:
    obj = plain(RANK_2)
    edit(obj, place, value)
    refused(RANK_2, sealed(obj))


@pytest.mark.parametrize("offset", [4096, 4108, 5124, 6140])
def test_a_slice_that_shares_bytes_with_a_leaf_or_a_slice_is_refused(offset: int) -> None:
    obj = plain(RANK_2)
    obj["slices"].append(["other", "int32", [4], 0, offset, 16, 0, None])
    refused(RANK_2, sealed(obj))


def test_slices_of_a_rank_without_files_are_refused() -> None:
    refused(RANK_2, sealed(plain(RANK_2) | {"files": [], "leaves": []}))


STEP_EDITS: list[tuple[tuple[Any, ...], Any]] = [
    *[(("world_size",), value) for value in (0, 1, 2, 5, -8, 100_001, "8", 8.0, True, None)],
    (("world_size",), KeyError),
    *[(("ranks",), value) for value in ([], None, {}, [[]])],
    *[(("ranks", 1, 0), value) for value in (2, 5, 6, -1, 3.0, True, None, "3")],
    *[(("ranks", 2, 0), value) for value in (8, 2**40)],
    *[(("ranks", 1, 1), value) for value in ("rank-00001.json", "rank-00002.json", None)],
    (("version",), 1),
]


@pytest.mark.parametrize(("place", "value"), STEP_EDITS, ids=repr)
def test_a_manifest_with_one_wrong_value_is_refused(place: tuple[Any, ...], value: Any) -> None:
    obj = plain(STEP_2)
    edit(obj, place, value)
    refused(STEP_2, sealed(obj))


def test_a_step_of_version_2_with_one_rank_is_refused() -> None:
    refused(STEP_2, sealed(plain(ONE) | {"version": 2}))


def _with_slice(entry: SliceEntry) -> RankManifest:
    return dataclasses.replace(RANK_2, slices=(entry,))


MATRIX = LeafSpec("m", "int32", (4, 4))
BROKEN: list[Callable[[], Either]] = [
    lambda: dataclasses.replace(RANK_2, version=1),
    lambda: dataclasses.replace(RANK_2, version=3),
    lambda: dataclasses.replace(RANK_2, version=0),
    lambda: dataclasses.replace(RANK_2, slices=RANK_2.slices * 2),
    lambda: dataclasses.replace(RANK_2, leaves=(*RANK_2.leaves, *RANK_2.leaves)),
    lambda: _with_slice(SliceEntry(MATRIX, Slice(0, 65), 0, 8192)),
    lambda: _with_slice(SliceEntry(MATRIX, Slice(2, 4), 0, 8192)),
    lambda: _with_slice(SliceEntry(MATRIX, Slice(0, 4), 0, 8193)),
    lambda: _with_slice(SliceEntry(MATRIX, Slice(0, 64, Block((1, 0), (3, 4))), 0, 8192)),
    lambda: _with_slice(SliceEntry(MATRIX, Slice(0, 4, Block((1,), (3,))), 0, 8192)),
    lambda: dataclasses.replace(STEP_2, world_size=5),
    lambda: dataclasses.replace(STEP_2, version=1),
    lambda: dataclasses.replace(STEP_2, version=3),
    lambda: dataclasses.replace(STEP_2, ranks=STEP_2.ranks[::-1]),
    lambda: dataclasses.replace(STEP_2, ranks=STEP_2.ranks[:1] * 2),
    lambda: dataclasses.replace(ONE, ranks=STEP_2.ranks),
]


@pytest.mark.parametrize("build", BROKEN)
def test_what_could_not_be_read_is_not_written(build: Callable[[], Either]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        build().encode()
