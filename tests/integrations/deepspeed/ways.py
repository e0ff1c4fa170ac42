"""Ways to train: models, engines and steps for them. Nothing here imports ckpt_deepspeed."""

from __future__ import annotations

import functools
import gc
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import cpuinfo
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import groups
from torch import Tensor, nn

WIDTH, BATCH, WORDS = 96, 4, 100
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Way:
    """One of them; JSON holds it.

    Attributes:
        zero: stage.
        dtype: of the parameters.
        model: a key of `MODELS`, or "pipe".
        optimizer: a class of torch.optim, or "config": that of `settings`.
        accumulate: micro-batches of a step.
        settings: merged into the configuration.
        model_settings: arguments of the model.
        init: make the model inside `deepspeed.zero.Init`.
    """

    zero: int = 0
    dtype: str = "fp32"
    model: str = "stack"
    optimizer: str = "AdamW"
    accumulate: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    model_settings: dict[str, Any] = field(default_factory=dict)
    init: bool = False

    def configuration(self, section: dict[str, Any] | None) -> dict[str, Any]:
        """DeepSpeed's; `section` is that of the checkpoint engine, None for DeepSpeed's own."""
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": self.accumulate,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        if self.dtype != "fp32":
            found[self.dtype] = {"enabled": True}
        found |= {key: value for key, value in self.settings.items() if key != "zero_optimization"}
        found["zero_optimization"] = {
            "stage": self.zero,
            "stage3_gather_16bit_weights_on_model_save": True,
            **self.settings.get("zero_optimization", {}),
        }
        if section is not None:
            found["checkpoint_engine"] = {"type": "ckpt_core", **section}
        return found


class Counting(nn.Module):
    """A buffer that every forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6000))

    def forward(self, data: Tensor) -> Tensor:
        self.seen += 1
        return data


class Stack(nn.Module):
    """A frozen layer, shared weights, a buffer, and a layer that few ways of loading know by name."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.first.weight
        self.counting = Counting()
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, data: Tensor) -> Tensor:
        hidden = self.tied(torch.relu(self.first(self.frozen(data))))
        return self.last(self.counting(hidden))


class Experts(nn.Module):
    """A layer of experts between two that all ranks share."""

    def __init__(self, experts: int, ep_size: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        # Token selection at random would make no two runs the same.
        self.moe = MoE(
            WIDTH, nn.Linear(WIDTH, WIDTH), num_experts=experts, ep_size=ep_size, use_rts=False
        )
        self.counting = Counting()
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, data: Tensor) -> Tensor:
        hidden, _, _ = self.moe(torch.relu(self.first(data)))
        return self.last(self.counting(hidden))


class Words(nn.Module):
    """An embedding with a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.counting = Counting()
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, data: Tensor) -> Tensor:
        return self.last(self.counting(self.table(data).mean(dim=1)))


MODELS = {"stack": Stack, "experts": Experts, "words": Words}


def _pipe(stages: int, *, tied: bool = False, frozen: bool = False) -> PipelineModule:
    ends: list[Any] = [nn.Linear, WIDTH, WIDTH]
    first, last = (
        (TiedLayerSpec("ends", *ends), TiedLayerSpec("ends", *ends))
        if tied
        else (LayerSpec(*ends), LayerSpec(*ends))
    )
    middle = [LayerSpec(*ends), nn.Tanh(), LayerSpec(Counting)]
    model = PipelineModule(
        [first, nn.Tanh(), LayerSpec(Counting), *middle, last],
        num_stages=stages,
        loss_fn=lambda found, wanted: nn.functional.mse_loss(found.float(), wanted.float()),
        partition_method="uniform",
    )
    if frozen and model.stage_id == 0:
        model.forward_funcs[0].requires_grad_(False)
    return model


def start(way: Way, section: dict[str, Any] | None = None, *, seed: int = 0) -> Any:
    """A fresh engine with optimizer and scheduler; `section` as in `Way.configuration`."""
    _prepare()
    groups.mpu = None  # a pipeline before this one has left its own
    torch.manual_seed(seed)
    configuration = way.configuration(section)
    with deepspeed.zero.Init(enabled=way.init, config_dict_or_path=configuration):
        make = _pipe if way.model == "pipe" else MODELS[way.model]
        model = make(**way.model_settings)
    chosen: dict[str, Any] = {"lr_scheduler": lambda made: torch.optim.lr_scheduler.StepLR(made, 2)}
    if way.optimizer != "config":
        kind = getattr(torch.optim, way.optimizer)
        chosen["optimizer"] = lambda params: kind(params, lr=1e-2)
    if "scheduler" in way.settings:
        del chosen["lr_scheduler"]
    made, *_ = deepspeed.initialize(
        model=model, model_parameters=_parameters(model), config=configuration, **chosen
    )
    return made


@functools.cache
def _prepare() -> None:
    # DeepSpeed refuses float16 where the processor has no instructions for it; torch computes it all the
    # same.
    get_accelerator().is_fp16_supported = lambda: True
    # Two things that take a second for each engine: its Adam asks for the name of the processor, and ZeRO-3
    # collects garbage.
    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    gc.collect()
    gc.freeze()


def _parameters(model: nn.Module) -> list[Any]:
    params = [param for param in model.parameters() if param.requires_grad]
    if not isinstance(model, Experts):
        return params
    found = split_params_into_different_moe_groups_for_optimizer({"params": params, "name": "all"})
    return list(found)


def advance(made: Any, way: Way, begin: int, end: int) -> None:
    """Steps `begin` to `end`, each with its own data on each data-parallel rank."""
    for step in range(begin, end):
        batches = _batches(made, way, step)
        if way.model == "pipe":
            made.train_batch(batches)
            continue
        for data, _ in batches:
            micro(made, data)


def micro(made: Any, data: Tensor) -> None:
    """One micro-batch."""
    made.backward(made(data).float().square().mean())
    made.step()


def micro_batch(made: Any, way: Way, step: int, number: int) -> Tensor:
    """Number `number` of a step."""
    return list(_batches(made, way, step))[number][0]


def _batches(made: Any, way: Way, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    rank = made.grid.get_data_parallel_rank() if way.model == "pipe" else dist.get_rank()
    generator = torch.Generator().manual_seed(1000 * step + rank)
    for _ in range(way.accumulate):
        if way.model == "words":
            words = torch.randint(0, WORDS, (BATCH, 5), generator=generator)
            yield words, words
            continue
        data = torch.randn(BATCH, WIDTH, generator=generator).to(_DTYPES[way.dtype])
        yield data, data


def digest(made: Any) -> str:
    """SHA-256 of what this rank holds: parameters, buffers, optimizer, scheduler, loss scale, counters."""
    found = hashlib.sha256()
    for part in parts(made).values():
        found.update(part.encode())
    return found.hexdigest()


def parts(made: Any) -> dict[str, str]:
    """SHA-256 of each of them."""
    params = list(made.module.parameters())
    if made.zero_optimization_stage() == 3:
        params = [param.ds_tensor for param in params]
    scale = getattr(made.optimizer, "cur_scale", None)
    scaler = getattr(made.optimizer, "loss_scaler", None)
    counters = [made.global_steps, made.skipped_steps, made.global_samples]
    held = {
        "parameters": params,
        "buffers": list(made.module.buffers()),
        "optimizer": made.optimizer.state_dict(),
        "scheduler": made.lr_scheduler.state_dict(),
        "scale": [scale, getattr(scaler, "cur_scale", None)],
        "counters": counters,
    }
    return {name: _hashed(tree) for name, tree in held.items()}


def _hashed(tree: Any) -> str:
    found = hashlib.sha256()
    for leaf in _leaves(tree):
        found.update(leaf)
    return found.hexdigest()


def _leaves(tree: Any) -> Iterator[bytes]:
    if isinstance(tree, Tensor):
        yield tree.detach().float().contiguous().numpy().tobytes()
    elif isinstance(tree, dict):
        for key in sorted(tree, key=str):
            yield from _leaves(tree[key])
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _leaves(item)
    elif isinstance(tree, int | float | str):
        yield repr(tree).encode()
