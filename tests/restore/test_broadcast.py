"""Leaves that all ranks take whole are read once and broadcast; nobody is left alone in a collective."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt_core.errors import ConfigError, CorruptCheckpoint, RestoreError
from ckpt_core.layout import MANIFEST_NAME, RankManifest
from ckpt_core.restore import RestoreRequest, RestoreWarning, broadcast
from ckpt_core.state import Selection
from ckpt_core.system.devices import Devices
from ckpt_core.types import LeafSpec
from tests.restore.harness import assert_same, flip, restore, small_state, write_step, zeros_like
from tests.restore.processes import Rank, run_ranks
from tests.restore.ranks import Job, write_ranks


def job(step: int, world: int) -> Job:
    generator = torch.Generator().manual_seed(step)
    replicated = {
        **small_state(step),
        "large": torch.randn(700, 357, generator=generator),
        "strided": torch.randn(300, 400, dtype=torch.complex64, generator=generator).t(),
        "bytes": [torch.full((n,), n, dtype=torch.uint8) for n in range(1, 30)],
        "flipped": torch.randn(64, 64, dtype=torch.complex64, generator=generator),
    }
    return Job(world, replicated, lambda rank: {"rng": torch.arange(700) + rank})


def live(world: int) -> Any:
    state = zeros_like(job(0, world).state(0))
    # Filled through its conjugate view, and with a stride: no run of memory can be sent as it is.
    state["shared"]["flipped"] = torch.zeros(64, 64, dtype=torch.complex64).conj()
    state["shared"]["large"] = torch.zeros(357, 700).t()
    return state


def shard_bytes(root: Path, step: int) -> int:
    return sum(path.stat().st_size for path in root.glob(f"step-*{step}/shard-*"))


def _restores_by_broadcast(me: Rank) -> None:
    world, rank = me.info.world_size, me.info.rank
    state = live(world)
    found = me.restorer().restore(state, RestoreRequest(broadcast=True))
    assert found is not None
    assert_same(found.state, job(7, world).state(rank))
    assert_same(state["shared"]["large"], job(7, world).replicated["large"])
    assert state["shared"]["large"].stride() == (1, 700)
    read = torch.tensor(found.read_bytes)
    dist.all_reduce(read)
    # Each byte once, but for the chunks in which one rank's share ends and another's begins.
    assert read <= shard_bytes(me.root, 7) + 4096 * 30 * world
    assert found.read_bytes < 0.7 * shard_bytes(me.root, 7)


def _in_small_buffers(me: Rank) -> None:
    broadcast.BUFFER_BYTES = 4096
    _restores_by_broadcast(me)


class Short:
    """torch on a device that has no memory left."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, size: int, **settings: Any) -> torch.Tensor:
        if size:
            raise RuntimeError("no memory is left")
        return torch.empty(size, **settings)


def _has_no_memory_on_one_rank(me: Rank) -> None:
    if me.info.rank == 1:
        broadcast.torch = Short()  # type: ignore[assignment]
    state = live(me.info.world_size)
    with pytest.raises((RestoreError, RuntimeError), match="no memory is left"):
        me.restorer().restore(state, RestoreRequest(broadcast=True))
    assert me.info.rank == 0 or not state["shared"]["large"].any()
    broadcast.torch = torch
    _restores_by_broadcast(me)


def test_a_rank_without_memory_for_what_is_sent_leaves_nobody_in_a_collective(
    tmp_path: Path,
) -> None:
    write_ranks(tmp_path / "ckpts", 7, job(7, 2))
    run_ranks(2, tmp_path, _has_no_memory_on_one_rank)


@pytest.mark.parametrize("world", [2, 3])
def test_replicated_leaves_are_read_once_and_sent_to_all(tmp_path: Path, world: int) -> None:
    write_ranks(tmp_path / "ckpts", 7, job(7, world))
    run_ranks(world, tmp_path, _restores_by_broadcast)


class Door(Devices):
    """Notes which tensors are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[torch.Tensor] = []

    def of_all(self, tensors: Iterable[torch.Tensor]) -> list[torch.device]:
        self.asked += tensors
        return []


def _asks_the_door_that_it_is_given(me: Rank) -> None:
    door = Door()
    group = broadcast.Broadcast.of(True, me.info, door)
    assert group is not None
    leaf = torch.zeros(40)
    shares = group.share({"leaf": LeafSpec("leaf", "float32", (40,))})
    group.run(shares, {"leaf": leaf}, timeout_s=60)
    assert door.asked == [leaf]


def test_devices_are_waited_for_through_the_door_of_the_restore(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, _asks_the_door_that_it_is_given)


def _broadcasts_a_part(me: Rank) -> None:
    world, rank = me.info.world_size, me.info.rank
    state = live(world)
    wanted = Selection.of(["shared.large", "shared.bytes"])
    found = me.restorer().restore(state, RestoreRequest(broadcast=True, part=wanted))
    assert found is not None and found.borrowed_from is None
    replicated = job(7, world).replicated
    assert_same(
        found.state, {"shared": {"large": replicated["large"], "bytes": replicated["bytes"]}}
    )
    assert_same(state["shared"]["large"], replicated["large"])
    assert not state["shared"]["strided"].any()
    assert found.read_bytes < 0.6 * sum(path.stat().st_size for path in me.root.rglob("shard-*"))
    # One rank wants another part than the others: nobody is left alone in a collective.
    other = Selection.of(["shared.large" if rank else "shared.strided"])
    with pytest.raises(RestoreError):
        me.restorer().restore(live(world), RestoreRequest(broadcast=True, part=other))


def test_a_part_is_read_once_and_sent_to_all(tmp_path: Path) -> None:
    write_ranks(tmp_path / "ckpts", 7, job(7, 2))
    run_ranks(2, tmp_path, _broadcasts_a_part)


def test_leaves_that_are_longer_than_a_buffer_go_in_several(tmp_path: Path) -> None:
    write_ranks(tmp_path / "ckpts", 7, job(7, 2))
    run_ranks(2, tmp_path, _in_small_buffers)


def _falls_back_before_any_collective(me: Rank) -> None:
    world, rank = me.info.world_size, me.info.rank
    state = live(world)
    with pytest.raises(CorruptCheckpoint, match="shard-00001"):
        me.restorer().restore(state, RestoreRequest(broadcast=True, strict=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = me.restorer().restore(state, RestoreRequest(broadcast=True))
    assert found is not None
    assert found.step == 6
    assert_same(found.state, job(6, world).state(rank))
    assert [item.category for item in caught] == [RestoreWarning]
    assert "step 7" in str(caught[0].message)


@pytest.mark.parametrize("world", [2, 3])
def test_a_corrupt_share_of_one_rank_leaves_nobody_in_a_collective(
    tmp_path: Path, world: int
) -> None:
    root = tmp_path / "ckpts"
    write_ranks(root, 6, job(6, world))
    path = write_ranks(root, 7, job(7, world))
    rank = RankManifest.decode((path / "rank-00001.json").read_bytes(), path=path)
    entry = next(entry for entry in rank.slices if entry.spec.name == "shared.large")
    flip(path / "shard-00001-0.safetensors", entry.offset + 9000)
    run_ranks(world, tmp_path, _falls_back_before_any_collective)


def _groups(me: Rank) -> None:
    pair = dist.new_group([0, 1])
    rank = me.info.rank
    state = zeros_like(small_state())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = me.restorer().restore(state, RestoreRequest(broadcast=pair if rank < 2 else False))
    assert not caught, "one rank saved it, and it has no generators"
    assert found is not None
    assert_same(found.state, small_state(7))
    # One says True and the others name the pair: their groups differ, and all of them hear of it.
    with pytest.raises(RestoreError, match="disagree"):
        me.restorer().restore(state, RestoreRequest(broadcast=pair if rank < 2 else True))
    with pytest.raises(RestoreError if rank < 2 else ConfigError, match="no member"):
        me.restorer().restore(state, RestoreRequest(broadcast=pair))
    if rank == 1:
        state["weight"] = torch.zeros(2)
    with pytest.raises(RestoreError, match="weight"):
        me.restorer().restore(state, RestoreRequest(broadcast=True))


def test_groups_and_states_must_agree_and_a_part_of_the_ranks_may_be_a_group(
    tmp_path: Path,
) -> None:
    write_step(tmp_path / "ckpts", 7, small_state(7))
    run_ranks(3, tmp_path, _groups)


def test_broadcast_without_a_process_group_is_a_mistake(root: Path) -> None:
    path = write_step(root, 7, small_state(7))
    assert (path / MANIFEST_NAME).exists()
    with pytest.raises(ConfigError, match="init_process_group"):
        restore(root, zeros_like(small_state()), broadcast=True)
