"""What `import` is tried with in processes of their own: kills, and ranks. Runs in the warm process."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt_core
from ckpt_core.cli.importing import import_source
from ckpt_core.cli.requests import ImportRequest
from tests import places
from tests.crash.layers import KillAt
from tests.crash.warm import forked

STEP, BEFORE = 7, 3
_MOST = 4
_NEVER = 1_000_000


def kill_imports(source: str, prepared: str, place: str) -> int:
    """Kill at operations; the root has the step whole or not at all, and takes it then. How many kills."""
    count = Path(place) / "count"

    def run(root: Path, n: int) -> Callable[[], None]:
        def action() -> None:
            kill = KillAt(n)
            request = ImportRequest(Path(source), str(root), no_progress=True, force=True)
            with patch("ckpt_core.checkpointer.Files", kill.files):
                import_source(request)
            count.write_text(json.dumps(kill.count))

        return action

    kills = 0
    for n in (_NEVER, *_places_of(source, prepared, place, run, count)):
        root = Path(shutil.copytree(prepared, Path(place) / f"killed-{n}"))
        sent, problem = forked(run(root, n))
        assert not problem and sent in (0, signal.SIGKILL), f"at {n}: {problem}"
        assert _steps_of(root) in ([BEFORE], [BEFORE, STEP]), f"killed at {n}"
        assert ckpt_core.verify(root).ok
        assert forked(run(root, _NEVER)) == (0, "")
        assert _steps_of(root) == [BEFORE, STEP]
        kills += sent == signal.SIGKILL
    return kills


def _places_of(
    source: str,
    prepared: str,
    place: str,
    run: Callable[[Path, int], Callable[[], None]],
    count: Path,
) -> list[int]:
    whole = Path(shutil.copytree(prepared, Path(place) / "whole"))
    assert forked(run(whole, _NEVER)) == (0, "")
    return places.some(range(json.loads(count.read_text())), _MOST, of=source)


def _steps_of(root: Path) -> list[int]:
    return [step for step in ckpt_core.committed_steps(root) if step is not None]


def save_in_two_parts(folder: str) -> None:
    """Have two ranks save a directory of DCP."""
    pid = os.fork()
    try:
        _save_part(int(pid == 0), folder)
    finally:
        if pid == 0:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def _save_part(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(35.0).reshape(7, 5)
    state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "step": 9}
    dcp.save(state, checkpoint_id=f"{folder}/two")
