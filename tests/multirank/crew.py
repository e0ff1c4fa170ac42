"""Ranks as forked processes: real ones, with a real store, that may be killed.

`run_ranks` is called in a child of the warm process, which stands for the launcher: it hosts the store, so
that any rank may die. Each rank runs `module:function(Rank, **arguments)` and reports what that returns.
`run_several` has a launcher for each of several jobs that know nothing of each other.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from ckpt_core import StoreOptions, TorchStore

DEAD_AFTER_S = 5.0
LIMIT_S = 180


@dataclass(frozen=True)
class Rank:
    """Who a process is, and where it meets the others."""

    rank: int
    world_size: int
    port: int
    node: str | None

    def meet(self) -> TorchStore:
        """The coordination of this rank."""
        return TorchStore(
            "127.0.0.1",
            self.port,
            rank=self.rank,
            world_size=self.world_size,
            node=self.node,
            options=StoreOptions(dead_after=DEAD_AFTER_S, hosted=False, kept_by="the launcher"),
        )


def run_ranks(
    call: str,
    world_size: int,
    nodes: list[str] | None = None,
    arguments: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Run every rank to its end: [{"signal": 0, "problem": "", "result": ...}] in rank order."""
    signal.alarm(LIMIT_S)
    # Listens before there are ranks, so that none of them ever connects to nobody.
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as place:
        pids = []
        for rank in range(world_size):
            who = Rank(rank, world_size, port, None if nodes is None else nodes[rank])
            pid = os.fork()
            if pid == 0:
                listener.close()
                _run_rank(call, who, arguments or {}, Path(place))
            pids.append(pid)
        store: Any = None
        try:
            store = _keep_store(listener)  # after the forks: it has threads
            return _collect(pids, Path(place))
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
            del store


def _keep_store(listener: socket.socket) -> Any:
    """A store that serves who has connected to `listener`, and who will."""
    import torch.distributed as dist

    host, port = listener.getsockname()
    serve = partial(
        dist.TCPStore,
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener.detach(),
    )
    try:
        return serve()
    except NotImplementedError:  # torch 2.6: the newer of its two stores takes no open socket
        return serve(use_libuv=False)


def run_several(
    call: str,
    world_size: int,
    several: list[dict[str, Any]],
    nodes: list[str] | None = None,
) -> list[list[dict[str, Any]]]:
    """`run_ranks` with each of these arguments, all at once: a job whose rank dies mostly waits."""
    with tempfile.TemporaryDirectory() as place:
        launchers = []
        for number, arguments in enumerate(several):
            pid = os.fork()
            if pid == 0:
                _run_launcher(Path(place) / str(number), call, world_size, nodes, arguments)
            launchers.append(pid)
        statuses = [os.waitpid(pid, 0)[1] for pid in launchers]
        assert not any(statuses), f"launchers ended with {statuses}"
        return [json.loads((Path(place) / str(n)).read_text()) for n in range(len(several))]


def _run_launcher(
    answer: Path, call: str, world_size: int, nodes: list[str] | None, arguments: dict[str, Any]
) -> None:
    code = 1
    try:
        answer.write_text(json.dumps(run_ranks(call, world_size, nodes, arguments)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _collect(pids: list[int], place: Path) -> list[dict[str, Any]]:
    left = dict(enumerate(pids))
    found: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + LIMIT_S - 20
    while left and time.monotonic() < deadline:
        for rank, pid in list(left.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del left[rank]
                found[rank] = _outcome(status, place / str(rank))
        time.sleep(0.005)
    for rank, pid in left.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found[rank] = {"signal": 0, "problem": f"rank {rank} hangs", "result": None}
    return [found[rank] for rank in sorted(found)]


def _outcome(status: int, path: Path) -> dict[str, Any]:
    sent = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    outcome = {"signal": sent, "problem": "", "result": None}
    if path.exists():
        outcome |= json.loads(path.read_text())
    elif not sent:
        outcome["problem"] = f"ended with {os.WEXITSTATUS(status)} and no report"
    return outcome


def _run_rank(call: str, who: Rank, arguments: dict[str, Any], place: Path) -> None:
    report: dict[str, Any]
    try:
        module, _, name = call.partition(":")
        report = {"result": getattr(importlib.import_module(module), name)(who, **arguments)}
    except BaseException:
        report = {"problem": traceback.format_exc()}
    partial = place / f"{who.rank}.part"
    partial.write_text(json.dumps(report))
    partial.rename(place / str(who.rank))
    os._exit(0)


def all_well(outcomes: list[dict[str, Any]]) -> list[Any]:
    """The results, once it is sure that every rank ended well."""
    for rank, outcome in enumerate(outcomes):
        # All of them: the first one that failed may only have waited for another.
        assert not outcome["problem"] and not outcome["signal"], f"rank {rank} of {outcomes}"
    return [outcome["result"] for outcome in outcomes]
