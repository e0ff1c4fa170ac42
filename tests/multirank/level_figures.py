"""What it takes until a step is on other nodes, in seconds.

    python -m tests.multirank.level_figures [--mib 64] [--times 7] [--memory DIR] [--disk DIR]

Nodes are processes with a rank, a root and an agent each, on loopback; every save is of so many MiB on each
node, half of them replicated and saved once, and waits for the one before to have arrived everywhere.

    gemini          two nodes with roots in memory, a whole copy of each in the memory of the other
    parity          three nodes with roots in memory, parity 2+1 in memory
    veloc           one node: memory, then its disk, then another node's disk by HTTP
    lm_resiliency   if it is installed: its in-memory copies at the peer over gloo, of as many bytes
    cp              `cp -r` of what a node of the first row has of a step

Of each: the call of `save`, until it is committed, until it has arrived (at each level), and until a new
process has it back after a node was lost with its disk (of veloc: the memory), all in seconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ckpt_core import Checkpointer, Level, Options
from ckpt_core.store import step_path
from tests.crash.warm import Warm
from tests.levels.servers.faulty import in_environment
from tests.levels.servers.peer import PeerServer
from tests.levels.trainers import processes, until
from tests.multirank.crew import Rank, all_well
from tests.multirank.losing_nodes import a_place, end, run
from tests.multirank.peer_jobs import home_of, level_of, name_of

_LEAVES = 64
_WAIT_S = 60
Row = dict[str, list[float]]


def state_of(who: Rank, mib: int) -> dict[str, Any]:
    """As many bytes on each node: half of them its own, half its slice of what all have."""
    own, shared = mib << 19, (mib << 19) * who.world_size
    torch.manual_seed(who.rank)
    private = {str(n): torch.randn(own // 4 // _LEAVES) for n in range(_LEAVES)}
    torch.manual_seed(99)
    return {
        "own": private,
        "model": {str(n): torch.randn(shared // 4 // _LEAVES) for n in range(_LEAVES)},
    }


def save_and_time(who: Rank, place: str, mib: int, times: int, shape: str = "") -> Row:
    """Saves one after another, on every rank; the first two are not counted."""
    torch.set_num_threads(1)
    state, name = state_of(who, mib), name_of(shape)
    root, levels = home_of(place, who.node) / "root", [level_of(who, place, shape)]
    with Checkpointer(root, Options(), coordination=who.meet(), levels=levels) as ck:
        ck.restore(state)
        return _saves(ck, state, [name], times, per_rank=["own"])


def restore_and_time(who: Rank, place: str, mib: int, shape: str = "") -> float:
    """Until the state is back: from the making of the Checkpointer on."""
    torch.set_num_threads(1)
    state, begun = state_of(who, mib), time.perf_counter()
    root, levels = home_of(place, who.node) / "root", [level_of(who, place, shape)]
    with Checkpointer(root, Options(), coordination=who.meet(), levels=levels) as ck:
        assert ck.restore(state) is not None
        return time.perf_counter() - begun


def copy_by_lm(who: Rank, place: str, mib: int, times: int) -> Row:
    """The same by lm-resiliency, whose ranks exchange theirs."""
    import torch.distributed as dist
    from lm_resiliency.checkpointing import InMemoryCheckpointManager, InMemoryCkptConfig

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", who.port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=who.rank, world_size=who.world_size)
    folder = str(Path(place) / f"lm-{who.rank}")
    manager = InMemoryCheckpointManager(
        InMemoryCkptConfig(replication_jump=1, disk_flush_interval=0, disk_folder=folder)
    )
    torch.manual_seed(who.rank)
    tensors = [torch.randn((mib << 20) // 4 // _LEAVES) for _ in range(_LEAVES)]
    row: Row = {"call": [], "committed": [], "reached": []}
    for step in range(1, times + 3):
        dist.barrier()
        begun = time.perf_counter()
        manager.save_tensors(tensors, step)
        row["call"].append(time.perf_counter() - begun)
        manager.maybe_wait()
        row["committed"].append(time.perf_counter() - begun)
        assert manager.finalize_replication(timeout_s=60.0)
        row["reached"].append(time.perf_counter() - begun)
    return {name: values[2:] for name, values in row.items()}


def _saves(ck: Checkpointer, state: Any, levels: Sequence[str], times: int, **more: Any) -> Row:
    row: Row = {"call": [], "committed": [], **{name: [] for name in levels}}
    for step in range(1, times + 3):
        begun = time.perf_counter()
        handle = ck.save(step, state, **more)
        row["call"].append(time.perf_counter() - begun)
        handle.committed.result(_WAIT_S)
        row["committed"].append(time.perf_counter() - begun)
        for name in levels:
            handle.reached(name).result(_WAIT_S)
            row[name].append(time.perf_counter() - begun)
    return {name: values[2:] for name, values in row.items()}


def in_levels(memory: Path, disk: Path, mib: int, times: int) -> None:
    """Memory, disk, store."""
    who = Rank(0, 1, 0, None)
    state, root = state_of(who, mib), memory / "root"
    (disk / "peer").mkdir()
    with PeerServer(disk / "peer") as server, in_environment(server.environ()):
        urls = [str(disk / "level"), server.url()]
        with Checkpointer(root, Options(), levels=[*map(Level, urls)]) as ck:
            row = _saves(ck, state, urls, times)
        _end_of(root)
        shutil.rmtree(root)
        begun = time.perf_counter()
        with Checkpointer(root, Options(), levels=[*map(Level, urls)]) as ck:
            assert ck.restore(state) is not None
        row["back"] = [time.perf_counter() - begun]
        _end_of(root)
    row |= {"disk": row.pop(urls[0]), "store": row.pop(urls[1])}
    _print("veloc", row)


def _end_of(root: Path) -> None:
    """The end of the agent of a root."""
    until(lambda: not processes(root), "the end of the agent")


def of_nodes(warm: Warm, memory: Path, title: str, count: int, **told: Any) -> None:
    """Nodes that keep one another's steps."""
    nodes = [f"{title}{n}" for n in range(count)]
    rows = all_well(run(warm, "level_figures:save_and_time", memory, nodes, **told))
    row = {
        name: [max(one) for one in zip(*(r[name] for r in rows), strict=True)] for name in rows[0]
    }
    if title == "gemini":
        _print("cp", {"reached": [_cp(memory / nodes[0] / "root", told["times"] + 2, memory)]})
    end(memory / nodes[-1])
    shutil.rmtree(memory / nodes[-1])
    nodes[-1] = f"{title}-fresh"
    told.pop("times")
    row["back"] = [
        max(all_well(run(warm, "level_figures:restore_and_time", memory, nodes, **told)))
    ]
    _print(title, row)


def _cp(root: Path, step: int, memory: Path) -> float:
    took = []
    for n in range(5):
        begun = time.perf_counter()
        subprocess.run(["cp", "-r", step_path(root, step), memory / f"cp-{n}"], check=True)
        took.append(time.perf_counter() - begun)
        shutil.rmtree(memory / f"cp-{n}")
    return median(took)


def _print(title: str, row: Row) -> None:
    told = ", ".join(
        f"{name} {median(values):.3f} ({min(values):.3f}-{max(values):.3f})"
        for name, values in row.items()
    )
    print(f"{title}: {told}", flush=True)


def main(arguments: list[str]) -> int:
    """See above; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.multirank.level_figures")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--memory", default="/dev/shm")
    parser.add_argument("--disk", default=tempfile.gettempdir())
    given = parser.parse_args(arguments)
    size = {"mib": given.mib, "times": given.times}
    with (
        tempfile.TemporaryDirectory(dir=given.memory) as memory,
        tempfile.TemporaryDirectory(dir=given.disk) as disk,
        Warm() as warm,
    ):
        with a_place(Path(memory)):
            of_nodes(warm, Path(memory), "gemini", 2, **size)
        with a_place(Path(memory)):
            of_nodes(warm, Path(memory), "parity", 3, shape="2+1", **size)
        if importlib.util.find_spec("lm_resiliency") is not None:
            rows = all_well(run(warm, "level_figures:copy_by_lm", Path(memory), ["a", "b"], **size))
            _print("lm_resiliency", rows[0])
        in_levels(Path(memory), Path(disk), **size)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
