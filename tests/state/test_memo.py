"""A state that is taken apart with a memory of earlier ones gives what it gives without."""

from __future__ import annotations

import gc
import json
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ckpt_core.errors import ConfigError
from ckpt_core.state import FlatState, Skeleton, SpecMemo, flatten
from ckpt_core.state.nodes import MAX_DEPTH
from tests.quick import drawn
from tests.state.state_helpers import LIMIT

DTYPES = (torch.float32, torch.float16, torch.int64, torch.complex64)
SHAPES = ((), (1,), (3,), (2, 3), (0, 4), (1, 1, 5), (40, 50))


def seen(flat: FlatState) -> tuple[Any, ...]:
    """All that a checkpoint stores of a state, and how it is copied."""
    tensors = [leaf.tensor for leaf in flat.leaves]
    return (
        json.loads(flat.skeleton.to_text()),
        list(flat.specs),
        [leaf.spec for leaf in flat.leaves],
        [leaf.eager for leaf in flat.leaves],
        [(one.shape, one.stride(), one.dtype, one.requires_grad) for one in tensors],
        [one.untyped_storage()._cdata for one in tensors],
        [one.data_ptr() for one in tensors],
        flat.placements,
        flat.names_of_buffers(),
        flat.names_of_rng(),
    )


def check(state: Any, memo: SpecMemo) -> FlatState:
    """Takes a state apart with the memo, as it is without one."""
    with_it = flatten(state, eager_leaf_bytes=LIMIT, memo=memo)
    assert seen(with_it) == seen(flatten(state, eager_leaf_bytes=LIMIT))
    rows = zip(with_it.leaves, with_it.tensors, with_it.ready, with_it.pointers, strict=False)
    for leaf, tensor, ready, pointer in rows:
        assert tensor.data_ptr() == leaf.tensor.data_ptr()
        if ready:
            assert leaf.eager and tensor.is_contiguous() and tensor.data_ptr() == pointer
        else:
            assert not tensor.requires_grad and type(tensor) is Tensor
    return with_it


def remembered(state: Any, memo: SpecMemo) -> bool:
    """Whether nothing was worked out again."""
    last, flat = memo.last, flatten(state, eager_leaf_bytes=LIMIT, memo=memo)
    return last is not None and flat.eager is last.eager


def tensor_of(draw: st.DrawFn) -> Tensor:
    shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
    made = torch.ones(shape, dtype=dtype)
    if draw(st.booleans()) and dtype.is_floating_point:
        return nn.Parameter(made, requires_grad=draw(st.booleans()))
    return made


def scalar_of(draw: st.DrawFn) -> Any:
    return draw(
        st.one_of(
            st.integers(0, 3), st.booleans(), st.none(), st.sampled_from([0.0, -0.0, 1.0, "a", "é"])
        )
    )


def tree_of(draw: st.DrawFn, depth: int = 0) -> dict[Any, Any]:
    names = draw(st.lists(st.sampled_from("abcde"), unique=True, max_size=4))
    made: dict[Any, Any] = draw(st.sampled_from([dict, OrderedDict]))()
    for name in names:
        kind = draw(st.sampled_from(["tensor", "tensor", "tree", "list", "scalar", "tied"]))
        if kind == "tree" and depth < 2:
            made[name] = tree_of(draw, depth + 1)
        elif kind == "list":
            made[name] = [tensor_of(draw) for _ in range(draw(st.integers(0, 3)))]
        elif kind == "scalar":
            made[name] = scalar_of(draw)
        elif kind == "tied" and (others := [v for v in made.values() if isinstance(v, Tensor)]):
            made[name] = draw(st.sampled_from(others))
        else:
            made[name] = tensor_of(draw)
    return made


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every container of the tree with each of its keys."""
    found = []
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        found.append((tree, key))
        if isinstance(value, dict | list):
            found += places(value)
    return found


def change(draw: st.DrawFn, tree: dict[Any, Any]) -> None:
    """One thing that training, or its user, does to a state between two saves."""
    spots = places(tree)
    if not spots:
        tree["new"] = tensor_of(draw)
        return
    where, key = draw(st.sampled_from(spots))
    value = where[key]
    kind = draw(st.sampled_from(sorted(CHANGES)))
    if isinstance(value, Tensor):
        CHANGES[kind](draw, where, key, value, spots)
    elif isinstance(value, dict):
        entries = list(value.items())[::-1]
        value.clear()
        value.update(entries)
    else:
        where[key] = scalar_of(draw)


def data_is_another(draw: Any, where: Any, key: Any, value: Tensor, spots: Any) -> None:
    value.data = torch.zeros(draw(st.sampled_from(SHAPES)), dtype=value.dtype)


def shares(draw: Any, where: Any, key: Any, value: Tensor, spots: Any) -> None:
    holder, name = draw(st.sampled_from(spots))
    if isinstance(holder[name], Tensor):
        other = holder[name].detach()
        halves = draw(st.booleans()) and other.dim() and other.shape[0] > 1
        where[key] = other[1:] if halves else other


def one_storage(draw: Any, where: Any, key: Any, value: Tensor, spots: Any) -> None:
    """As when a framework moves all parameters into one buffer."""
    each = [h[k] for h, k in spots if type(h[k]) in (Tensor, nn.Parameter)]
    each = [one for one in dict.fromkeys(each) if one.dtype is torch.float32]
    flat = torch.zeros(sum(one.numel() for one in each))
    start = 0
    for one in each:
        one.data = flat[start : start + one.numel()].view(one.shape)
        start += one.numel()


CHANGES: dict[str, Any] = {
    "value": lambda draw, where, key, value, spots: value.untyped_storage().fill_(1),
    "replaced by its like": lambda draw, where, key, value, spots: where.__setitem__(
        key, value.detach().clone()
    ),
    "replaced": lambda draw, where, key, value, spots: where.__setitem__(key, tensor_of(draw)),
    "data": data_is_another,
    "grad": lambda draw, where, key, value, spots: value.requires_grad_(
        value.dtype.is_floating_point and value.is_leaf and not value.requires_grad
    ),
    "resized": lambda draw, where, key, value, spots: value.detach().resize_(
        draw(st.sampled_from([1, 2]))
    ),
    "transposed": lambda draw, where, key, value, spots: where.__setitem__(
        key, value.detach().t() if value.dim() == 2 else value.detach()
    ),
    "expanded": lambda draw, where, key, value, spots: where.__setitem__(
        key, value.detach().expand(2, *value.shape)
    ),
    "gone": lambda draw, where, key, value, spots: where.pop(key),
    "a scalar now": lambda draw, where, key, value, spots: where.__setitem__(key, 3),
    "shares": shares,
    "one storage": one_storage,
}


@settings(max_examples=drawn(150), deadline=None)
@given(st.data())
def test_any_changes_between_saves_are_all_seen(data: Any) -> None:
    tree, memo = tree_of(data.draw), SpecMemo()
    check(tree, memo)
    for _ in range(data.draw(st.integers(1, 5))):
        for _ in range(data.draw(st.integers(0, 2))):
            change(data.draw, tree)
        check(tree, memo)


def test_empty_tensors_that_are_one_or_two_are_told_apart() -> None:
    one, memo = torch.zeros(0, 4), SpecMemo()
    for state in ({"a": one, "b": one}, {"a": one.clone(), "b": one}, {"a": one, "b": one}):
        check(state, memo)
        check(state, memo)


def model() -> dict[str, Any]:
    net = nn.Sequential(nn.Linear(3, 70), nn.BatchNorm1d(70), nn.Linear(70, 3))
    adam = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 3)).sum().backward()
    adam.step()
    return {"net": net, "adam": adam, "step": 0}


def test_a_state_that_only_goes_on_is_remembered() -> None:
    state, memo = model(), SpecMemo()
    first = check(state, memo)
    assert any(first.ready) and len(first.pointers) == len(first.ready)
    for step in range(1, 4):
        state["step"] = step
        state["adam"].step()
        again = check(state, memo)
        assert again.eager is first.eager and again.specs is first.specs
        assert again.ready == first.ready
        assert again.skeleton.to_json()["tree"]["v"]["step"] == step


def adam_of(count: int) -> dict[Any, Any]:
    names = ("step", "exp_avg", "exp_avg_sq")
    return {index: {name: torch.ones(index + 1) for name in names} for index in range(count)}


ROWS: dict[str, Any] = {
    "nothing": lambda rows: None,
    "one tensor is another": lambda rows: rows[1].update(exp_avg=torch.zeros(7)),
    "one is a number": lambda rows: rows[1].update(step=3),
    "one is gone": lambda rows: rows[1].pop("exp_avg"),
    "a row is empty": lambda rows: rows[1].clear(),
    "a row is gone": lambda rows: rows.pop(1),
    "a row has another name": lambda rows: rows.__setitem__("1", rows.pop(1)),
    "rows in another order": lambda rows: rows.__setitem__(0, rows.pop(0)),
    "names in another order": lambda rows: rows[1].__setitem__("step", rows[1].pop("step")),
    "a key is a number": lambda rows: rows[1].__setitem__(3, rows[1].pop("step")),
    "a key is a pair": lambda rows: rows[1].__setitem__(("a", 1), torch.ones(1)),
    "a row is of another kind": lambda rows: rows.__setitem__(1, OrderedDict(rows[1])),
    "a row is deeper": lambda rows: rows[1].update(exp_avg={"low": torch.ones(2)}),
    "a row is there twice": lambda rows: rows.__setitem__(1, rows[0]),
}


@pytest.mark.parametrize("name", ROWS)
def test_dicts_of_tensors_in_a_container_are_what_each_alone_would_be(name: str) -> None:
    rows, memo = adam_of(3), SpecMemo()
    for state in ({"state": rows}, {"state": list(rows.values())}, rows):
        check(state, memo)
        check(state, memo)
    ROWS[name](rows)
    for state in ({"state": rows}, {"state": list(rows.values())}, {"other": rows}, rows):
        check(state, memo)
        check(state, memo)
        kept = flatten(state, eager_leaf_bytes=LIMIT, memo=memo).skeleton.to_json()
        found = Skeleton.from_json(kept, path="memory")
        leaves = {leaf.spec.name: leaf.tensor for leaf in check(state, memo).leaves}
        again = found.unflatten(leaves, trusted=False)
        torch.testing.assert_close(again, state, rtol=0, atol=0)


def test_dicts_of_tensors_nest_no_deeper_than_others() -> None:
    state: Any = [{"w": torch.ones(1)}]
    for _ in range(MAX_DEPTH - 1):
        state = [state]
    with pytest.raises(ConfigError, match="nests more than"):
        flatten(state, eager_leaf_bytes=LIMIT)
    check(state[0], SpecMemo())


def test_tied_weights_are_remembered_and_untied_ones_seen() -> None:
    weight = torch.ones(5)
    state, memo = {"in": weight, "out": weight, "other": torch.ones(2)}, SpecMemo()
    check(state, memo)
    assert remembered(state, memo)
    assert len(check(state, memo).specs) == 2
    state["out"] = weight.clone()
    assert len(check(state, memo).specs) == 3


def test_tensors_replaced_by_their_like_are_read_where_they_are_now() -> None:
    state, memo = {"w": torch.ones(5), "v": torch.ones(3)}, SpecMemo()
    check(state, memo)
    state["w"] = torch.full((5,), 2.0)
    flat = check(state, memo)
    assert flat.pointers[0] == state["w"].data_ptr()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(4).to_sparse(),
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
        lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
        lambda: torch.ones(3).expand(4, 3),
        lambda: torch._neg_view(torch.ones(3)),
    ],
)
def test_a_tensor_that_takes_the_place_of_a_plain_one_is_taken_as_what_it_is(make: Any) -> None:
    state, memo = {"w": torch.ones(3), "v": torch.ones(2)}, SpecMemo()
    check(state, memo)
    state["w"] = make()
    for _ in range(2):
        assert json.loads(flatten(state, eager_leaf_bytes=LIMIT, memo=memo).skeleton.to_text()) == (
            json.loads(flatten(state, eager_leaf_bytes=LIMIT).skeleton.to_text())
        )
    state["w"] = torch.ones(3)
    check(state, memo)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3, device="meta"),
        lambda: torch.nested.nested_tensor([torch.ones(3)], layout=torch.jagged),
    ],
)
def test_a_tensor_that_cannot_be_stored_is_refused_in_the_place_of_one_that_can(make: Any) -> None:
    state, memo = {"w": torch.ones(3)}, SpecMemo()
    check(state, memo)
    state["w"] = make()
    with pytest.raises(ConfigError, match="'w'"):
        flatten(state, eager_leaf_bytes=LIMIT, memo=memo)


def test_the_same_names_in_other_containers_are_another_tree() -> None:
    memo, w = SpecMemo(), torch.ones(3)
    for state in (
        {"a": {"b": w}},
        {"a.b": w},
        {"a": [w]},
        {"a": (w,)},
        {"a": {"0": w}},
        {"a": {0: w}},
    ):
        check(state, memo)
        check(state, memo)


def test_nothing_keeps_the_tensors_of_a_state_that_is_gone() -> None:
    state, memo = model(), SpecMemo()
    check(state, memo)
    flat = check(state, memo)
    gone = [weakref.ref(p) for p in state["net"].parameters()]
    del state, flat
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_a_step_that_is_still_being_written_keeps_its_own_values() -> None:
    net, memo = nn.Linear(2, 2), SpecMemo()
    earlier = flatten({"net": net, "step": 1}, eager_leaf_bytes=LIMIT, memo=memo)
    later = flatten({"net": net, "step": 2}, eager_leaf_bytes=LIMIT, memo=memo)
    steps = [flat.skeleton.to_json()["tree"]["v"]["step"] for flat in (later, earlier)]
    assert steps == [2, 1]
