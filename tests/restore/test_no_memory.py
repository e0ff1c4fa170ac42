"""Live tensors without memory, on the meta device or freed: torch's copies into them go nowhere, or end the
process, and a restore must have refused them before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ckpt_core import Checkpointer, StateMismatch
from ckpt_core.errors import RestoreWarning

GONE = "has no memory: call to_empty\\(\\) first"


class Own(nn.Linear):
    """Whatever it is filled by, a copy at most is what `load_state_dict` sees."""

    def get_extra_state(self) -> dict[str, int]:
        return {"a": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def hooked() -> nn.Module:
    made = nn.Linear(3, 3)
    made.register_load_state_dict_pre_hook(lambda *_: None)
    return made


class Assigns(nn.Linear):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict, assign=True)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(3, 3)),
    "normed": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
    "large": lambda: nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300)),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    "extra state": lambda: Own(3, 3),
    "hooked": hooked,
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def names_of(module: nn.Module) -> set[str]:
    return {
        f"model.{name}" for name, value in module.state_dict().items() if torch.is_tensor(value)
    }


@pytest.mark.parametrize("kind", MODULES)
def test_a_module_on_meta_is_refused_by_the_names_of_its_tensors(kind: str, root: Path) -> None:
    with torch.device("meta"):
        live = MODULES[kind]()
    other = torch.zeros(3)
    with Checkpointer(root) as ck:
        saved = MODULES[kind]()
        ck.save(1, {"other": torch.ones(3), "model": saved}).committed.result()
        with pytest.raises(StateMismatch, match=GONE) as caught:
            ck.restore({"other": other, "model": live})
        assert {text.partition(":")[0] for text in caught.value.problems} == names_of(saved)
        assert not other.any()
        with pytest.warns(RestoreWarning, match="in part"):
            found = ck.restore({"other": other, "model": live}, partial=True)
        live.to_empty(device="cpu")
        ck.restore({"other": other, "model": live})
    assert found is not None and other.all()
    assert {text.partition(":")[0] for text in found.left_out} == names_of(saved)
    for name, value in saved.state_dict().items():
        assert not torch.is_tensor(value) or torch.equal(value, live.state_dict()[name])


@pytest.mark.parametrize("gone", ["meta", "freed"])
@pytest.mark.parametrize("kind", ["plain", "normed", "large"])
def test_one_child_without_memory_is_refused_and_the_others_stay(
    kind: str, gone: str, root: Path
) -> None:
    saved, live = MODULES[kind](), MODULES[kind]()
    first: Any = live[0]  # type: ignore[index]
    before = {name: value.clone() for name, value in live.state_dict().items()}
    if gone == "meta":
        first.to("meta")
    else:
        first.weight.untyped_storage().resize_(0)
        first.bias.untyped_storage().resize_(0)
    with Checkpointer(root) as ck:
        ck.save(1, {"model": saved}).committed.result()
        with pytest.raises(StateMismatch) as caught:
            ck.restore({"model": live})
    problems = {text.partition(":")[0] for text in caught.value.problems}
    assert problems == {"model.0.weight", "model.0.bias"}
    for name, value in live.state_dict().items():
        assert name.startswith("0.") or torch.equal(value, before[name])


@pytest.mark.parametrize("kind", ["parametrized", "extra state", "hooked"])
def test_a_freed_parameter_of_a_module_with_a_load_of_its_own_is_refused(
    kind: str, root: Path
) -> None:
    saved, live = MODULES[kind](), MODULES[kind]()
    next(live.parameters()).untyped_storage().resize_(0)
    with Checkpointer(root) as ck:
        ck.save(1, {"model": saved}).committed.result()
        with pytest.raises(StateMismatch, match="memory of the live tensor has been freed"):
            ck.restore({"model": live})


@pytest.mark.parametrize("gone", ["meta", "freed"])
def test_a_module_whose_load_gives_it_memory_is_restored(gone: str, root: Path) -> None:
    saved, live = Assigns(3, 3), Assigns(3, 3)
    if gone == "meta":
        live.to("meta")
    else:
        live.weight.untyped_storage().resize_(0)
    with Checkpointer(root) as ck:
        ck.save(1, {"model": saved}).committed.result()
        ck.restore({"model": live})
    assert torch.equal(live.weight, saved.weight) and torch.equal(live.bias, saved.bias)


def test_a_lazy_module_on_meta_is_refused(root: Path) -> None:
    with torch.device("meta"):
        live = nn.LazyLinear(3)
    with Checkpointer(root) as ck:
        ck.save(1, {"model": nn.Linear(3, 3)}).committed.result()
        with pytest.raises(StateMismatch, match=GONE):
            ck.restore({"model": live})


def stepped(parameters: Any) -> torch.optim.AdamW:
    made = torch.optim.AdamW(parameters)
    for parameter in made.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    made.step()
    return made


def test_an_optimizer_over_parameters_on_meta_is_refused(root: Path) -> None:
    with torch.device("meta"):
        live = torch.optim.AdamW(nn.Linear(3, 3).parameters())
    with Checkpointer(root) as ck:
        ck.save(1, {"opt": stepped(nn.Linear(3, 3).parameters())}).committed.result()
        with pytest.raises(
            StateMismatch, match=r"opt.state.0.exp_avg: its parameter has no memory"
        ):
            ck.restore({"opt": live})
    assert not live.state


def test_a_freed_tensor_of_an_optimizer_is_made_anew(root: Path) -> None:
    saved, live = (stepped(nn.Linear(3, 3).parameters()) for _ in range(2))
    rows = [next(iter(one.state.values())) for one in (saved, live)]
    with Checkpointer(root) as ck:
        ck.save(1, {"opt": saved}).committed.result()
        rows[1]["exp_avg"].untyped_storage().resize_(0)
        ck.restore({"opt": live})
    rows[1] = next(iter(live.state.values()))
    assert torch.equal(rows[0]["exp_avg"], rows[1]["exp_avg"])


class Wrapper(torch.Tensor):
    """Knows what `state_dict` asks for, and nothing else."""

    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    inner: torch.Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(str(func))


def test_a_live_buffer_that_is_a_wrapper_of_a_tensor_is_refused_with_its_path(root: Path) -> None:
    live: Any = nn.Sequential(nn.BatchNorm1d(2))
    live[0].running_mean = Wrapper(torch.ones(2))
    with Checkpointer(root) as ck:
        ck.save(1, {"model": nn.Sequential(nn.BatchNorm1d(2))}).committed.result()
        with pytest.raises(StateMismatch, match=r"model\.0\.running_mean: "):
            ck.restore({"model": live})


class Unwraps(Wrapper):
    """Does with what is in it whatever is asked of it."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Unwraps, lambda one: one.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


class Grows(nn.Module):
    """A buffer that gets the length of what is loaded, beside another module or tensor."""

    def __init__(self, length: int, beside: nn.Module | torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("seen", torch.full((length,), 7.0))
        if isinstance(beside, nn.Module):
            self.beside = beside
        else:
            self.register_buffer("beside", beside, persistent=False)

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        self.seen = torch.zeros_like(state[prefix + "seen"])
        super()._load_from_state_dict(state, prefix, *more)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["lazy", "nested", "jagged", "wrapped"])
def test_a_module_that_grows_is_restored_beside_what_has_no_memory_of_its_own(
    kind: str, root: Path
) -> None:
    parts = [torch.ones(2), torch.ones(3)]
    beside: dict[str, Callable[[], nn.Module | torch.Tensor]] = {
        "lazy": lambda: nn.LazyLinear(3),
        "nested": lambda: torch.nested.nested_tensor(parts),
        "jagged": lambda: torch.nested.nested_tensor(parts, layout=torch.jagged),
        "wrapped": lambda: Unwraps(torch.ones(3)),
    }
    saved, live = Grows(5, beside[kind]()), Grows(0, beside[kind]())
    if kind == "lazy":
        saved.beside(torch.ones(2, 4))  # type: ignore[operator]
    with Checkpointer(root) as ck:
        ck.save(1, {"model": saved}).committed.result()
        ck.restore({"model": live})
    assert torch.equal(live.seen, torch.full((5,), 7.0))
    assert kind != "lazy" or torch.equal(live.beside.weight, saved.beside.weight)  # type: ignore


@pytest.mark.parametrize("kind", ["vmap", "grad"])
def test_a_live_tensor_that_has_leaked_out_of_a_function_is_refused_with_its_path(
    kind: str, root: Path
) -> None:
    leaked: list[torch.Tensor] = []
    if kind == "vmap":
        torch.vmap(lambda row: (leaked.append(row), row.sum())[1])(torch.ones(3, 2))
    else:
        torch.func.grad(lambda row: (leaked.append(row), row.sum())[1])(torch.ones(2))
    live = torch.zeros(2)
    with Checkpointer(root) as ck:
        ck.save(1, {"a": torch.ones(2), "b": [torch.ones(2)]}).committed.result()
        with pytest.raises(StateMismatch, match=r"b\.0: the live tensor has no bytes here"):
            ck.restore({"a": live, "b": [leaked[0]]})
    assert not live.any()
