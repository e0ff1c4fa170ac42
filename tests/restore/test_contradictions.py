"""Rank manifests that contradict each other, or lie, with checksums that are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer
from ckpt_core.errors import (
    CorruptCheckpoint,
)
from ckpt_core.layout import RankManifest, SliceEntry
from ckpt_core.restore import load, verify
from ckpt_core.types import Block, Slice
from tests.restore.harness import assert_same, zeros_like
from tests.restore.ranks import (
    Ranks,
    boxes,
    edit_ranks,
    write_all,
    write_ranks,
)
from tests.restore.test_together import job, live


@pytest.fixture
def steps(root: Path) -> dict[int, Path]:
    return {step: write_ranks(root, step, job(step)) for step in (20, 30)}


def _first_of(name: str, change: Callable[[SliceEntry], SliceEntry], rank: int) -> Any:
    def edit(manifest: RankManifest) -> RankManifest:
        if manifest.rank != rank:
            return manifest
        slices = [change(x) if x.spec.name == name else x for x in manifest.slices]
        return replace(manifest, slices=tuple(slices))

    return edit


def _reshaped(entry: SliceEntry) -> SliceEntry:
    return replace(entry, spec=replace(entry.spec, shape=(300, 500)))


def _retyped(entry: SliceEntry) -> SliceEntry:
    return replace(entry, spec=replace(entry.spec, dtype="int32"))


@pytest.mark.parametrize(("change", "what"), [(_reshaped, r"\[300, 500\]"), (_retyped, "int32")])
def test_ranks_that_contradict_each_other_about_a_leaf_are_a_corrupt_step(
    root: Path, steps: dict[int, Path], change: Callable[[SliceEntry], SliceEntry], what: str
) -> None:
    edit_ranks(steps[30], 30, job(), _first_of("shared.weight", change, 1))
    outcomes = Ranks([root] * 3).restore(live())
    assert outcomes.steps() == [20] * 3
    with pytest.raises(CorruptCheckpoint, match=rf"leaf 'shared\.weight'.*{what}.*rank 1"):
        load(steps[30])
    assert "shared.weight" in verify(steps[30]).problems[0]


def test_a_leaf_that_is_private_on_one_rank_and_shared_on_another_is_a_contradiction(
    root: Path,
) -> None:
    path = write_ranks(root, 1, job())
    ranks = [
        RankManifest.decode(name.read_bytes(), path=name) for name in sorted(path.glob("rank-*"))
    ]
    leaf = ranks[1].leaves[0]
    entry = SliceEntry(leaf.spec, Slice(0, leaf.nbytes), leaf.file, leaf.offset)
    ranks[1] = replace(ranks[1], leaves=(), slices=(*ranks[1].slices, entry))
    write_all(path, 1, job(), ranks)
    with pytest.raises(CorruptCheckpoint, match=r"own\.rng.*rank 0 alone.*rank 1 shares"):
        load(path)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_slice_that_is_listed_nowhere_is_named(
    root: Path, steps: dict[int, Path], rank: int
) -> None:
    def drop(manifest: RankManifest) -> RankManifest:
        return replace(manifest, slices=()) if manifest.rank == rank else manifest

    edit_ranks(steps[30], 30, job(), drop)
    with pytest.raises(CorruptCheckpoint, match=r"shared\.weight.*bytes \d+ to \d+"):
        load(steps[30])
    assert any("shared.weight" in text for text in verify(steps[30]).problems)
    lives = live()
    assert Ranks([root] * 3).restore(lives).steps() == [20] * 3


def test_what_is_listed_nowhere_is_no_matter_to_a_restore_of_something_else(root: Path) -> None:
    both = {"a": torch.ones(3000), "b": torch.ones(300_000)}
    two = job(world=2, replicated=both, private=lambda rank: {})
    path = write_ranks(root, 1, two)

    def drop(manifest: RankManifest) -> RankManifest:
        kept = [x for x in manifest.slices if manifest.rank != 1 or x.spec.name != "shared.b"]
        return replace(manifest, slices=tuple(kept))

    edit_ranks(path, 1, two, drop)
    states = [zeros_like(two.state(rank)) for rank in range(2)]
    with Checkpointer(root) as ck:
        assert ck.restore(states[0], only=["shared.a"]) is not None
        with pytest.raises(CorruptCheckpoint, match=r"shared\.b.*bytes"):
            ck.restore(states[1], step=1, only=["shared.b"])
    assert_same(states[0]["shared"], {"a": both["a"], "b": torch.zeros(300_000)})


def test_a_rank_manifest_that_is_not_there_is_a_corrupt_step(
    root: Path, steps: dict[int, Path]
) -> None:
    (steps[30] / "rank-00002.json").unlink()
    assert Ranks([root] * 3).restore(live()).steps() == [20] * 3
    assert not verify(steps[30]).ok


def test_no_memory_is_allocated_for_a_shape_that_slices_do_not_cover(root: Path) -> None:
    path = write_ranks(root, 1, job())

    def claim(entry: SliceEntry) -> SliceEntry:
        return replace(entry, spec=replace(entry.spec, shape=(2**40,)))

    def edit(manifest: RankManifest) -> RankManifest:
        slices = [claim(x) if x.spec.name == "shared.weight" else x for x in manifest.slices]
        return replace(manifest, slices=tuple(slices))

    edit_ranks(path, 1, job(), edit)
    with pytest.raises(CorruptCheckpoint, match=r"shared\.weight"):
        load(path)


def test_bytes_that_are_stored_twice_are_taken_once(root: Path) -> None:
    boxed = {"table": torch.arange(1200.0).view(40, 30)}
    twice = job(0, 2, boxed=boxed)
    path = write_ranks(root, 1, twice)
    ranks = [
        RankManifest.decode(name.read_bytes(), path=name) for name in sorted(path.glob("rank-*"))
    ]
    upper = boxes((40, 30), 2)[0]

    def widen(entry: SliceEntry) -> SliceEntry:
        # Rank 1 says that its rows are the upper ones, so the lower ones are stored nowhere.
        return replace(entry, slice=replace(entry.slice, block=upper))

    ranks[1] = _first_of("boxed.table", widen, 1)(ranks[1])
    write_all(path, 1, twice, ranks)
    with pytest.raises(CorruptCheckpoint, match=r"boxed\.table"):
        load(path)
    block = Block((0, 0), (40, 30))
    ranks[1] = _first_of("boxed.table", lambda e: replace(e, slice=Slice(2400, 2400, block)), 1)(
        ranks[1]
    )
    ranks[0] = _first_of("boxed.table", lambda e: replace(e, slice=Slice(1200, 2400, None)), 0)(
        ranks[0]
    )
    write_all(path, 1, twice, ranks)
    with pytest.raises(CorruptCheckpoint, match=r"boxed\.table"):
        load(path)
