"""Leaf names, eager flags, staged leaves and the refusals of `flatten`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_core.errors import ConfigError
from ckpt_core.state import RngState, flatten
from tests.state.state_helpers import LIMIT, through

BIG = 100_000


def names(state: Any) -> list[str]:
    return [leaf.spec.name for leaf in flatten(state, eager_leaf_bytes=LIMIT).leaves]


def eager(state: Any) -> dict[str, bool]:
    return {leaf.spec.name: leaf.eager for leaf in flatten(state, eager_leaf_bytes=LIMIT).leaves}


def test_names_are_dotted_paths() -> None:
    model = torch.nn.ModuleDict({"wte": torch.nn.Linear(2, 2, bias=False)})
    opt = torch.optim.AdamW(model.parameters())
    model["wte"](torch.ones(1, 2)).sum().backward()
    opt.step()
    assert names({"model": model, "opt": opt}) == [
        "model.wte.weight",
        "opt.state.0.step",
        "opt.state.0.exp_avg",
        "opt.state.0.exp_avg_sq",
    ]
    assert names(torch.ones(1)) == ["value"]


def test_names_are_unique_and_never_reserved() -> None:
    one = torch.ones
    state = {
        "a.b": one(1),
        "a": {"b": one(1)},
        "a.b~1": one(1),
        "__metadata__": one(1),
        "__pad__0": one(1),
        "": one(1),
        "\ud800": one(1),
        "n\0l": one(1),
    }
    found = names(state)
    assert len(set(found)) == 8
    assert "__metadata__" not in found and not any(name.startswith("__pad__") for name in found)
    assert found == names(state)
    assert list(through(state)) == list(state)


class Ema:
    def __init__(self, size: int) -> None:
        self.shadow = torch.zeros(size)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def test_only_parameters_optimizer_state_and_plain_trees_are_lazy() -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(BIG))
    model.register_buffer("running", torch.zeros(BIG))
    model.small = torch.nn.Parameter(torch.zeros(3))
    opt = torch.optim.SGD(model.parameters(), momentum=0.9)
    sum(p.sum() for p in model.parameters()).backward()
    opt.step()
    state = {"m": model, "o": opt, "ema": Ema(BIG), "tree": torch.zeros(BIG), "rng": RngState()}
    flags = eager(state)
    lazy = {name for name, flag in flags.items() if not flag}
    assert lazy == {"m.weight", "o.state.0.momentum_buffer", "tree"}


def test_a_leaf_shared_with_an_eager_place_is_eager() -> None:
    ema = Ema(BIG)
    assert eager({"tree": ema.shadow, "ema": ema}) == {"tree": True}


def test_staged_views_give_no_new_leaf() -> None:
    weight, other = torch.randn(4, 4), torch.randn(3)
    staged = flatten({"w": weight}, eager_leaf_bytes=LIMIT).leaves
    flat = flatten({"m": {"w": weight}, "x": other}, eager_leaf_bytes=LIMIT, staged=staged)
    assert [leaf.spec.name for leaf in flat.leaves] == ["x"]
    assert flat.skeleton.leaf_names() == {"w", "x"}
    tree = flat.skeleton.unflatten({"w": weight, "x": other}, trusted=False)
    assert torch.equal(tree["m"]["w"], weight)


def test_a_name_taken_by_a_staged_leaf_gets_a_suffix() -> None:
    staged = flatten({"w": torch.ones(2)}, eager_leaf_bytes=LIMIT).leaves
    flat = flatten({"w": torch.ones(3)}, eager_leaf_bytes=LIMIT, staged=staged)
    assert [leaf.spec.name for leaf in flat.leaves] == ["w~1"]


def test_a_partial_overlap_with_a_staged_leaf_is_refused() -> None:
    weight = torch.randn(8)
    staged = flatten({"w": weight}, eager_leaf_bytes=LIMIT).leaves
    with pytest.raises(ConfigError, match=r"'part'.*'w'"):
        flatten({"part": weight[2:6]}, eager_leaf_bytes=LIMIT, staged=staged)


def cyclic() -> Any:
    tree: dict[str, Any] = {"a": {}}
    tree["a"]["b"] = tree
    return tree


def deep(depth: int) -> Any:
    tree: Any = 1
    for _ in range(depth):
        tree = [tree]
    return tree


class Sub(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (cyclic(), r"'a\.b' contains itself"),
        (deep(5000), "nests more than"),
        ({"f": {"g": lambda: 1}}, r"'f\.g' is a builtins\.function.*load_state_dict"),
        ({"lock": threading.Lock()}, "'lock'"),
        ({"m": torch.ones(2, device="meta")}, "'m' is a meta tensor"),
        ({"s": torch.ones(2).as_subclass(Sub)}, "'s' is a .*Sub"),
        ({torch.ones(1): 1}, "tensor as a key"),
        ({"lazy": torch.nn.LazyLinear(3)}, "forward pass"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_path(state: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        flatten(state, eager_leaf_bytes=LIMIT)


def nested(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(3), torch.ones(5)], layout=layout)


def masked() -> Any:
    return torch.masked.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))


class Wrapper(torch.Tensor):
    """Of another tensor; knows no function."""

    inner: torch.Tensor

    def __new__(cls) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)
        made.inner = torch.ones(3)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(func))


class Flattens(Wrapper):
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None


class Wrapped:
    def __init__(self, value: Wrapper) -> None:
        self.value = value

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"inner": self.value.inner}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value.inner = state["inner"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of:UserWarning")
@pytest.mark.parametrize(
    ("make", "advice", "follow"),
    [
        (lambda: nested(torch.strided), r"its \.unbind\(\)", lambda t: t.unbind()),
        (
            lambda: nested(torch.jagged),
            r"its \.values\(\) and \.offsets\(\)",
            lambda t: [t.values(), t.offsets()],
        ),
        (
            masked,
            r"its \.get_data\(\) and \.get_mask\(\)",
            lambda t: [t.get_data(), t.get_mask()],
        ),
        (
            Flattens,
            r"which its __tensor_flatten__\(\) names, or wrap it",
            lambda t: {name: getattr(t, name) for name in t.__tensor_flatten__()[0]},
        ),
        (Wrapper, r"tensor: wrap it in an object with state_dict\(\)", Wrapped),
        (
            lambda: torch.ones(2).as_subclass(Sub),
            r"store \.as_subclass\(torch\.Tensor\), or",
            lambda t: t.as_subclass(torch.Tensor),
        ),
    ],
)
def test_what_a_refusal_says_to_store_instead_is_stored(
    make: Callable[[], Any], advice: str, follow: Callable[[Any], Any]
) -> None:
    value = make()
    with pytest.raises(ConfigError, match=advice):
        flatten({"t": value}, eager_leaf_bytes=LIMIT)
    assert flatten({"t": follow(value)}, eager_leaf_bytes=LIMIT).leaves


def test_the_deepest_tree_allowed_comes_back() -> None:
    tree = deep(128)
    assert through(tree) == tree


def test_a_shared_list_is_no_cycle() -> None:
    row = [1]
    assert through([row, row]) == [[1], [1]]


def test_numpy_arrays_are_eager_wherever_they_are() -> None:
    array = np.zeros(BIG)
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))])
    opt.state["own"] = {"array": np.zeros(BIG)}  # type: ignore[index]
    state = {
        "plain": array,
        "list": [array[::2].copy()],
        "view": array[: BIG // 2],
        "opt": opt,
    }
    found = eager(state)
    assert {"plain", "list.0", "opt.state.own.array"} <= found.keys()
    assert all(found.values()), found


def test_generators_are_known_by_their_class_and_not_by_its_name() -> None:
    theirs = type("RngState", (), {"state_dict": dict, "load_state_dict": lambda self, state: None})
    state = {"theirs": theirs(), "ours": [{"rng": RngState()}], "plain": 1}
    skeleton = flatten(state, eager_leaf_bytes=0).skeleton
    assert skeleton.entries_with_generators() == ["ours"]


def test_a_tensor_that_leaked_out_of_a_vmap_is_refused_with_its_path() -> None:
    leaked: list[torch.Tensor] = []
    torch.vmap(lambda row: (leaked.append(row), row.sum())[1])(torch.ones(3, 2))
    with pytest.raises(ConfigError, match=r"'a\.x' has no bytes here"):
        flatten({"w": torch.ones(2), "a": {"x": leaked[0]}}, eager_leaf_bytes=LIMIT)
