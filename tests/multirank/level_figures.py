"""What it takes until a step has gone from memory to a disk and to another node, in seconds.

    python -m tests.multirank.level_figures [--mib 64] [--times 7] [--memory DIR] [--disk DIR]

One process whose root is in memory; its levels are its disk and another node's disk by HTTP. Every save waits
for the one before to have arrived everywhere: the call of `save`, until it is committed, until it has arrived
at each level, and until a new process has it back after the memory was lost.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ckpt_core import Checkpointer, Level, Options
from tests.levels.servers.faulty import in_environment
from tests.levels.servers.peer import PeerServer
from tests.levels.trainers import processes, until

_LEAVES = 64
_WAIT_S = 60
Row = dict[str, list[float]]


def _saves(ck: Checkpointer, state: Any, levels: Sequence[str], times: int) -> Row:
    row: Row = {"call": [], "committed": [], **{name: [] for name in levels}}
    for step in range(1, times + 3):
        begun = time.perf_counter()
        handle = ck.save(step, state)
        row["call"].append(time.perf_counter() - begun)
        handle.committed.result(_WAIT_S)
        row["committed"].append(time.perf_counter() - begun)
        for name in levels:
            handle.reached(name).result(_WAIT_S)
            row[name].append(time.perf_counter() - begun)
    return {name: values[2:] for name, values in row.items()}


def in_levels(memory: Path, disk: Path, mib: int, times: int) -> None:
    """Memory, disk, store."""
    torch.manual_seed(0)
    state = {str(n): torch.randn((mib << 20) // 4 // _LEAVES) for n in range(_LEAVES)}
    root = memory / "root"
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
    with (
        tempfile.TemporaryDirectory(dir=given.memory) as memory,
        tempfile.TemporaryDirectory(dir=given.disk) as disk,
    ):
        in_levels(Path(memory), Path(disk), mib=given.mib, times=given.times)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
