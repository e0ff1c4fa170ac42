"""One rank of a launch: `python -m tests.integrations.horovod.program FOLDER`, started by horovodrun.

The process that horovodrun knows waits for the one that does the work, and then for the other ranks: so a
rank may be killed, and horovodrun does not end the others before they have told what that did to them.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import psutil

from tests.integrations.horovod.launch import HERE, wait_for, write_whole

_PR_SET_PDEATHSIG = 1
_OTHERS_S = 20.0


def main(folder: Path) -> None:
    """Do the jobs of the plan, in a process that may be killed."""
    rank, ranks = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    plan = json.loads((folder / "plan").read_text())
    _leave_number(folder / f"outer{rank}.pid")
    outer = os.getpid()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != outer:
            os._exit(1)
        _leave_number(folder / f"inner{rank}.pid")
        _work(folder, rank, ranks, plan)
        os._exit(0)
    os.waitpid(child, 0)
    write_whole(folder / f"{rank}.ended", "")
    wait_for([folder / f"{other}.ended" for other in range(ranks)], limit_s=plan["limit_s"])


def _leave_number(path: Path) -> None:
    write_whole(path, f"{os.getpid()} {psutil.Process().create_time()!r}")


def _work(folder: Path, rank: int, ranks: int, plan: dict[str, Any]) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(plan["limit_s"] * 0.8, exit=False)
    import horovod.torch as hvd
    import torch

    torch.set_num_threads(1)
    wait_patiently()
    hvd.init()
    for job in plan["jobs"]:
        report = _report(job)
        write_whole(folder / f"{job['name']}.{rank}.json", json.dumps(report))
        if report["problem"]:
            # Went wrong on all ranks alike, or here alone: then the others hang, and this has to end.
            others = [folder / f"{job['name']}.{other}.json" for other in range(ranks)]
            if not wait_for(others, limit_s=_OTHERS_S):
                return
    hvd.shutdown()


def wait_patiently() -> None:
    """Who waits for a collective sleeps: Horovod asks as often as it can, a third of a job's time."""
    from horovod.torch import mpi_lib_v2 as mpi_lib

    wait = mpi_lib.horovod_torch_wait_and_clear

    def patient(handle: int) -> None:
        while not mpi_lib.horovod_torch_poll(handle):
            time.sleep(0.0002)
        wait(handle)

    mpi_lib.horovod_torch_wait_and_clear = patient


def _report(job: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    module, _, name = job["call"].partition(":")
    try:
        call = getattr(importlib.import_module(f"{HERE}.{module}"), name)
        result = {"result": call(**job["arguments"]), "problem": ""}
    except BaseException:
        result = {"result": None, "problem": traceback.format_exc()}
    return {**result, "seconds": time.monotonic() - began}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
