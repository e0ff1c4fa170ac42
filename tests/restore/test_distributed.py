"""Tensors that lie on several ranks are restored on another number of them, by real processes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, zeros

from ckpt_core.bench.meeting import free_port
from ckpt_core.coordination import TorchStore
from ckpt_core.restore import Restorer, RestoreRequest, RestoreWarning, load
from ckpt_core.system.files import Files
from tests.restore.harness import assert_same, flip, zeros_like
from tests.restore.processes import Rank, run_ranks
from tests.restore.ranks import Job, boxes, chunk_bytes_of, part_of, write_ranks
from tests.restore.test_elastic import boxed, private, replicated

JOB = Job(4, replicated(), private, boxed())


def _live(place: Placement) -> Any:
    state = zeros_like(JOB.state(0))
    mesh = init_device_mesh("cpu", (2,))
    state["boxed"] = {
        name: zeros(*whole.shape, dtype=whole.dtype, device_mesh=mesh, placements=[place])
        for name, whole in boxed().items()
    }
    return state


def _restores_its_boxes(me: Rank) -> None:
    path = me.root / "step-000000000005"
    for dim in (0, 1):
        live = _live(Shard(dim))
        local = {name: tensor.to_local() for name, tensor in live["boxed"].items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RestoreWarning)  # private values of ranks 2 and 3
            found = me.restorer().restore(live)
        assert found is not None
        wanted: dict[str, Any] = {
            name: None for name in found_names(load(path)["shared"], "shared") if name
        }
        for name, whole in boxed().items():
            block = boxes(whole.shape, 2, dim)[me.info.rank]
            wanted[f"boxed.{name}"] = block
            tensor = live["boxed"][name]
            assert isinstance(tensor, DTensor)
            assert_same(tensor.to_local(), part_of(whole, block))
            assert_same(local[name], part_of(whole, block))
        assert found.read_bytes == chunk_bytes_of(path, wanted, me.info.rank)


def _rows() -> Job:
    """Tensors of fewer rows than ranks, some of which are in the state twice."""
    rows = {f"rows{n}": torch.arange(5.0 * n).view(n, 5) + n for n in (0, 1, 2, 7)}
    one, corner = rows["rows1"] + 1, torch.full((1, 1), 3.0)
    tied = {"one": one, "again": one, "corner": corner, "too": corner}
    return Job(2, {"plain": torch.arange(700.0), **tied}, boxed=rows)


def _broadcasts_beside_parts(me: Rank) -> None:
    mesh = init_device_mesh("cpu", (me.info.world_size,))
    expected = _rows().state(0)

    def spread(whole: torch.Tensor, place: Placement) -> DTensor:
        return zeros(*whole.shape, dtype=whole.dtype, device_mesh=mesh, placements=[place])

    for place, other in ((Shard(0), Replicate()), (Replicate(), Shard(0)), (Shard(0), Shard(1))):
        state = zeros_like(expected)
        state["boxed"] = {name: spread(whole, place) for name, whole in expected["boxed"].items()}
        for name, how in (("one", place), ("again", other), ("corner", place), ("too", other)):
            state["shared"][name] = spread(expected["shared"][name], how)
        found = me.restorer().restore(state, RestoreRequest(broadcast=True))
        assert found is not None
        for part, tensors in expected.items():
            for name, whole in tensors.items():
                tensor = state[part][name]
                full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                assert_same(full, whole)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_without_rows_and_one_that_has_them_all_broadcast_the_rest(
    tmp_path: Path, world: int
) -> None:
    write_ranks(tmp_path / "ckpts", 5, _rows())
    run_ranks(world, tmp_path, _broadcasts_beside_parts)


def _agrees_by_store(me: Rank) -> None:
    port = me.gather("port", free_port(), 60.0)[0]
    with TorchStore("127.0.0.1", port, rank=me.info.rank, world_size=2) as coordination:
        restorer = Restorer(
            me.root, files=Files(), readers=2, timeout_s=60, coordination=coordination
        )
        live = zeros_like(JOB.state(0))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = restorer.restore(live)
        assert found is not None
        assert found.step == 5
        assert_same(found.state, JOB.state(me.info.rank))
        assert any("step 6 was not restored" in str(item.message) for item in caught)


def test_ranks_agree_through_the_store_that_training_uses(tmp_path: Path) -> None:
    write_ranks(tmp_path / "ckpts", 5, JOB)
    path = write_ranks(tmp_path / "ckpts", 6, JOB)
    flip(path / "shard-00001-0.safetensors", 20_000)
    run_ranks(2, tmp_path, _agrees_by_store)


def found_names(tree: Any, path: str) -> list[str]:
    """Names of the tensors of a tree of dicts and lists."""
    if isinstance(tree, torch.Tensor):
        return [path]
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    inner = [(key, value) for key, value in pairs if isinstance(value, dict | list | torch.Tensor)]
    return [name for key, value in inner for name in found_names(value, f"{path}.{key}")]


def test_two_ranks_restore_their_boxes_of_what_four_have_saved(tmp_path: Path) -> None:
    write_ranks(tmp_path / "ckpts", 5, JOB)
    run_ranks(2, tmp_path, _restores_its_boxes)
