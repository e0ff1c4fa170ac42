"""Leaves that all ranks should hold alike, and do or do not; each function runs in every rank."""

from __future__ import annotations

from typing import Any

import torch

from ckpt_core import Checkpointer, CkptError
from tests.multirank.crew import Rank
from tests.multirank.jobs import options, root_of

Tree = dict[str, Any]


def state_of(step: int) -> Tree:
    """Leaves of all kinds, the same function of the step on every rank."""
    torch.manual_seed(step)
    return {
        "large": torch.randn(1 << 20),
        "brief": torch.randn(300, 400).bfloat16(),
        "strided": torch.randn(200, 300).t(),
        "nan": torch.full((50_000,), float("nan")),
        "empty": torch.empty(0, 7),
        "small": {str(i): torch.randn(20) for i in range(8)},
    }


def _leaf(state: Tree, path: str) -> torch.Tensor:
    node: Any = state
    for key in path.split("."):
        node = node[key]
    return node


def _change(state: Tree, path: str, how: str) -> None:
    leaf = _leaf(state, path)
    flat = leaf.t().reshape(-1) if leaf.dim() == 2 and not leaf.is_contiguous() else leaf.view(-1)
    if how == "all":
        leaf += 1
    elif how == "second half":
        flat[flat.numel() // 2 :] += 1
    elif how == "one element":
        flat[flat.numel() * 5 // 7] += 1
    elif how == "sign of nan":
        leaf.view(torch.int32).bitwise_xor_(-(2**31))


def drift(
    who: Rank, root: str, path: str, how: str, odd: list[int], since: int, saves: int, layers: bool
) -> list[str]:
    """Save until one fails; from the step `since` on, the leaf is another one on the odd ranks."""
    outcomes = []
    with Checkpointer(root_of(who, root), options(on_error="warn"), coordination=who.meet()) as ck:
        for step in range(1, saves + 1):
            state = state_of(step)
            if who.rank in odd and step >= since:
                _change(state, path, how)
            try:
                outcomes.append(_saved(ck, step * 10, state, layers=layers))
            except CkptError as exc:
                outcomes.append(f"{type(exc).__name__}: {exc}")
                break
    return outcomes


def _saved(ck: Checkpointer, step: int, state: Tree, *, layers: bool) -> str:
    if not layers:
        return ck.save(step, state).committed.result(60).name
    given = {name: state[name] for name in ("large", "brief", "strided")}
    save = ck.begin(step, given)
    for name in given:
        save.stage([name])
        ck.wait_staged([name])
    return save.seal(state).committed.result(60).name


def equal_while_training(who: Rank, root: str, layers: bool) -> list[str]:
    """Equal at every save, and changed as soon as that is allowed: small leaves at once, others behind
    the barrier, and by rank 1 later than by rank 0.
    """
    outcomes = []
    state = state_of(0)
    with Checkpointer(root_of(who, root), options(), coordination=who.meet()) as ck:
        for step in (5, 10, 15, 20, 27, 31, 60, 61, 62, 63, 64, 65):
            torch.manual_seed(step)
            for leaf in (state["large"], state["brief"], state["strided"]):
                leaf.copy_(torch.randn(leaf.shape))
            for leaf in state["small"].values():
                leaf.copy_(torch.randn(leaf.shape))
            if layers:
                outcomes.append(_saved(ck, step, state, layers=True))
                continue
            handle = ck.save(step, state)
            for leaf in state["small"].values():
                leaf.fill_(who.rank)
            ck.wait_staged()
            for name in ("large", "brief", "strided"):
                state[name].fill_(who.rank)
            outcomes.append(handle.committed.result(60).name)
    return outcomes


def skips_one(who: Rank, root: str) -> list[str]:
    """Rank 1 sits one save out and comes back; then it drifts, which is found. Twice, as after a resume."""
    outcomes = []
    for life in range(2):
        chosen = options(on_error="warn", timeout=15.0)
        with Checkpointer(root, chosen, coordination=who.meet()) as ck:
            for step in range(1 + 10 * life, 8 + 10 * life):
                state = state_of(step)
                if who.rank == 1 and step % 10 == 3:
                    ck._engine.coordination.gather("sat out", None, 60.0)
                    continue
                if who.rank == 1 and step % 10 >= 7:
                    _change(state, "large", "all")
                try:
                    outcomes.append(ck.save(step * 100, state).committed.result(60).name)
                except CkptError as exc:
                    outcomes.append(f"{type(exc).__name__}: {exc}")
                if step % 10 == 3:
                    ck._engine.coordination.gather("sat out", None, 60.0)
    return outcomes


def _join(who: Rank) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    base = dist.TCPStore("127.0.0.1", who.port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("group", base),
        rank=who.rank,
        world_size=who.world_size,
        timeout=timedelta(seconds=60),
    )


def meshes(who: Rank, root: str, how: str) -> list[str]:
    """DTensors on two meshes made by hand, each of two ranks; those of rank 2 and 3 drift."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    _join(who)
    outcomes = []
    grid = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])][who.rank // 2]
    with Checkpointer(root, options(on_error="warn"), coordination=who.meet()) as ck:
        for step in (1, 2, 3):
            torch.manual_seed(step * 2 + who.rank % 2)
            local = torch.randn(400, 300)
            if who.rank > 1 and step == 3 and how == "drifts":
                local += 1
            split = DTensor.from_local(local, grid, [Shard(0)], run_check=False)
            try:
                outcomes.append(ck.save(step, {"split": split}).committed.result(60).name)
            except CkptError as exc:
                outcomes.append(f"{type(exc).__name__}: {exc}")
    dist.destroy_process_group()
    return outcomes


def mesh(who: Rank, root: str, how: str) -> list[str]:
    """DTensors: four ranks are two replicas of two shards; rank 3's replica drifts in its box."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    _join(who)
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "part"))
    outcomes = []
    with Checkpointer(root, options(on_error="warn"), coordination=who.meet()) as ck:
        for step in (1, 2, 3):
            torch.manual_seed(step * 2 + who.rank % 2)
            local = torch.randn(400, 300)
            if who.rank == 3 and step == 3 and how == "drifts":
                local[200:] += 1
            whole = DTensor.from_local(local, grid, [Replicate(), Shard(0)], run_check=False)
            try:
                state = {"split": whole, "plain": torch.ones(100)}
                outcomes.append(ck.save(step, state).committed.result(60).name)
            except CkptError as exc:
                outcomes.append(f"{type(exc).__name__}: {exc}")
    dist.destroy_process_group()
    return outcomes
