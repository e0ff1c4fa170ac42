"""Programs that run in several real processes with a gloo process group between them.

    python -m tests.state.ranks MODULE:FUNCTION WORLD_SIZE FOLDER

torch is imported once, then each rank is a fork of that process.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path

REPO = Path(__file__).parents[2]
_GRACE_S = 60


def run_ranks(program: str, world: int, folder: Path, *, timeout_s: int = 120) -> None:
    """Run `module:function(rank, world)` on each rank; fails with the output of all of them."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.state.ranks",
        program,
        str(world),
        str(folder),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        command,
        cwd=REPO,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, output


def _rank(program: str, rank: int, world: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=_GRACE_S),
    )
    module, _, function = program.partition(":")
    getattr(importlib.import_module(module), function)(rank, world)
    dist.barrier()
    dist.destroy_process_group()


def _main(program: str, world: int, folder: str) -> int:
    importlib.import_module(program.partition(":")[0])
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _rank(program, rank, world, folder)
                code = 0
            except BaseException:
                print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
