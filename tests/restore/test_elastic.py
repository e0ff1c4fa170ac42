"""State saved by R ranks restores on R', and no more is read than the chunks that hold what is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core.errors import CorruptCheckpoint, RestoreError
from ckpt_core.restore import load, read_manifests, verify
from ckpt_core.restore.filling import Need, fill, plan_reads
from ckpt_core.restore.leaves import StepLeaves
from ckpt_core.restore.reading import ParallelReader
from ckpt_core.system.files import Files
from ckpt_core.types import Block
from tests.restore.harness import BufferedOnly, Cold, assert_same, zeros_like
from tests.restore.ranks import (
    Job,
    Ranks,
    boxes,
    chunk_bytes_of,
    part_of,
    restored,
    write_ranks,
)

WORLDS = (1, 2, 3, 4, 8)


def replicated(seed: int = 0) -> dict[str, Any]:
    """Leaves that are cut among 8 ranks, that are dealt out whole, that are empty; and plain values."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(700, 257, generator=generator),
        "strided": torch.randn(300, 600, dtype=torch.float64, generator=generator).t(),
        "small": [torch.randn(n, generator=generator) for n in range(1, 40)],
        "half": torch.randn(1001, generator=generator).to(torch.bfloat16),
        "scalar": torch.tensor(seed),
        "empty": torch.empty(0, 3),
        "lr": 0.1 + seed,
    }


def private(rank: int) -> dict[str, Any]:
    return {"rng": torch.arange(600, dtype=torch.uint8) + rank, "position": 1000 * rank}


def boxed(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + 100)
    return {
        "matrix": torch.randn(129, 67, generator=generator),
        "few": torch.randn(3, 50, generator=generator),
        "cube": torch.randn(12, 9, 10, dtype=torch.float64, generator=generator),
    }


def job(world: int, **changes: Any) -> Job:
    settings: dict[str, Any] = {"replicated": replicated(), "private": private, "boxed": boxed()}
    return Job(world, **(settings | changes))


@pytest.mark.parametrize("to", WORLDS)
@pytest.mark.parametrize("world", WORLDS[1:])
def test_any_number_of_ranks_restores_what_any_number_saved(
    root: Path, world: int, to: int
) -> None:
    path = write_ranks(root, 5, job(world))
    lives = [zeros_like(job(world).state(0)) for _ in range(to)]
    outcomes = Ranks([root] * to).restore(lives)
    assert outcomes.steps() == [5] * to
    for rank, live in enumerate(lives):
        found, owner = restored(outcomes, rank), rank % world
        assert_same(found.state, job(world).state(owner))
        assert_same(live["shared"]["large"], replicated()["large"])
        assert found.world_size == world
        assert found.borrowed_from == (None if rank < world else owner)
        names = dict.fromkeys(StepLeaves(read_manifests(path, files=Files())).shared)
        assert found.read_bytes == chunk_bytes_of(path, names, owner)
    borrowers = [text for text in outcomes.texts if "took own from rank" in text]
    assert len(borrowers) == max(to - world, 0)
    unused = [text for text in outcomes.texts if "are not used" in text]
    assert len(unused) == (1 if to < world else 0)
    assert len(outcomes.texts) == len(borrowers) + len(unused)


@pytest.mark.parametrize("to", [1, 2, 3])
@pytest.mark.parametrize("differ", [True, False])
def test_plain_values_that_are_taken_from_another_rank_are_told_where_they_differ(
    root: Path, differ: bool, to: int
) -> None:
    given = job(2, private=lambda rank: {"position": 1000 * rank if differ else 7})
    write_ranks(root, 5, given)
    outcomes = Ranks([root] * to).restore([zeros_like(given.state(0)) for _ in range(to)])
    for rank in range(to):
        assert restored(outcomes, rank).state["own"] == given.state(rank % 2)["own"]
    assert len(outcomes.texts) == (1 if differ and to == 3 else 0)
    assert all("rank 2 took own from rank 0" in text for text in outcomes.texts)


def test_plain_values_that_are_not_restored_are_not_told(root: Path) -> None:
    given = job(2, private=lambda rank: {"position": 1000 * rank})
    write_ranks(root, 5, given)
    lives = [{"shared": zeros_like(given.state(0))["shared"]} for _ in range(3)]
    assert Ranks([root] * 3).restore(lives, only=["shared"]).texts == []


@pytest.mark.parametrize(
    "files", [Files(), Cold(), BufferedOnly()], ids=["cached", "cold", "plain"]
)
@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("world", "to"), [(4, 2), (2, 4), (3, 8), (8, 3), (4, 4), (4, 1)])
def test_a_box_takes_its_bytes_from_whatever_boxes_hold_them(
    root: Path, world: int, to: int, dim: int, exclusive: bool, files: Files
) -> None:
    path = write_ranks(root, 5, job(world, dim=dim))
    step = read_manifests(path, files=files)
    leaves = StepLeaves(step)
    how = ParallelReader(files=files, readers=2, timeout_s=60, exclusive=exclusive)
    for rank in range(to):
        wanted: dict[str, Block | None] = {}
        needs, expected = [], []
        for name, whole in boxed().items():
            block = boxes(whole.shape, to, dim)[rank]
            wanted[f"boxed.{name}"] = block
            tensor = torch.zeros(block.sizes, dtype=whole.dtype)
            needs.append(Need(leaves.shared[f"boxed.{name}"], tensor, block))
            expected.append(part_of(whole, block))
        tensors = [need.tensor for need in needs]
        read_bytes = fill(step, plan_reads(leaves, needs), tensors, how=how)
        assert_same(tensors, expected)
        assert read_bytes == chunk_bytes_of(path, wanted, None)


@pytest.mark.parametrize(
    "files", [Files(), Cold(), BufferedOnly()], ids=["cached", "cold", "plain"]
)
def test_chunks_that_begin_anywhere_are_read_from_the_page_before(root: Path, files: Files) -> None:
    path = write_ranks(root, 5, job(2, chunk_bytes=1000))
    step = read_manifests(path, files=files)
    leaves = StepLeaves(step)
    how = ParallelReader(files=files, readers=2, timeout_s=60)
    whole = boxed()["cube"]
    block = boxes(whole.shape, 3, 1)[1]
    tensor = torch.zeros(tuple(reversed(block.sizes)), dtype=whole.dtype).permute(2, 1, 0)
    jobs = plan_reads(leaves, [Need(leaves.shared["boxed.cube"], tensor, block)])
    read_bytes = fill(step, jobs, [tensor], how=how)
    assert_same(tensor, part_of(whole, block))
    least = chunk_bytes_of(path, {"boxed.cube": block}, None)
    assert least <= read_bytes <= least + 2 * 128_000


def test_a_box_of_a_replicated_leaf_reads_a_part_of_it(root: Path) -> None:
    path = write_ranks(root, 5, job(4))
    step = read_manifests(path, files=Files())
    leaves = StepLeaves(step)
    whole = replicated()["large"]
    block = boxes(whole.shape, 8)[3]
    tensor = torch.zeros(tuple(reversed(block.sizes))).t()
    how = ParallelReader(files=Files(), readers=2, timeout_s=30)
    jobs = plan_reads(leaves, [Need(leaves.shared["shared.large"], tensor, block)])
    read_bytes = fill(step, jobs, [tensor], how=how)
    assert_same(tensor, part_of(whole, block))
    assert read_bytes == chunk_bytes_of(path, {"shared.large": block}, None)
    assert read_bytes <= whole.nbytes // 8 + 3 * 4096


def test_one_rank_reads_the_files_of_its_step_once(root: Path) -> None:
    from tests.restore.harness import SHARD, restore, small_state, write_step

    path = write_step(root, 1, small_state())
    found = restore(root, zeros_like(small_state()))
    assert found is not None
    assert found.read_bytes == (path / SHARD).stat().st_size
    assert (found.world_size, found.borrowed_from) == (1, None)


def test_what_one_rank_saved_restores_on_several_that_hear_of_its_generators(root: Path) -> None:
    from ckpt_core.state import RngState
    from tests.restore.harness import small_state, write_step

    def state() -> dict[str, Any]:
        return {**small_state(), "generators": RngState()}

    write_step(root, 1, state())
    lives = [zeros_like(state()) for _ in range(3)]
    outcomes = Ranks([root] * 3).restore(lives)
    assert outcomes.steps() == [1] * 3
    assert [restored(outcomes, rank).borrowed_from for rank in range(3)] == [None, 0, 0]
    assert len(outcomes.texts) == 2
    assert all("took generators from rank 0" in text for text in outcomes.texts)


@pytest.mark.parametrize("world", WORLDS[1:])
def test_load_assembles_the_whole_tree(root: Path, world: int) -> None:
    write_ranks(root, 5, job(world))
    assert_same(load(root), job(world).state(0))
    assert_same(load(root, rank=world - 1), job(world).state(world - 1))
    with pytest.raises(RestoreError, match=f"holds no rank {world}"):
        load(root, rank=world)


def test_verify_reads_the_files_of_all_ranks(root: Path) -> None:
    path = write_ranks(root, 5, job(3))
    (step,) = verify(root).steps
    assert step.ok, step.problems
    assert (step.ranks, step.world_size, step.is_partial) == ((0, 1, 2), 3, False)
    assert step.checked_bytes == sum(file.stat().st_size for file in path.glob("shard-*"))


def test_without_private_leaves_nothing_is_said_of_borrowing(root: Path) -> None:
    plain = job(2, private=lambda rank: {"position": rank})
    write_ranks(root, 5, plain)
    outcomes = Ranks([root]).restore([zeros_like(plain.state(0))])
    assert outcomes.steps() == [5]
    assert outcomes.texts == []


def test_a_flipped_bit_in_a_chunk_that_nobody_needs_is_not_read(root: Path) -> None:
    path = write_ranks(root, 5, job(4))
    shard = sorted(path.glob("shard-*"))[1]
    step = read_manifests(path, files=Files())
    entry = next(e for e in step.ranks[1].slices if e.spec.name == "shared.large")
    from tests.restore.harness import flip

    flip(shard, entry.offset + 20_000)
    leaves = StepLeaves(step)
    how = ParallelReader(files=Files(), readers=2, timeout_s=30)
    tensor = torch.zeros(129, 67)
    needs = [Need(leaves.shared["boxed.matrix"], tensor)]
    fill(step, plan_reads(leaves, needs), [tensor], how=how)
    assert_same(tensor, boxed()["matrix"])
    large = torch.zeros(700, 257)
    needs = [Need(leaves.shared["shared.large"], large)]
    with pytest.raises(CorruptCheckpoint, match=r"shared\.large"):
        fill(step, plan_reads(leaves, needs), [large], how=how)
