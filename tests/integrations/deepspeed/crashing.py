"""Ranks of DeepSpeed that may be killed: forks of a process that has imported all that takes long.

They have no agent: RANK, WORLD_SIZE and MASTER_* are set by hand, rank 0 keeps the store, and nobody ends
a rank whose fellow has died. As a program of its own it is one rank under torchrun, which does end it.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch._dynamo  # takes seconds, and DeepSpeed needs it for its first engine
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.muon import original_muon

import ckpt_deepspeed
from ckpt_core.bench.meeting import free_port
from tests.integrations.deepspeed.program import forget_buffers, job_of

LOADED = (torch._dynamo, original_muon, ckpt_deepspeed)
# What a first `initialize` loads under a lock, for which the others wait without end if its holder is killed.
get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)
LIMIT_S = 200
"""Far longer than a job takes on the slowest machine, and less than pytest gives a test."""
COLLECTIVE_S = 60.0
"""Longer than any test may take: what hangs in a collective is found before LIMIT_S."""

_LOG_BYTES = 6000


@dataclass(frozen=True)
class _Who:
    """One rank, and where it meets the others and reports."""

    rank: int
    ranks: int
    port: int
    place: Path


def run_ranks(
    call: str,
    ranks: int = 2,
    arguments: dict[str, Any] | None = None,
    kill: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Run `module.function(**arguments)` on every rank to its end. Called in a child of the warm process.

    Args:
        kill: {"after_s", "victims"}: SIGKILL for these, so long after the first of them has made the file
            `started`; {"together": True}: when one is killed, the others are killed at once.

    Returns:
        For each rank: the signal that ended it, its exit code, its problem, its result and its log.
    """
    with tempfile.TemporaryDirectory() as place:
        port = free_port()
        fork = multiprocessing.get_context("fork")
        crew = [_Who(rank, ranks, port, Path(place)) for rank in range(ranks)]
        processes = [
            fork.Process(target=_run_rank, args=(call, who, arguments or {})) for who in crew
        ]
        for process in processes:
            process.start()
        try:
            _watch(processes, Path(place), kill or {})
            _show_stacks(processes, Path(place))
            return [_outcome(p, who) for p, who in zip(processes, crew, strict=True)]
        finally:
            for process in processes:
                process.kill()
                process.join()
            forget_buffers(port)


def _watch(processes: list[Any], place: Path, kill: dict[str, Any]) -> None:
    """Wait for the end of all, and kill whom the test wants killed from outside."""
    deadline = time.monotonic() + LIMIT_S
    due = None
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if "after_s" in kill and due is None and (place / "started").exists():
            due = time.monotonic() + kill["after_s"]
        if due is not None and time.monotonic() >= due:
            for victim in kill["victims"]:
                processes[victim].kill()
        dead = any(process.exitcode == -signal.SIGKILL for process in processes)
        if dead and kill.get("together"):
            for process in processes:
                process.kill()
        time.sleep(0.005)


def _show_stacks(processes: list[Any], place: Path) -> None:
    """Where ranks are that have not ended, in what the test is shown to have printed."""
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in hanging:
        os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(bool(hanging))
    for rank in hanging:
        print(
            f"rank {rank} hangs", (place / f"{rank}.log").read_text()[-_LOG_BYTES:], file=sys.stderr
        )
    sys.stderr.flush()


def _outcome(process: Any, who: _Who) -> dict[str, Any]:
    report, log = who.place / f"{who.rank}.json", who.place / f"{who.rank}.log"
    code = process.exitcode
    found = {"signal": 0, "code": code, "problem": "", "result": None}
    if code is None:
        found["problem"] = f"rank {who.rank} hangs"
    elif code < 0:
        found |= {"signal": -code, "code": None}
    if report.exists():
        found |= json.loads(report.read_text())
    return found | {"log": log.read_text()[-_LOG_BYTES:] if log.exists() else ""}


def _run_rank(call: str, who: _Who, arguments: dict[str, Any]) -> None:
    """A rank from its start to the end of its process, which is that of a child of multiprocessing."""
    log = os.open(who.place / f"{who.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1)
    enter(who.rank, who.ranks, who.port)
    os.environ["STARTED"] = str(who.place / "started")
    report: dict[str, Any] = {}
    try:
        report = {"result": job_of(call)(**arguments)}
    except Exception as exc:
        report = {"problem": f"{type(exc).__name__}: {exc}", "trace": traceback.format_exc()}
        raise
    finally:
        partial = who.place / f"{who.rank}.part"
        partial.write_text(json.dumps(report))
        partial.rename(who.place / f"{who.rank}.json")


def enter(rank: int, ranks: int, port: int) -> None:
    """Become a rank, as a script does that nobody has launched."""
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(value) for name, value in found.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    logging.getLogger("ckpt_core").setLevel(logging.INFO)
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=COLLECTIVE_S))


def main() -> None:
    """One rank under torchrun: `MODULE.FUNCTION ARGUMENTS`; it ends as any script does."""
    gc.freeze()  # as in program.py
    call, arguments = sys.argv[1:]
    enter(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["MASTER_PORT"]))
    job_of(call)(**json.loads(arguments))


if __name__ == "__main__":
    main()
