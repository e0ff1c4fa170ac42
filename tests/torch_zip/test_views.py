"""What is stored of tensors that share memory, or are not dense, or have none."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Buffer, Parameter

from ckpt_core import ConfigError
from ckpt_core.torch_zip import plan_zip
from tests.torch_zip.zip_files import (
    NOT_DENSE,
    TREES,
    Flagged,
    assert_alike,
    loaded,
    planned,
    raw,
    saved,
    ties,
)


def _data_bytes(tree: Any) -> int:
    return sum(extent.nbytes for extent in plan_zip(tree).layout.extents)


def test_views_do_not_drag_their_buffer_into_the_file() -> None:
    flat = torch.randn(1_000_000)
    views = {"a": flat[:10], "b": flat[10:30].view(4, 5)}
    assert _data_bytes(views) == 30 * 4
    assert len(planned(views)) < 5000 < flat.nbytes < len(saved(views))


def test_all_views_of_a_flat_buffer_take_the_bytes_of_the_buffer() -> None:
    flat = torch.arange(100)
    views = [flat[start : start + 10] for start in range(0, 100, 10)]
    assert _data_bytes(views) == flat.nbytes
    assert torch.cat(loaded(planned(views))).equal(flat)


def test_views_that_are_the_same_share_memory_after_load() -> None:
    flat = torch.randn(20)
    tree = {"w": flat[:10], "head": flat[:10], "p": Parameter(flat[:10]), "other": flat[5:15]}
    back = loaded(planned(tree))
    assert ties(back) == [[".other"], [".w", ".head", ".p"]]
    back["w"][0] = 7
    assert back["p"][0] == 7
    assert _data_bytes(tree) == 80


def test_views_of_one_memory_as_two_dtypes_are_stored_apart() -> None:
    base = torch.randn(4)
    back = loaded(planned([base, base.view(torch.int32)]))
    assert back[0].view(torch.int32).equal(back[1]) and ties(back) == [[".0"], [".1"]]


def test_empty_tensors_have_no_extent_and_load() -> None:
    tree = [torch.empty(0), torch.empty(3, 0, 2, dtype=torch.half), Parameter(torch.empty(0))]
    assert plan_zip(tree).tensors == ()
    assert_alike(loaded(planned(tree)), tree)


def test_a_slice_with_a_history_becomes_a_plain_leaf() -> None:
    leaf = torch.randn(10, requires_grad=True)
    inner = leaf[2:5] * 1
    back = loaded(planned({"slice": leaf[2:5], "inner": inner, "leaf": leaf}))
    assert not back["slice"].requires_grad and not back["inner"].requires_grad
    assert back["leaf"].requires_grad and back["leaf"].is_leaf
    assert inner.grad_fn is not None


_BETA = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel"),
]


def _beta(test: Any) -> Any:
    for mark in _BETA:
        test = mark(test)
    return test


@_beta
@pytest.mark.parametrize("name", NOT_DENSE)
def test_what_is_not_dense_is_stored_by_its_parts_as_torch_does(name: str, seeded: int) -> None:
    tree = NOT_DENSE[name]()
    ours, theirs = loaded(planned(tree)), loaded(saved(tree))
    if isinstance(ours, Tensor):
        assert_alike(ours, theirs)
    assert repr(ours) == repr(theirs)


@_beta
def test_jagged_tensors_are_stored_by_their_parts() -> None:
    tree = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
    back = loaded(planned(tree))
    assert type(back) is type(tree) and back.values().equal(tree.values())


def test_parts_of_a_sparse_tensor_are_read_when_the_file_is_filled() -> None:
    sparse = torch.eye(3).to_sparse()
    plan = plan_zip(sparse)
    sparse.values().fill_(5)
    assert [raw(tensor) for tensor in plan.tensors][-1] == raw(torch.full((3,), 5.0))


def test_conjugate_and_negative_views_load_with_their_values() -> None:
    base = torch.randn(3, dtype=torch.complex64)
    tree = {"base": base, "conj": base.conj(), "neg": base.conj().imag}
    back = loaded(planned(tree))
    for name, tensor in tree.items():
        assert back[name].resolve_conj().resolve_neg().equal(tensor.resolve_conj().resolve_neg())


def test_subclasses_and_attributes_of_tensors_stay() -> None:
    flat = torch.randn(10)
    flagged = flat[:3].as_subclass(Flagged)
    flagged.note = "x"  # type: ignore[attr-defined]
    buffer = Buffer(flat[3:5])
    back = loaded(planned([flagged, buffer]))
    assert type(back[0]) is Flagged and back[0].note == "x"
    assert isinstance(back[1], Buffer) and back[1].equal(flat[3:5])
    assert _data_bytes([flagged, buffer]) == 20


def test_a_storage_in_the_tree_is_stored_whole_and_once() -> None:
    storage = torch.arange(4).untyped_storage()
    back = loaded(planned([storage, storage]))
    assert bytes(back[0]) == bytes(storage) and back[0].data_ptr() == back[1].data_ptr()
    assert _data_bytes([storage, storage]) == 32


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_distributed_tensors_are_stored_as_torch_does(one_rank: None) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    tensor = distribute_tensor(torch.randn(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
    back = loaded(planned({"w": tensor}))["w"]
    assert type(back) is type(tensor) and back.placements == tensor.placements
    assert back.to_local().equal(tensor.to_local())


def test_freed_memory_is_refused_and_not_made_longer() -> None:
    freed = torch.randn(10)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ConfigError, match=r"^model\.w: this Tensor .* its memory was freed"):
        plan_zip({"model": {"ok": torch.ones(1), "w": freed}})
    assert freed.untyped_storage().nbytes() == 0


def test_a_storage_without_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="meta device"):
        plan_zip({"s": torch.empty(3, device="meta").untyped_storage()})


@pytest.mark.parametrize("name", TREES)
def test_the_live_tree_is_not_changed(name: str, seeded: int) -> None:
    tree = TREES[name]()
    before = saved(tree)
    plan_zip(tree)
    assert saved(tree) == before


def test_tensors_of_the_plan_are_the_live_memory() -> None:
    weight = torch.zeros(4)
    plan = plan_zip({"w": weight})
    weight.fill_(3)
    assert plan.tensors[0].data_ptr() == weight.data_ptr()
    assert plan.tensors[0].tolist() == [3.0] * 4


@pytest.mark.parametrize("broken", [False, True])
def test_nothing_is_held_when_the_plan_is_gone(broken: bool) -> None:
    storage = torch.UntypedStorage(64)
    alive = weakref.ref(storage)
    tree = {"w": torch.empty(0).set_(storage), "bad": (lambda: 0) if broken else 0}
    del storage
    gc.disable()
    try:
        try:
            plan_zip(tree)
        except ConfigError:
            assert broken
        del tree
        assert alive() is None
    finally:
        gc.enable()
