"""`bind` fills live states in place and reports every difference before it touches anything."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpt_core.errors import CorruptCheckpoint, RestoreError, StateMismatch, UntrustedData
from ckpt_core.state import RngState, Skeleton, bind, flatten
from tests.state.state_helpers import LIMIT, fill, restore, same, saved


def problems(state: Any, live: Any) -> list[str]:
    skeleton, specs, _ = saved(state)
    with pytest.raises(StateMismatch) as caught:
        bind(skeleton, specs, live, trusted=False)
    assert "nothing was changed" in str(caught.value)
    return sorted(caught.value.problems)


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        opt.zero_grad()
        model(torch.randn(2, 1, 4, 4)).square().sum().backward()
        opt.step()


def same_state(left: Any, right: Any) -> bool:
    return same(plain(left.state_dict()), plain(right.state_dict()))


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


OPTIMIZERS = [
    lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.Adagrad(p),
    lambda p: torch.optim.RMSprop(p, momentum=0.5),
    lambda p: torch.optim.Adafactor(p),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("stepped", [False, True])
def test_training_continues_bit_for_bit(make: Any, stepped: bool) -> None:
    model = net(0)
    opt = make(model.parameters())
    train(model, opt)
    opt.param_groups[0]["lr"] = 0.25
    snapshot = copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict()})
    live = net(1)
    live_opt = make(live.parameters())
    if stepped:
        train(live, live_opt, 3)
    homes = [p.data_ptr() for p in live.parameters()]
    tree = restore({"model": model, "opt": opt}, {"model": live, "opt": live_opt})
    assert [p.data_ptr() for p in live.parameters()] == homes
    assert same_state(model, live) and same_state(opt, live_opt)
    assert same(plain(snapshot), plain(tree))
    tree["opt"]["param_groups"][0]["lr"] = 99
    assert live_opt.param_groups[0]["lr"] == 0.25
    torch.manual_seed(5)
    train(model, opt)
    torch.manual_seed(5)
    train(live, live_opt)
    assert same_state(model, live) and same_state(opt, live_opt)


def test_module_tensors_are_the_destinations() -> None:
    model, live = net(0), net(1)
    skeleton, specs, _ = saved({"m": model})
    binding = bind(skeleton, specs, {"m": live}, trusted=False)
    weight = binding.destinations["m.3.weight"]
    assert weight.data_ptr() == live[3].weight.data_ptr() and not weight.requires_grad


def test_schedulers_scalers_rng_and_custom_objects_load() -> None:
    class Counter:
        def __init__(self) -> None:
            self.seen, self.total = 0, torch.zeros(2)

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen, "total": self.total}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen, self.total = state["seen"], state["total"]

    def build() -> dict[str, Any]:
        opt = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
        return {
            "sched": torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10),
            "scaler": torch.amp.GradScaler("cpu"),
            "counter": Counter(),
            "rng": RngState(),
            "epoch": 0,
        }

    state, live = build(), build()
    state["sched"].optimizer.step()
    state["sched"].step()
    state["counter"].seen, state["counter"].total = 7, torch.ones(2)
    state["epoch"] = 4
    skeleton, specs, data = saved(state)
    expected = (random.random(), float(np.random.rand()), torch.rand(3).tolist())
    binding = bind(skeleton, specs, live, trusted=False)
    for name, target in binding.destinations.items():
        fill(target, data[name])
    tree = binding.finish()
    assert (random.random(), float(np.random.rand()), torch.rand(3).tolist()) == expected
    assert live["sched"].last_epoch == 1 and live["counter"].seen == 7
    assert live["counter"].total.tolist() == [1, 1]
    assert live["epoch"] == 0 and tree["epoch"] == 4


def test_tied_weights_restore_into_tied_and_untied_models() -> None:
    class Tied(nn.Module):
        def __init__(self, tie: bool) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            if tie:
                self.b.weight = self.a.weight

    state = Tied(True)
    for tie in (True, False):
        live = Tied(tie)
        restore(state, live)
        assert same_state(state, live) and (live.a.weight is live.b.weight) == tie
    untied, live = Tied(False), Tied(True)
    before = live.a.weight.clone()
    with pytest.raises(StateMismatch, match=r"a\.weight: shares memory with b\.weight"):
        restore(untied, live)
    assert torch.equal(live.a.weight, before)
    with torch.no_grad():
        untied.b.weight.copy_(untied.a.weight)
    restore(untied, live)
    assert torch.equal(live.a.weight, untied.b.weight)


@dataclasses.dataclass
class Held:
    weight: torch.Tensor
    label: str


def test_tensors_in_containers_and_arrays_are_filled_in_place() -> None:
    def build(value: float) -> Any:
        return {
            "d": Held(torch.full((2,), value), "x"),
            "l": [torch.full((2, 3), value).t(), (torch.full((1,), value),)],
            "n": np.full(3, value),
            "e": torch.full((1, 3), value).expand(2, 3),
            "c": torch.full((2,), value, dtype=torch.complex64).conj(),
            "i": torch.full((2,), int(value), dtype=torch.int64),
            "s": torch.full((2,), value).to_sparse(),
        }

    live = build(1.0)
    tree = restore(build(2.0), live)
    assert live["d"].weight.tolist() == [2, 2] and live["n"].tolist() == [2, 2, 2]
    assert (live["l"][0] == 2).all() and live["l"][1][0].item() == 2 and (live["e"] == 2).all()
    assert (live["c"] == 2).all() and (live["i"] == 2).all() and (live["s"].to_dense() == 2).all()
    assert tree["d"].weight.data_ptr() == live["d"].weight.data_ptr()


def test_overlapping_views_restore_into_overlapping_and_separate_tensors() -> None:
    base = torch.arange(10.0)
    state = {"a": base[:6], "b": base[4:]}
    other = torch.zeros(10)
    for live in (
        {"a": other[:6], "b": other[4:]},
        {"a": torch.zeros(6), "b": torch.zeros(6)},
    ):
        restore(state, live)
        assert same(live["a"], state["a"]) and same(live["b"], state["b"])


def test_a_module_with_hooks_gets_load_state_dict() -> None:
    class Hooked(nn.Linear):
        calls = 0

        def _load_from_state_dict(self, *args: Any) -> None:
            Hooked.calls += 1
            super()._load_from_state_dict(*args)

    state, live = Hooked(2, 2), Hooked(2, 2)
    restore(state, live)
    assert Hooked.calls == 1 and same_state(state, live)


def test_extra_state_is_delivered() -> None:
    class Extra(nn.Linear):
        note = "none"

        def get_extra_state(self) -> Any:
            return {"note": self.note}

        def set_extra_state(self, state: Any) -> None:
            self.note = state["note"]

    state, live = Extra(2, 2), Extra(2, 2)
    state.note = "hello"
    restore({"m": state}, {"m": live})
    assert live.note == "hello"


def test_a_scaler_that_was_off_is_a_difference_to_one_that_is_on() -> None:
    off, on = (torch.amp.GradScaler("cpu", enabled=enabled) for enabled in (False, True))
    (found,) = problems({"scaler": off}, {"scaler": on})
    assert found.startswith("scaler: saved by a scaler that was off, and is on here")
    for saved_one, live in ((off, off), (on, off), (on, on)):
        restore({"scaler": saved_one}, {"scaler": live})


class NamedAsExtra(nn.Module):
    """A parameter and buffers whose names are those of extra state, or end as they do."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.register_buffer("_extra_state", torch.zeros(size))
        self.register_buffer("rnn_extra_state", torch.zeros(size))
        self.p_extra_state = nn.Parameter(torch.zeros(size))


class LoadedAsExtra(NamedAsExtra):
    """Its own load takes them."""

    def __init__(self, size: int = 2) -> None:
        super().__init__(size)
        del self.inner._extra_state  # torch's own load does not know it

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state, False, assign)


@pytest.mark.parametrize("cls", [NamedAsExtra, LoadedAsExtra])
def test_tensors_whose_names_end_as_extra_state_come_back(cls: type[NamedAsExtra]) -> None:
    state, live = cls(), cls()
    for tensor in state.state_dict().values():
        tensor.fill_(5)
    restore({"m": state}, {"m": live})
    assert same_state(state, live)
    found = problems({"m": state}, {"m": cls(3)})
    assert len(found) == len(state.state_dict()) - 2
    assert "m.p_extra_state: shape [2] in the checkpoint, [3] here" in found


def test_a_tensor_that_torch_does_not_fill_is_named() -> None:
    with torch.inference_mode():
        live = {"h": [torch.ones(3).to_sparse()]}
    with pytest.raises(RestoreError, match=r"h\.0: Tensor\.copy_ refused"):
        restore({"h": [torch.ones(3).to_sparse()]}, live)


def test_all_differences_are_listed_at_once() -> None:
    state = {"m": nn.Linear(3, 2), "x": torch.ones(2), "gone": 1, "k": torch.ones(1), "z": [1]}
    live = {
        "m": nn.Linear(4, 2, bias=False),
        "x": torch.ones(2, dtype=torch.int32),
        "new": torch.ones(1),
        "k": {"deeper": torch.ones(1)},
        "z": [1, 2, 3],
    }
    before = live["m"].weight.clone()
    found = problems(state, live)
    assert [line.partition(":")[0] for line in found] == [
        "gone", "k", "m.bias", "m.weight", "new", "x",
    ]  # fmt: skip
    text = "\n".join(found)
    for word in ("unexpected", "missing", "shape [2, 3]", "dtype float32", "int32 here"):
        assert word in text
    assert torch.equal(before, live["m"].weight)


def test_an_optimizer_of_other_parameters_is_a_mismatch() -> None:
    model = nn.Linear(3, 2)
    opt = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    assert problems({"o": opt}, {"o": torch.optim.AdamW([model.weight])})
    other = nn.Linear(4, 2)
    found = problems({"o": opt}, {"o": torch.optim.AdamW(other.parameters())})
    assert found[0].startswith("o.state.0.exp_avg:")


def test_long_lists_of_differences_are_cut_in_the_message_only() -> None:
    skeleton, specs, _ = saved({str(number): torch.ones(1) for number in range(50)})
    with pytest.raises(StateMismatch, match="and 30 more") as caught:
        bind(skeleton, specs, {}, trusted=False)
    assert len(caught.value.problems) == 50


def test_untrusted_values_are_refused_before_anything_is_filled() -> None:
    skeleton, specs, _ = saved({"w": torch.ones(2), "o": print})
    with pytest.raises(UntrustedData, match=r"builtins\.print"):
        bind(skeleton, specs, {"w": torch.zeros(2), "o": None}, trusted=False)


def test_a_leaf_that_is_not_listed_is_corrupt() -> None:
    skeleton, _, _ = saved({"w": torch.ones(2)})
    with pytest.raises(CorruptCheckpoint, match="'w'"):
        bind(skeleton, {}, {"w": torch.ones(2)}, trusted=False)


def test_a_refusing_load_state_dict_is_named() -> None:
    class Picky:
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("nope")

    with pytest.raises(RestoreError, match=r"obj\.picky: Picky\.load_state_dict") as caught:
        restore({"obj": {"picky": Picky()}}, {"obj": {"picky": Picky()}})
    assert isinstance(caught.value.__cause__, KeyError)


def test_flatten_is_fast(capsys: pytest.CaptureFixture[str]) -> None:
    import time

    state = {"model": {f"layer{i}.weight": torch.zeros(4) for i in range(10_000)}}
    best = 1e9
    for _ in range(5):
        start = time.perf_counter()
        flatten(state, eager_leaf_bytes=LIMIT)
        best = min(best, time.perf_counter() - start)
    with capsys.disabled():
        print(f"\nflatten of 10,000 small leaves: {best * 1e3:.1f} ms")
    assert isinstance(flatten(state, eager_leaf_bytes=LIMIT).skeleton, Skeleton)
