"""Rank manifests of which most is kept from save to save."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ckpt_core.errors import ConfigError
from ckpt_core.layout import LeafEntry, RankManifest, RankText
from ckpt_core.types import LeafSpec
from tests.layout.manifests import RANK, RANK_2, RANK_3


def kept(manifest: RankManifest) -> RankText:
    sizes = [file.nbytes for file in manifest.files]
    return RankText(lambda: (manifest.leaves, manifest.slices), sizes, manifest.version)


@pytest.mark.parametrize("manifest", [RANK, RANK_2, RANK_3], ids=["one", "several", "files"])
def test_what_was_kept_gives_the_bytes_of_a_manifest_that_is_made_anew(
    manifest: RankManifest,
) -> None:
    text = kept(manifest)
    for skeleton in (manifest.skeleton, {"step": 7}, None):
        expected = dataclasses.replace(manifest, skeleton=skeleton).encode()
        spelled = json.dumps(skeleton, separators=(",", ":"))
        assert text.encode(manifest.rank, manifest.files, spelled) == expected


def test_leaves_are_asked_for_once() -> None:
    asked: list[int] = []

    def entries() -> tuple[tuple[LeafEntry, ...], tuple[()]]:
        asked.append(1)
        return RANK.leaves, ()

    text = RankText(entries, [file.nbytes for file in RANK.files], RANK.version)
    assert text.encode(3, RANK.files, "1") != text.encode(3, RANK.files, "2")
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(12285, 4), (-4, 4), (0, 8)], ids=["behind", "before", "too long"]
)
def test_leaves_that_lie_wrong_are_refused_each_time(offset: int, nbytes: int) -> None:
    leaf = LeafEntry(LeafSpec("w", "float32", ()), 0, offset, nbytes)
    text = kept(dataclasses.replace(RANK, leaves=(leaf,)))
    for _ in range(2):
        with pytest.raises(ConfigError, match="manifest of rank 3"):
            text.encode(3, RANK.files, "null")


def test_more_rows_than_are_spelled_at_a_time_are_all_there() -> None:
    leaves = tuple([LeafEntry(LeafSpec(f"é{i}", "uint8", (1,)), 0, i, 1) for i in range(2500)])
    many = dataclasses.replace(RANK, leaves=leaves)
    assert [row[0] for row in json.loads(many.encode())["leaves"]] == [
        leaf.spec.name for leaf in leaves
    ]
