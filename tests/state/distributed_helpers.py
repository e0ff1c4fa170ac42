"""What programs of ranks share: a model, and the whole of what ranks hold in parts."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckpt_core.state import Binding, FlatState, Skeleton
from ckpt_core.types import Block, LeafSpec, Placement

LIMIT = 64
WORDS = 11
FSDP2_RUNS_ON_CPU = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 7)


class Net(nn.Module):
    """Sizes that 2 and 4 ranks cannot split evenly; tied, frozen and bf16 parameters; buffers."""

    def __init__(self, seed: int, *, words: int = WORDS, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(words, width)
        self.narrow = nn.Linear(width, 3)  # The last of 4 ranks holds nothing of it.
        self.wide = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.brief = nn.Linear(width, width, bias=False).bfloat16()
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen(self.norm(self.wide(self.narrow(self.embed(tokens)))))
        out: Tensor = self.head(self.brief(x.bfloat16()).float())
        return out


def sharded(seed: int, **options: Any) -> Net:
    net = Net(seed)
    fully_shard([net.narrow, net.wide], **options)
    fully_shard(net.frozen, **options)
    fully_shard(net.brief, **options)
    fully_shard(net, **options)
    return net


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in net.parameters() if p.requires_grad]
    groups = [{"params": trained[:2], "lr": 0.05}, {"params": trained[2:], "weight_decay": 0.3}]
    return torch.optim.AdamW(groups, lr=0.1, amsgrad=True)


def train(net: nn.Module, opt: torch.optim.Optimizer, steps: int, *, seed: int = 7) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        opt.zero_grad()
        backward(net, torch.randint(0, WORDS, (5,)))
        opt.step()


def backward(net: nn.Module, data: Tensor) -> None:
    if FSDP2_RUNS_ON_CPU or not any(isinstance(p, DTensor) for p in net.parameters()):
        net(data).square().mean().backward()
        return
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.grad = parameter.detach() * 0.5 + 0.1


def live_tensors(net: nn.Module, opt: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Every tensor of `{"m": net, "o": opt}` by the name of its place."""
    found = {f"m.{name}": tensor for name, tensor in net.state_dict().items()}
    states = {} if opt is None else opt.state_dict()["state"]
    for key, rows in states.items():
        found |= {f"o.state.{key}.{name}": tensor for name, tensor in rows.items()}
    return found


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def box(block: Block) -> tuple[slice, ...]:
    return tuple(
        slice(begin, begin + size) for begin, size in zip(block.offsets, block.sizes, strict=True)
    )


def everywhere(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def assemble(flat: FlatState) -> dict[str, Tensor]:
    """The whole leaves of all ranks' local parts; each replica covers each element exactly once."""
    mine = {leaf.spec.name: leaf.tensor.cpu() for leaf in flat.leaves}
    ranks = everywhere({name: (p, mine[name]) for name, p in flat.placements.items()})
    assert all(rank.keys() == ranks[0].keys() for rank in ranks)
    made = {name: tensor.clone() for name, tensor in mine.items() if name not in flat.placements}
    for name, (first, tensor) in ranks[0].items():
        parts: list[tuple[Placement, Tensor]] = [rank[name] for rank in ranks]
        assert {(p.shape, p.replicas, p.kind) for p, _ in parts} == {
            (first.shape, first.replicas, first.kind)
        }
        made[name] = torch.zeros(first.shape, dtype=tensor.dtype)
        for replica in range(first.replicas):
            count = torch.zeros(first.shape)
            for placement, local in parts:
                if placement.replica == replica:
                    assert tuple(local.shape) == placement.block.sizes
                    made[name][box(placement.block)] = local
                    count[box(placement.block)] += 1
            assert bool((count == 1).all()), (name, replica)
    return made


def through_json(flat: FlatState) -> tuple[Skeleton, dict[str, LeafSpec]]:
    skeleton = Skeleton.from_json(json.loads(json.dumps(flat.skeleton.to_json())), path="here")
    specs = {}
    for leaf in flat.leaves:
        place = flat.placements.get(leaf.spec.name)
        shape = leaf.spec.shape if place is None else place.shape
        specs[leaf.spec.name] = LeafSpec(leaf.spec.name, leaf.spec.dtype, shape)
    return skeleton, specs


def fill(binding: Binding, data: dict[str, Tensor]) -> Any:
    assert binding.destinations.keys() == data.keys()
    for name, target in binding.destinations.items():
        block = binding.blocks.get(name)
        assert type(target) is Tensor
        target.copy_(data[name] if block is None else data[name][box(block)])
    return binding.finish()


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        a, b = whole(tensor), whole(right[name])
        assert a.dtype is b.dtype and torch.equal(a, b), name


def pointers(tensors: dict[str, Tensor]) -> dict[str, int]:
    locals_of = {k: t._local_tensor if isinstance(t, DTensor) else t for k, t in tensors.items()}
    return {name: tensor.data_ptr() for name, tensor in locals_of.items()}


def check_leaves(flat: FlatState, live: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each leaf is the live local memory, and all ranks' parts are what full_tensor() gives."""
    data = assemble(flat)
    distributed = {name for name, tensor in live.items() if isinstance(tensor, DTensor)}
    assert set(flat.placements) == distributed & set(data)
    where = pointers(live)
    for leaf in flat.leaves:
        name = leaf.spec.name
        assert type(leaf.tensor) is Tensor and not leaf.tensor.requires_grad
        assert leaf.tensor.data_ptr() == where[name]
        assert tuple(leaf.tensor.shape) == leaf.spec.shape
        assert torch.equal(data[name], whole(live[name])), name
    table = flat.skeleton.leaves
    assert not table.strides and not table.shifts and not table.pools
    return data
