"""Every module and optimizer of torch that can be made: saved, and restored into a fresh one."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from tests.state.state_helpers import restore, same

Make = Callable[[], Any]

_ARGUMENTS = {
    "AdaptiveLogSoftmaxWithLoss": lambda cls: cls(8, 20, [5, 10], div_value=2.0),
    "Bilinear": lambda cls: cls(2, 3, 4),
    "ChannelShuffle": lambda cls: cls(2),
    "FractionalMaxPool2d": lambda cls: cls(2, output_ratio=0.5),
    "FractionalMaxPool3d": lambda cls: cls(2, output_ratio=0.5),
    "GRU": lambda cls: cls(2, 3, 2, bidirectional=True),
    "GroupNorm": lambda cls: cls(2, 4),
    "LSTM": lambda cls: cls(2, 4, proj_size=3),
    "Module": None,
    "ModuleDict": lambda cls: cls({"a": nn.Linear(2, 2)}),
    "ModuleList": lambda cls: cls([nn.Linear(2, 2)]),
    "MultiheadAttention": lambda cls: cls(4, 2),
    "NLLLoss2d": None,
    "ParameterDict": lambda cls: cls({"a": torch.zeros(2)}),
    "ParameterList": lambda cls: cls([torch.zeros(2)]),
    "RNN": lambda cls: cls(2, 3),
    "RNNBase": lambda cls: cls("GRU", 2, 3),
    "Sequential": lambda cls: cls(nn.Linear(2, 2), nn.BatchNorm1d(2)),
    "Transformer": lambda cls: cls(4, 2, 1, 1, 8),
    "TransformerDecoder": lambda cls: cls(nn.TransformerDecoderLayer(4, 2, 8), 2),
    "TransformerDecoderLayer": lambda cls: cls(4, 2, 8),
    "TransformerEncoder": lambda cls: cls(nn.TransformerEncoderLayer(4, 2, 8), 2),
    "TransformerEncoderLayer": lambda cls: cls(4, 2, 8),
    "Unflatten": lambda cls: cls(1, (2, 2)),
}
_VALUES: dict[str, Any] = {"normalized_shape": 4, "lambd": 0.5, "kernel_size": 1, "size": 2}


def _make(cls: type[nn.Module]) -> nn.Module:
    if cls.__name__ in _ARGUMENTS:
        return _ARGUMENTS[cls.__name__](cls)
    needed = [
        _VALUES.get(name, 3)
        for name, value in inspect.signature(cls).parameters.items()
        if value.default is value.empty and value.kind is value.POSITIONAL_OR_KEYWORD
    ]
    return cls(*needed)


def _classes() -> list[type[nn.Module]]:
    found = [value for value in vars(nn).values() if inspect.isclass(value)]
    return [
        cls
        for cls in found
        if issubclass(cls, nn.Module)
        and not cls.__name__.startswith("Lazy")
        and _ARGUMENTS.get(cls.__name__, True) is not None
        and cls not in (nn.DataParallel, nn.Container)
    ]


def scramble(module: nn.Module, seed: int) -> None:
    """Other values in all memory of a module."""
    torch.manual_seed(seed)
    for tensor in [*module.parameters(), *module.buffers()]:
        with torch.no_grad():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5)
            else:
                tensor.copy_(torch.randint(0, 2, tensor.shape))


def values(item: Any) -> Any:
    """`state_dict()` as plain values that can be compared to the bit."""
    if isinstance(item, torch.Tensor) and item.is_quantized:
        scale = item.q_per_channel_scales() if "channel" in str(item.qscheme()) else item.q_scale()
        return [item.int_repr(), scale]
    if isinstance(item, torch.Tensor):
        return item.detach().clone()
    if isinstance(item, torch.ScriptObject):
        return values(item.__getstate__())
    if isinstance(item, dict):
        return {key: values(value) for key, value in item.items()}
    return [values(value) for value in item] if isinstance(item, list | tuple) else item


def check(made: Any, live: Any, *, trusted: bool = False) -> None:
    wanted = values(made.state_dict())
    restore({"it": made}, {"it": live}, trusted=trusted)
    assert same(wanted, values(made.state_dict())), "the saved object was changed"
    assert same(wanted, values(live.state_dict()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cls", _classes(), ids=lambda cls: cls.__name__)
def test_a_module_of_torch_comes_back(cls: type[nn.Module]) -> None:
    made, live = _make(cls), _make(cls)
    scramble(made, 1)
    scramble(live, 2)
    check(made, live)


def _quantized(seed: int, how: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(seed)
    inputs = torch.randn(5, 4)
    if how == "dynamic":
        net: nn.Module = nn.Sequential(nn.Linear(4, 3), nn.LSTM(3, 3), nn.Identity())
        return torch.ao.quantization.quantize_dynamic(net, {nn.Linear, nn.LSTM}), inputs
    if how == "embedding":
        from torch.ao.nn.quantized import Embedding, EmbeddingBag

        made = nn.ModuleList([EmbeddingBag(10, 4), Embedding(10, 4)])
        for layer in made:
            weight = torch.quantize_per_channel(
                torch.randn(10, 4),
                torch.rand(10) + 0.1,
                torch.zeros(10),
                0,
                torch.quint8,
            )
            layer.set_weight(weight)
        return made, inputs
    net = nn.Sequential(
        torch.ao.quantization.QuantStub(),
        nn.Linear(4, 3),
        nn.ReLU(),
        torch.ao.quantization.DeQuantStub(),
    )
    if how == "qat":
        net.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
        torch.ao.quantization.prepare_qat(net, inplace=True)
        return net, inputs
    net.eval()
    net.qconfig = torch.ao.quantization.get_default_qconfig("fbgemm")
    torch.ao.quantization.prepare(net, inplace=True)
    if how == "observed":
        return net, inputs
    net(inputs)
    torch.ao.quantization.convert(net, inplace=True)
    return net, inputs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["dynamic", "embedding", "static", "qat", "observed"])
def test_a_quantized_module_comes_back(how: str) -> None:
    (made, inputs), (live, _) = _quantized(1, how), _quantized(2, how)
    if how in ("qat", "observed"):
        made(inputs)
    check(made, live, trusted=how == "dynamic")  # An LSTM's weights are script objects.
    if how == "static":
        assert same(made(inputs).tolist(), live(inputs).tolist())
    if how == "dynamic":
        assert torch.equal(made[0](inputs), live[0](inputs))


def _pruned() -> nn.Module:
    made = nn.Linear(3, 3)
    prune.random_unstructured(made, "weight", 0.5)
    return made


def _averaged() -> nn.Module:
    net = nn.Linear(3, 3)
    made = torch.optim.swa_utils.AveragedModel(net)
    made.update_parameters(net)
    return made


def _tied() -> nn.Module:
    made = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    made[1].weight = made[0].weight
    return made


class _Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def _lazy() -> nn.Module:
    made = nn.LazyLinear(3)
    made(torch.randn(2, 3))
    return made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: nn.utils.weight_norm(nn.Linear(3, 3)), id="weight_norm"),
        pytest.param(
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), id="parametrized"
        ),
        pytest.param(
            lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)), id="orthogonal"
        ),
        pytest.param(
            lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), id="parametrized norm"
        ),
        pytest.param(lambda: nn.utils.spectral_norm(nn.Linear(3, 3)), id="spectral_norm"),
        pytest.param(_pruned, id="pruned"),
        pytest.param(_averaged, id="averaged"),
        pytest.param(_tied, id="tied"),
        pytest.param(_lazy, id="lazy"),
        pytest.param(lambda: torch.compile(nn.Linear(3, 3)), id="compiled"),
        pytest.param(lambda: torch.jit.script(_Scripted()), id="scripted"),
    ],
)
def test_a_wrapped_module_comes_back(make: Make) -> None:
    made, live = make(), make()
    scramble(made, 1)
    scramble(live, 2)
    check(made, live)


@pytest.mark.filterwarnings("ignore")
def test_a_lazy_module_gets_its_shape() -> None:
    made, live = _lazy(), nn.LazyLinear(3)
    restore({"it": made}, {"it": live})
    assert torch.equal(made.weight, live.weight)


class Moments(NamedTuple):
    mean: torch.Tensor
    count: int


# -- optimizers ------------------------------------------------------------------------------------


def _optimizers() -> list[type[torch.optim.Optimizer]]:
    found = [value for value in vars(torch.optim).values() if inspect.isclass(value)]
    kind = torch.optim.Optimizer
    return [cls for cls in found if issubclass(cls, kind) and cls is not kind]


def _stepped(
    cls: type[torch.optim.Optimizer], seed: int, steps: int, dtype: torch.dtype
) -> torch.optim.Optimizer:
    torch.manual_seed(seed)
    params = [nn.Parameter(torch.randn(6, 4, dtype=dtype)) for _ in range(2)]
    options = {"momentum": 0.9} if cls is torch.optim.SGD else {}
    made = cls(params, **options)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn_like(p)
            p.grad = p.grad.to_sparse() if cls is torch.optim.SparseAdam else p.grad
        made.step(*[lambda: torch.randn(())] * (cls is torch.optim.LBFGS))
    return made


@pytest.mark.parametrize("steps", [0, 3], ids=["fresh", "stepped"])
@pytest.mark.parametrize("moments", [None, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cls", _optimizers(), ids=lambda cls: cls.__name__)
def test_an_optimizer_of_torch_comes_back(
    cls: type[torch.optim.Optimizer], moments: torch.dtype | None, steps: int
) -> None:
    dtype = torch.float32 if moments is None else torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = _stepped(cls, 1, 3, dtype)
        except RuntimeError:
            pytest.skip("it does not know this dtype")
        live = _stepped(cls, 2, steps, dtype)
    for rows in made.state.values() if moments is not None else ():
        for name, value in rows.items():
            if isinstance(value, torch.Tensor) and value.dtype is dtype:
                rows[name] = torch.randn(value.shape, dtype=moments)
    check(made, live)


class Wrapper:
    """An object that wraps an optimizer, as many trainers have one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return {"scale": 2.0, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])


def test_a_wrapped_optimizer_keeps_the_dtype_of_its_moments() -> None:
    made, live = (_stepped(torch.optim.AdamW, seed, 3, torch.bfloat16) for seed in (1, 2))
    for rows in made.state.values():
        rows["exp_avg"] = torch.randn(6, 4)
    check(Wrapper(made), Wrapper(live))


def test_what_torch_would_cast_or_break_in_a_state_comes_back() -> None:
    made, live = (_stepped(torch.optim.AdamW, seed, 1, torch.bfloat16) for seed in (1, 2))
    rows = next(iter(made.state.values()))
    rows["seen"] = torch.tensor([2**40 + 1])
    rows["mask"] = torch.tensor([True, False])
    rows["phase"] = torch.randn(3, dtype=torch.complex64)
    rows["mode"] = "warm"
    rows["nested"] = {"a": [torch.randn(2, dtype=torch.float64)]}
    check(made, live)


class OneRow(torch.optim.Optimizer):
    """Keeps of each parameter whatever it is given."""

    def __init__(self, *rows: Any) -> None:
        super().__init__([nn.Parameter(torch.ones(2, dtype=torch.bfloat16))], {})
        for row in rows:
            self.state[self.param_groups[0]["params"][0]] = row


_ROWS = {
    "tensor": torch.tensor([0.1, 0.2]),
    "list": [torch.tensor([0.1, 0.2]), "warm", np.ones(2)],
    "tuple": (torch.tensor([0.1, 0.2]), (np.ones(2),)),
    "named tuple": Moments(torch.tensor([0.1, 0.2]), 3),
    "array": np.ones(2),
    "text": "warm",
    "bytes": b"warm",
    "number": 3,
    "dict": {"mean": torch.tensor([0.1, 0.2]), "count": 3},
}


@pytest.mark.parametrize("row", _ROWS.values(), ids=_ROWS)
def test_a_state_of_a_parameter_of_any_kind_comes_back_over_any_other(row: Any) -> None:
    for before in ((), *((other,) for other in _ROWS.values())):
        live = copy.deepcopy(OneRow(*before))
        restore({"it": OneRow(row)}, {"it": live})
        assert same(list(live.state.values()), [row])


def test_a_learning_rate_that_is_a_tensor_is_filled_in_place() -> None:
    made = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=torch.tensor(0.5))
    live = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=torch.tensor(0.1))
    rate = live.param_groups[0]["lr"]
    restore({"it": made}, {"it": live})
    assert live.param_groups[0]["lr"] is rate and rate == 0.5


def test_a_step_of_restored_moments_is_that_of_the_saved_ones() -> None:
    made, live = (_stepped(torch.optim.AdamW, seed, 2, torch.bfloat16) for seed in (1, 2))
    for rows in made.state.values():
        rows["exp_avg"] = torch.randn(6, 4)
        rows["exp_avg_sq"] = torch.rand(6, 4)
    parameters = [group["params"] for group in (made.param_groups[0], live.param_groups[0])]
    restore({"p": parameters[0], "o": made}, {"p": parameters[1], "o": live})
    for left, right in zip(*parameters, strict=True):
        assert torch.equal(left, right)
        left.grad = right.grad = torch.ones_like(left)
    saved = copy.deepcopy([rows["exp_avg"] for rows in made.state.values()])
    assert all(x.dtype is torch.float32 for x in saved)
    assert all(same(a, rows["exp_avg"]) for a, rows in zip(saved, live.state.values(), strict=True))


# -- schedulers ------------------------------------------------------------------------------------


def _schedulers() -> dict[str, Callable[[Any], Any]]:
    from torch.optim import lr_scheduler as lr

    return {
        "LambdaLR": lambda o: lr.LambdaLR(o, lambda epoch: 0.9**epoch),
        "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda epoch: 0.9),
        "StepLR": lambda o: lr.StepLR(o, 2),
        "MultiStepLR": lambda o: lr.MultiStepLR(o, [2, 4]),
        "ConstantLR": lr.ConstantLR,
        "LinearLR": lr.LinearLR,
        "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.9),
        "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 5),
        "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 5),
        "CyclicLR": lambda o: lr.CyclicLR(o, 0.1, 0.2),
        "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.1, 10),
        "PolynomialLR": lr.PolynomialLR,
        "SequentialLR": lambda o: lr.SequentialLR(
            o, [lr.ConstantLR(o), lr.ExponentialLR(o, 0.9)], [2]
        ),
        "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.ConstantLR(o), lr.StepLR(o, 2)]),
        "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", _schedulers())
def test_a_scheduler_comes_back(name: str) -> None:
    def build(steps: int) -> Any:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
        made = _schedulers()[name](optimizer)
        for _ in range(steps):
            optimizer.step()
            made.step()
        return {"optimizer": optimizer, "scheduler": made}

    made, live = build(3), build(0)
    # An older torch keeps a function in the state of SWALR.
    restore(made, live, trusted="anneal_func" in made["scheduler"].state_dict())
    for part in made:
        assert repr(made[part].state_dict()) == repr(live[part].state_dict())
    for state in (made, live):
        state["optimizer"].step()
        state["scheduler"].step()
    assert repr(made["optimizer"].param_groups[0]["lr"]) == repr(
        live["optimizer"].param_groups[0]["lr"]
    )
