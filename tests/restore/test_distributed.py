"""Tensors that lie on several ranks are restored on another number of them, by real processes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, zeros

from ckpt_core.bench.meeting import free_port
from ckpt_core.coordination import TorchStore
from ckpt_core.restore import Restorer, RestoreWarning, load
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
