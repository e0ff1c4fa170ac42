"""Runs of flattened tensors: saved by ranks that cut anywhere, restored by ranks that cut elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, zeros

from ckpt_core import (
    Checkpointer,
    ConfigError,
    FlatPart,
    Options,
    StateMismatch,
    TorchStore,
    load,
    verify,
)
from ckpt_core.bench.meeting import free_port
from tests.restore.harness import assert_same, flip, zeros_like
from tests.restore.processes import Rank, run_ranks

OPTIONS = Options(staging_bytes="8MiB", writers=1, readers=1, timeout=120)
SAVERS, STEP = 3, 7


def whole() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "matrix": torch.randn(37, 53, generator=generator),
        "cube": torch.randn(5, 4, 3, dtype=torch.float64, generator=generator),
        "large": torch.randn(300, 1000, generator=generator),
        "half": torch.randn(1001, generator=generator).to(torch.bfloat16),
        "count": torch.tensor(12.0),
        "empty": torch.empty(0, 3),
    }


def cut(ranks: int, rank: int, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """As a flattened model is cut: all tensors end to end, at places that are no rows of any."""
    memory = {dtype: torch.empty(0, dtype=dtype) for dtype in (torch.float32, torch.float64)}
    total = sum(tensor.numel() for tensor in tensors.values())
    low, high, start = total * rank // ranks, total * (rank + 1) // ranks, 0
    parts = {}
    for name, tensor in tensors.items():
        begin = min(max(low - start, 0), tensor.numel())
        end = min(max(high - start, begin), tensor.numel())
        flat = tensor.reshape(-1)[begin:end]
        # What is empty is so of one memory, as slices of one flat parameter are.
        flat = flat if len(flat) else memory.get(tensor.dtype, flat)[:0]
        parts[name] = FlatPart(flat, tuple(tensor.shape), begin)
        start += tensor.numel()
    return parts


def _together(me: Rank) -> TorchStore:
    port = me.gather("port", free_port(), 60.0)[0]
    return TorchStore("127.0.0.1", port, rank=me.info.rank, world_size=me.info.world_size)


def _saves(me: Rank) -> None:
    with _together(me) as store, Checkpointer(me.root, OPTIONS, coordination=store) as ck:
        for step in (STEP - 1, STEP):  # the second time the structure is known
            ck.save(step, {"parts": cut(SAVERS, me.info.rank, whole()), "rate": 0.1})
            ck.wait()


def _restores(me: Rank, root: Path) -> None:
    parts = cut(2, me.info.rank, {name: torch.zeros_like(one) for name, one in whole().items()})
    mesh = init_device_mesh("cpu", (2,))
    boxed = zeros(37, 53, device_mesh=mesh, placements=[Shard(1)])
    with _together(me) as store, Checkpointer(root, OPTIONS, coordination=store) as ck:
        found = ck.restore({"parts": parts, "rate": None})
        assert found is not None and found.step == STEP and found.state["rate"] == 0.1
        for name, part in cut(2, me.info.rank, whole()).items():
            assert_same(parts[name].tensor, part.tensor)
        ck.restore({"parts": {**parts, "matrix": boxed}, "rate": None})
        assert_same(boxed.to_local(), whole()["matrix"].chunk(2, 1)[me.info.rank])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(SAVERS, folder, _saves)
    return folder


def test_what_three_ranks_saved_is_whole_for_everybody(saved: Path) -> None:
    assert verify(saved / "ckpts").ok
    assert_same(load(saved / "ckpts")["parts"], whole())
    live = zeros_like(whole())
    with Checkpointer(saved / "ckpts", OPTIONS) as ck:
        ck.restore({"parts": live, "rate": None})
    assert_same(live, whole())


def test_two_ranks_take_their_own_runs_or_boxes_of_it(saved: Path, tmp_path: Path) -> None:
    run_ranks(2, tmp_path, partial(_restores, root=saved / "ckpts"))


def test_one_process_takes_runs_of_what_it_saved_whole(root: Path) -> None:
    with Checkpointer(root, OPTIONS) as ck:
        ck.save(1, {"a": whole(), "tied": whole()["matrix"]}).committed.result()
        for rank in range(4):
            parts = cut(4, rank, zeros_like(whole()))
            tied = FlatPart(torch.zeros(53), (37, 53), 53)
            ck.restore({"a": parts, "tied": tied})
            for name, part in cut(4, rank, whole()).items():
                assert_same(parts[name].tensor, part.tensor)
            assert_same(tied.tensor, whole()["matrix"][1])


def test_damage_in_a_run_is_found(saved: Path) -> None:
    (shard,) = (saved / "ckpts" / f"step-{STEP:012d}").glob("shard-00001-*")
    old = shard.read_bytes()
    try:
        flip(shard, len(old) // 2)
        assert not verify(shard.parent).ok
        with Checkpointer(saved / "ckpts", OPTIONS) as ck, pytest.warns(match="was not restored"):
            found = ck.restore({"parts": cut(2, 0, zeros_like(whole())), "rate": None})
        assert found is not None and found.step == STEP - 1
    finally:
        shard.write_bytes(old)


def _refused(part: FlatPart, what: str, root: Path) -> None:
    with Checkpointer(root, OPTIONS) as ck, pytest.raises(ConfigError, match=what):
        ck.save(1, {"part": part})


def test_a_part_that_is_no_run_of_the_whole_is_refused(root: Path) -> None:
    refused = partial(_refused, what="'part' is a FlatPart of", root=root)
    refused(FlatPart(torch.zeros(4), (2, 3), 3))
    refused(FlatPart(torch.zeros(4), (2, 3), -1))
    refused(FlatPart(torch.zeros(2, 2), (2, 3), 0))
    refused(FlatPart(torch.nn.Parameter(torch.zeros(2)), (2, 3), 0))
    refused(FlatPart(torch.zeros(4), (-2, -3), 0))


@pytest.mark.parametrize(
    "part",
    [
        lambda: FlatPart(torch.zeros(6), (2.0, 3.0), 0),  # type: ignore[arg-type]
        lambda: FlatPart(torch.zeros(6), "23", 0),  # type: ignore[arg-type]
        lambda: FlatPart(torch.zeros(6), 6, 0),  # type: ignore[arg-type]
        lambda: FlatPart(torch.zeros(6), (2, 3), None),  # type: ignore[arg-type]
        lambda: FlatPart(None, (2, 3), 0),  # type: ignore[arg-type]
        lambda: FlatPart(np.zeros(6), (2, 3), 0),  # type: ignore[arg-type]
    ],
)
def test_a_part_of_other_kinds_of_values_is_refused_by_name(
    root: Path, part: Callable[[], FlatPart]
) -> None:
    _refused(part(), "'part' is a FlatPart of", root)


def test_sizes_and_a_begin_of_other_kinds_of_ints_are_plain_ones(root: Path) -> None:
    given, live = torch.arange(6.0), torch.zeros(6)
    with Checkpointer(root, OPTIONS) as ck:
        for step, size in enumerate((np.int64(2), torch.tensor(2), True + 1)):
            part = FlatPart(given, (size, 3), np.int64(0))  # type: ignore[arg-type]
            ck.save(step, {"part": part}).committed.result(60)
            ck.restore({"part": FlatPart(live.zero_(), (size, np.int64(3)), 0)})  # type: ignore[arg-type]
            assert_same(live, given)
        ck.save(9, {"part": FlatPart(given, (True, 6), 0)}).committed.result(60)


def test_one_process_saves_runs_only_where_they_are_the_whole(root: Path) -> None:
    _refused(
        FlatPart(torch.zeros(3), (2, 3), 0), "'part' is a part of .* give it coordination=", root
    )
    part, tensor = FlatPart(torch.zeros(6), (2, 3), 0), torch.zeros(2, 3)
    with Checkpointer(root, OPTIONS) as ck:
        ck.save(1, {"part": FlatPart(torch.arange(6.0), (2, 3), 0)}).committed.result(60)
        ck.restore({"part": part})
        ck.restore({"part": tensor})
    assert_same(part.tensor, torch.arange(6.0))
    assert_same(tensor, torch.arange(6.0).view(2, 3))


def test_another_shape_or_dtype_is_a_mismatch_before_anything_changes(root: Path) -> None:
    live = torch.zeros(3)
    with Checkpointer(root, OPTIONS) as ck:
        ck.save(1, {"part": torch.ones(2, 3)}).committed.result()
        for part in (FlatPart(live, (3, 2), 0), FlatPart(live.double(), (2, 3), 0)):
            with pytest.raises(StateMismatch, match="part: "):
                ck.restore({"part": part})
    assert not live.any()


def test_runs_that_meet_in_memory_are_filled_where_they_hold_the_same_and_refused_else(
    root: Path,
) -> None:
    with Checkpointer(root, OPTIONS) as ck:
        same, other = torch.arange(6.0), torch.arange(6.0) + 1
        ck.save(1, {"a": same, "b": same.clone()}).committed.result()
        ck.save(2, {"a": same, "b": other}).committed.result()
        live = torch.zeros(3)
        state = {"a": FlatPart(live, (6,), 2), "b": FlatPart(live, (6,), 2)}
        ck.restore(state, step=1)
        assert_same(live, same[2:5])
        with pytest.raises(StateMismatch, match="a: shares memory with b here"):
            ck.restore(state, step=2)
        assert_same(live, same[2:5])


def test_runs_at_other_places_of_one_leaf_are_not_taken_for_the_same(root: Path) -> None:
    value = torch.arange(6.0)
    with Checkpointer(root, OPTIONS) as ck:
        ck.save(1, {"a": value, "tied": value}).committed.result()
        live = torch.zeros(3)
        with pytest.raises(StateMismatch):
            ck.restore({"a": FlatPart(live, (6,), 0), "tied": FlatPart(live, (6,), 3)})
    assert not live.any()


@pytest.mark.parametrize("gone", ["freed", "meta"])
def test_a_run_without_memory_is_refused_before_anything_changes(root: Path, gone: str) -> None:
    live = torch.zeros(3, device="meta" if gone == "meta" else "cpu")
    if gone == "freed":
        live.untyped_storage().resize_(0)
    with Checkpointer(root, OPTIONS) as ck:
        ck.save(1, {"part": torch.ones(2, 3)}).committed.result()
        with pytest.raises(StateMismatch, match="part: the live tensor has no memory"):
            ck.restore({"part": FlatPart(live, (2, 3), 0)})
