"""What each rank does in test_distributed.py. Every function runs on all ranks and asserts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from ckpt_core.errors import ConfigError, StateMismatch
from ckpt_core.state import FlatState, SpecMemo, bind, flatten
from ckpt_core.types import Block
from tests.state.distributed_helpers import (
    LIMIT,
    Net,
    assemble,
    backward,
    check_leaves,
    fill,
    live_tensors,
    optimizer_of,
    pointers,
    same,
    sharded,
    through_json,
    train,
    whole,
)

# -- FSDP2 ---------------------------------------------------------------------------------------


def fsdp2_leaves_tile_the_whole(rank: int, world: int) -> None:
    net = sharded(0)
    opt = optimizer_of(net)
    train(net, opt, 3)
    flat = flatten({"m": net, "o": opt}, eager_leaf_bytes=LIMIT)
    data = check_leaves(flat, live_tensors(net, opt))
    assert "m.embed.weight" in data and "m.head.weight" not in data
    assert data["m.brief.weight"].dtype is torch.bfloat16
    assert {p.replicas for p in flat.placements.values()} == {1}
    assert flat.placements["m.narrow.weight"].block.sizes == (
        (len(range(3)[rank : rank + 1]), 6) if world == 4 else ((2, 1)[rank], 6)
    )
    buffers = {f"m.norm.{name}" for name, _ in net.norm.named_buffers()}
    assert flat.names_of_buffers() == buffers and not flat.names_of_rng()
    # Parameters of a module change in the optimizer's step alone, even in its local parts.
    assert not any(leaf.eager for leaf in flat.leaves if leaf.nbytes > LIMIT)
    every = flatten(list(net.parameters()), eager_leaf_bytes=0).skeleton
    flags = [every.refs.flags[number] for number in range(len(every.refs.leaf))]
    assert flags == ["pg" if p.requires_grad else "p" for p in net.parameters()]
    memo = SpecMemo()
    first, again = (flatten({"m": net}, eager_leaf_bytes=0, memo=memo) for _ in range(2))
    assert first.specs is again.specs


def fsdp2_state_restores_in_place(rank: int, world: int) -> None:
    net = sharded(0)
    opt = optimizer_of(net)
    train(net, opt, 2)
    flat = flatten({"m": net, "o": opt}, eager_leaf_bytes=LIMIT)
    skeleton, specs = through_json(flat)
    data = assemble(flat)
    expected = {name: whole(tensor) for name, tensor in live_tensors(net, opt).items()}
    train(net, opt, 2, seed=9)
    goal = live_tensors(net, opt)
    for steps in (0, 1):  # An optimizer without state yet, and one that has some.
        live = sharded(1)
        live_opt = optimizer_of(live)
        train(live, live_opt, steps)
        before = pointers(live_tensors(live, live_opt))
        binding = bind(skeleton, specs, {"m": live, "o": live_opt}, trusted=False)
        assert all(b.sizes != specs[name].shape for name, b in binding.blocks.items())
        targets = pointers(binding.destinations)
        assert all(targets[name] == where for name, where in before.items() if name in targets)
        tree = fill(binding, data)
        after = live_tensors(live, live_opt)
        same(after, expected)
        assert {name: pointers(after)[name] for name in before} == before
        assert isinstance(tree["m"]["narrow.weight"], DTensor)
        assert live.head.weight is live.embed.weight
        train(live, live_opt, 2, seed=9)
        same(live_tensors(live, live_opt), goal)


def fsdp2_and_plain_states_exchange(rank: int, world: int) -> None:
    net = sharded(0)
    opt = optimizer_of(net)
    train(net, opt, 2)
    flat = flatten({"m": net, "o": opt}, eager_leaf_bytes=LIMIT)
    skeleton, specs = through_json(flat)
    data = assemble(flat)
    plain = Net(1)
    plain_opt = optimizer_of(plain)
    binding = bind(skeleton, specs, {"m": plain, "o": plain_opt}, trusted=False)
    assert not binding.blocks
    fill(binding, data)
    same(live_tensors(plain, plain_opt), live_tensors(net, opt))
    loaded = skeleton.allocate(specs)
    assert {name: tuple(t.shape) for name, t in loaded.items()} == {
        name: spec.shape for name, spec in specs.items()
    }
    alone = flatten({"m": plain, "o": plain_opt}, eager_leaf_bytes=LIMIT)
    live = sharded(2)
    live_opt = optimizer_of(live)
    skeleton, specs = through_json(alone)
    binding = bind(skeleton, specs, {"m": live, "o": live_opt}, trusted=False)
    assert binding.blocks
    fill(binding, {leaf.spec.name: leaf.tensor for leaf in alone.leaves})
    same(live_tensors(live, live_opt), live_tensors(plain, plain_opt))


class Hooked(nn.Module):
    """Its own load_state_dict must be called, as for any module that overrides it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(5, 7)
        self.loaded = 0

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        self.loaded += 1
        return super().load_state_dict(state, *args, **kwargs)


def custom_modules_load_dtensors(rank: int, world: int) -> None:
    model, live = Hooked(0), Hooked(1)
    fully_shard(model)
    fully_shard(live)
    flat = flatten(model, eager_leaf_bytes=LIMIT)
    skeleton, specs = through_json(flat)
    fill(bind(skeleton, specs, live, trusted=False), assemble(flat))
    assert live.loaded == 1
    same(live_tensors(live), live_tensors(model))


# -- meshes of two dimensions --------------------------------------------------------------------


def hybrid_sharding_counts_replicas(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    net = sharded(0, mesh=mesh)
    opt = optimizer_of(net)
    train(net, opt, 2)
    flat = flatten({"m": net, "o": opt}, eager_leaf_bytes=LIMIT)
    check_leaves(flat, live_tensors(net, opt))
    assert {(p.replica, p.replicas) for p in flat.placements.values()} == {(rank // 2, 2)}
    part = distribute_tensor(torch.arange(15.0), mesh["shard"], [Shard(0)])
    both = distribute_tensor(torch.arange(15.0), mesh, [Replicate(), Replicate()])
    data = {"part": part, "both": both}
    flat = flatten(data, eager_leaf_bytes=LIMIT)
    check_leaves(flat, data)
    # Ranks outside a part of a mesh hold copies of what it holds.
    assert (flat.placements["part"].replica, flat.placements["part"].replicas) == (rank // 2, 2)
    assert (flat.placements["both"].replica, flat.placements["both"].replicas) == (rank, world)


class Pair(nn.Module):
    def __init__(self, seed: int, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(4, hidden)
        self.down = nn.Linear(hidden, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x))
        return out


def pair(seed: int, hidden: int, mesh: Any) -> Pair:
    made = Pair(seed, hidden)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(made, mesh["tp"], plan)  # type: ignore[arg-type]
    fully_shard(made, mesh=mesh["dp"])
    return made


def tensor_parallel_boxes_are_where_the_data_is(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for hidden in (8, 9, 5, 3, 1):  # With 9 and less, the parts of the parts are uneven.
        reference = Pair(0, hidden).state_dict()
        try:
            model = pair(0, hidden, mesh)
        except (NotImplementedError, AssertionError, RuntimeError):
            assert hidden % 4  # Not every torch splits what is uneven in two dimensions.
            continue
        flat = flatten(model, eager_leaf_bytes=LIMIT)
        for name, found in assemble(flat).items():
            assert torch.equal(found, reference[name]), (hidden, name)
        if hidden == 8:
            check_torch_agrees(flat, model)


def check_torch_agrees(flat: FlatState, model: nn.Module) -> None:
    for name, tensor in model.state_dict().items():
        sizes, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        assert flat.placements[name].block == Block(tuple(offsets), tuple(sizes))


def tensor_parallel_state_restores(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def build(seed: int) -> tuple[Pair, torch.optim.Optimizer]:
        model = pair(seed, 8, mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: Pair, opt: torch.optim.Optimizer) -> None:
        torch.manual_seed(3)
        backward(model, torch.randn(3, 4))
        opt.step()
        opt.zero_grad()

    model, opt = build(0)
    step(model, opt)
    flat = flatten({"m": model, "o": opt}, eager_leaf_bytes=LIMIT)
    data = check_leaves(flat, live_tensors(model, opt))
    skeleton, specs = through_json(flat)
    live, live_opt = build(1)
    fill(bind(skeleton, specs, {"m": live, "o": live_opt}, trusted=False), data)
    same(live_tensors(live, live_opt), live_tensors(model, opt))
    step(model, opt)
    step(live, live_opt)
    same(live_tensors(live, live_opt), live_tensors(model, opt))


# -- plain trees of DTensors ---------------------------------------------------------------------


def trees_of_dtensors(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    rows = distribute_tensor(torch.arange(30.0).view(10, 3), mesh, [Shard(0)])
    columns = distribute_tensor(torch.arange(42.0).view(6, 7), mesh, [Shard(1)])
    turned = distribute_tensor(torch.arange(12.0).view(3, 4), mesh, [Replicate()]).t()
    spread = distribute_tensor(torch.arange(4.0), mesh, [Replicate()]).expand(3, 4)
    nothing = distribute_tensor(torch.empty(0, 3), mesh, [Shard(0)])
    state = {"rows": rows, "again": rows, "columns": columns, "turned": turned}
    state |= {"spread": spread, "none": nothing}
    flat = flatten(state, eager_leaf_bytes=LIMIT)
    assert list(flat.placements) == ["rows", "columns", "turned", "spread", "none"]
    data = check_leaves(flat, state)
    skeleton, specs = through_json(flat)
    live: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    live["again"] = torch.zeros(10, 3)  # One leaf goes to a DTensor and to a plain tensor.
    tree = fill(bind(skeleton, specs, live, trusted=False), data)
    same(live, state)
    assert isinstance(tree["columns"], DTensor)
    other = distribute_tensor(torch.zeros(6, 7), mesh, [Shard(0)])  # Distributed another way.
    fill(bind(skeleton, specs, live | {"columns": other}, trusted=False), data)
    assert torch.equal(other.full_tensor(), data["columns"])
    check_views(mesh)
    check_memo(mesh)


def check_views(mesh: Any) -> None:
    """A leaf that is seen through views restores into DTensors by way of the whole."""
    base = torch.arange(20.0)
    flat = flatten({"all": base, "some": base[5:15]}, eager_leaf_bytes=LIMIT)
    skeleton, specs = through_json(flat)
    live = {
        "all": distribute_tensor(torch.zeros(20), mesh, [Shard(0)]),
        "some": distribute_tensor(torch.zeros(10), mesh, [Shard(0)]),
    }
    fill(bind(skeleton, specs, live, trusted=False), assemble(flat))
    same(live, {"all": base, "some": base[5:15]})


def check_memo(mesh: Any) -> None:
    """The same local shapes at other places are another structure."""
    memo = SpecMemo()
    size = 2 * dist.get_world_size()
    made = [
        DTensor.from_local(
            torch.zeros(2), mesh, [how], run_check=False, shape=torch.Size([n]), stride=(1,)
        )
        for how, n in ((Shard(0), size), (Replicate(), 2))
    ]
    first, second = (flatten([t], eager_leaf_bytes=0, memo=memo).specs for t in made)
    assert first is not second


def on_the_device_of_the_mesh(rank: int, world: int) -> None:
    """On a CUDA device where there is one, else on the CPU; all ranks share the device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (world,))

    def build(value: float) -> dict[str, Any]:
        local = torch.full((3, 5), value + rank, device=device)
        whole = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
        return {"p": whole, "o": torch.optim.AdamW([whole], lr=0.5)}

    def local_parts(state: dict[str, Any]) -> list[Tensor]:
        slots = state["o"].state_dict()["state"][0]
        return [t.detach().to_local() for t in (state["p"], slots["exp_avg"], slots["exp_avg_sq"])]

    state, live = build(1.0), build(2.0)
    state["p"].grad = state["p"].detach() * 0.5
    state["o"].step()
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    flat = flatten(state, eager_leaf_bytes=LIMIT)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    assert all(leaf.tensor.device.type == device for leaf in flat.leaves if leaf.tensor.dim())
    skeleton, specs = through_json(flat)
    binding = bind(skeleton, specs, live, trusted=False)
    assert len(binding.blocks) == 3
    assert {binding.destinations[name].device.type for name in binding.blocks} == {device}
    fill(binding, assemble(flat))
    assert all(map(torch.equal, local_parts(live), local_parts(state)))


def refused(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))

    def spread(local: Tensor, how: Any, size: int) -> DTensor:
        return DTensor.from_local(
            local, mesh, [how], run_check=False, shape=torch.Size([size]), stride=(1,)
        )

    partial = spread(torch.ones(4), Partial(), 4)
    ragged = spread(torch.ones(1 + 2 * rank), Shard(0), 1 + 3)
    first = init_device_mesh_of([0])
    elsewhere = distribute_tensor(torch.ones(4), first, [Shard(0)])
    for tensor, text in ((partial, "not yet reduced"), (ragged, "local part has shape")):
        with pytest.raises(ConfigError, match=f"'a.b' is a DTensor.*{text}.*full_tensor"):
            flatten({"a": {"b": tensor}}, eager_leaf_bytes=0)
    if rank:
        with pytest.raises(ConfigError, match="'x' is a DTensor on a mesh that this rank is not"):
            flatten({"x": elsewhere}, eager_leaf_bytes=0)
    else:
        assert flatten({"x": elsewhere}, eager_leaf_bytes=0).placements["x"].replicas == 1
    good = spread(torch.ones(4), Shard(0), 4 * world)
    for other in (good.to_local(), good.to_local()[:2]):
        with pytest.raises(ConfigError, match="'good', 'other' share memory"):
            flatten({"good": good, "other": other}, eager_leaf_bytes=0)
    flat = flatten({"t": good}, eager_leaf_bytes=0)
    skeleton, specs = through_json(flat)
    for live, text in (
        (spread(torch.ones(4), Partial(), 4 * world), "t: is a DTensor"),
        (spread(torch.ones(5), Shard(0), 5 * world), rf"t: shape \[{4 * world}\] in the"),
        (good.to_local(), rf"t: shape \[{4 * world}\] in the"),
        (good.double(), "t: dtype float32 in the checkpoint, float64 here"),
    ):
        with pytest.raises(StateMismatch, match=text):
            bind(skeleton, specs, {"t": live}, trusted=False)


def init_device_mesh_of(ranks: list[int]) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", ranks)
