"""Whether tensors are like those of the save before is told alike with torch's guards and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from ckpt_core.state import traits
from ckpt_core.state.traits import Traits


@pytest.fixture(params=["with guards", "without"], autouse=True)
def guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "without":
        # As with a torch that has none.
        monkeypatch.setattr(traits, "_guards", lambda: None)
    return bool(request.param == "with guards")


def pointers(found: Traits, tensors: list[Tensor]) -> list[int] | None:
    looked = found.look(tensors, [False] * len(tensors))
    assert looked is None or looked[1] is tensors
    return None if looked is None else looked[0]


def seen(tensors: list[Tensor]) -> Traits:
    """What is known of tensors that have been there at three saves."""
    found = Traits.of(tensors, [])
    assert found is not None
    for _ in range(2):
        assert pointers(found, tensors) == [tensor.data_ptr() for tensor in tensors]
    return found


def many() -> list[Tensor]:
    """More than are looked at in one go."""
    return [torch.full((2, 2), float(index)) for index in range(600)]


def test_this_torch_has_guards_that_notice_what_they_must(guards: bool) -> None:
    if guards and torch.__version__ >= "2.6":
        assert traits._guards() is not None


def test_the_same_list_tells_that_no_tensor_has_moved() -> None:
    tensors = many()
    found = seen(tensors)
    first = pointers(found, tensors)
    assert pointers(found, tensors) is first
    tensors[300] = tensors[300].clone()
    moved = pointers(found, tensors)
    assert moved is not first and moved == [tensor.data_ptr() for tensor in tensors]
    assert pointers(found, tensors) is moved


@pytest.mark.parametrize("which", [{299}, set(range(600))], ids=["one", "all"])
def test_an_alias_keeps_the_memory_that_its_tensor_had(which: set[int]) -> None:
    tensors = many()
    found = seen(tensors)
    before = [tensor.data_ptr() for tensor in tensors]
    looked = found.look(tensors, [index in which for index in range(600)])
    assert looked is not None
    for index, (tensor, alias) in enumerate(zip(tensors, looked[1], strict=True)):
        assert (alias is not tensor) is (index in which)
        tensor.data = torch.zeros(2, 2)
        if index in which:
            assert not alias.requires_grad
            assert alias.data_ptr() == before[index] and alias[0, 0] == index


CHANGES: dict[str, Callable[[Tensor], Tensor | None]] = {
    "data of another shape": lambda one: setattr(one, "data", torch.zeros(4, 1)),
    "resized": lambda one: one.resize_(1),
    "transposed": lambda one: one.t_(),
    "wants a gradient": lambda one: one.requires_grad_(),
    "a parameter": lambda one: Parameter(one, requires_grad=False),
    "another dtype": lambda one: one.int(),
    "the same bytes as numbers": lambda one: one.view(torch.int32),
    "negative": lambda one: torch._neg_view(one),
    "negative data": lambda one: setattr(one, "data", torch._neg_view(torch.zeros(2, 2))),
    "without memory": lambda one: one.to("meta"),
    "sparse": lambda one: one.to_sparse(),
    "sparse rows": lambda one: one.to_sparse_csr(),
    "expanded": lambda one: one[:1].expand(2, 2),
    "complex": lambda one: torch.zeros(2, 2, dtype=torch.complex64).conj(),
    "quantized": lambda one: torch.quantize_per_tensor(one, 0.1, 0, torch.qint8),
    "of torch's library for processors": lambda one: one.to_mkldnn(),
    "nested": lambda one: torch.nested.nested_tensor([one]),
    "freed": lambda one: one.untyped_storage().resize_(0) and None,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_one_tensor_is_noticed(name: str) -> None:
    tensors = many()
    found = seen(tensors)
    changed: Any = CHANGES[name](tensors[299])
    if isinstance(changed, Tensor):
        tensors[299] = changed
    assert pointers(found, tensors) is None


def test_tensors_that_come_to_share_their_memory_are_noticed() -> None:
    tensors = many()
    found = seen(tensors)
    tensors[5].data = tensors[299]
    assert pointers(found, tensors) is None


def test_tensors_that_share_no_longer_are_noticed() -> None:
    tensors = many()
    whole = torch.zeros(4, 2)
    tensors[1], tensors[2] = whole[:2], whole[2:]
    found = Traits.of(tensors, [1, 2])
    assert found is not None
    for _ in range(2):
        assert pointers(found, tensors) is not None
    tensors[2] = torch.zeros(2, 2)
    assert pointers(found, tensors) is None


def test_a_tensor_that_is_there_twice_is_known_as_before() -> None:
    tensors = many()
    tensors[3] = tensors[2]
    found = seen(tensors)
    assert pointers(found, tensors) is not None
    tensors[3] = tensors[2].clone()
    assert pointers(found, tensors) is None


def test_modes_of_torch_change_no_tensor() -> None:
    tensors = many()
    found = seen(tensors)
    for mode in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")):
        for _ in range(2):
            with mode():
                assert pointers(found, tensors) is not None
        assert pointers(found, tensors) is not None


class Blind:
    """Guards of a torch to come, which look at something else."""

    def __init__(self, *tensors: Tensor, **dims: Any) -> None:
        pass

    def check(self, *tensors: Tensor) -> bool:
        return True


class Strict(Blind):
    def check(self, *tensors: Tensor) -> bool:
        return False


def test_guards_that_notice_too_little_or_too_much_are_not_used() -> None:
    assert not traits._notices(Blind)
    assert not traits._notices(Strict)
