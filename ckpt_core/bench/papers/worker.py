"""The process that trains and saves: it takes one turn after the other, each under another way.

Started as `python -m ckpt_core.bench.papers.worker NAME ROOT FD`, like the processes of the other suites.
Requests: hello -> build -> train, persist in any number -> build ...
"""

from __future__ import annotations

import gc
import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_core.bench import proc
from ckpt_core.bench.contenders.base import release
from ckpt_core.bench.serving import Answer

if TYPE_CHECKING:
    from ckpt_core.bench.papers.job import StandIn


class PapersWorker:
    """One state, and whoever saves it."""

    def __init__(self, name: str, root: Path) -> None:
        self._job: StandIn | None = None

    def hello(self) -> Answer:
        """What it is."""
        return {"core": release("ckpt-core"), "torch": release("torch")}

    def build(self, state_bytes: int, leaves: int, iteration_s: float) -> Answer:
        """Allocate a state, in the place of the one before."""
        from ckpt_core.bench.papers.job import StandIn

        self._job = None
        gc.collect()
        self._job = StandIn(state_bytes=state_bytes, leaves=leaves, iteration_s=iteration_s)
        # Collections between blocks then look at what turns have made, not at all of torch.
        gc.freeze()
        return {"state_bytes": self._job.state_bytes}

    def train(
        self,
        way: dict[str, Any],
        root: str,
        *,
        warm_ups: int,
        blocks: list[tuple[int, int]],
        check: bool,
        timeout_s: float,
    ) -> Answer:
        """Blocks of training, given as interval and saves; {"failed": why} where the way cannot do it."""
        job = self._built()
        try:
            with job.saver(way, Path(root), timeout_s) as saver:
                job.warm_up(saver, warm_ups)
                taken = [job.train(saver, every=every, saves=saves) for every, saves in blocks]
                return {"blocks": taken, "restored": job.check(saver) if check else None}
        except Exception as exc:
            return _failed(exc)

    def persist(
        self, way: dict[str, Any], root: str, *, warm_ups: int, check: bool, timeout_s: float
    ) -> Answer:
        """One checkpoint with nothing beside it, and what it has written; {"failed": why} as for `train`."""
        job, folder = self._built(), Path(root)
        try:
            with job.saver(way, folder, timeout_s) as saver:
                job.warm_up(saver, warm_ups)
                before = proc.io_bytes(os.getpid())
                seconds = job.persist(saver)
                written = proc.io_bytes(os.getpid()).since(before).written
                return {
                    "seconds": seconds,
                    "written": written,
                    "newest_bytes": _newest_bytes(folder),
                    "restored": job.check(saver) if check else None,
                }
        except Exception as exc:
            return _failed(exc)

    def close(self) -> None:
        """Free the state."""
        self._job = None

    def _built(self) -> StandIn:
        assert self._job is not None, "build comes first"
        return self._job


def _failed(error: Exception) -> Answer:
    """The process lives on: the other ways have their turns in it."""
    traceback.print_exc()
    return {"failed": f"{type(error).__name__}: {error}"}


def _newest_bytes(root: Path) -> int:
    """Size of what the newest step is made of."""
    newest = max((path for path in root.iterdir() if path.name.startswith("step-")), key=_moment)
    files = newest.rglob("*") if newest.is_dir() else [newest]
    return sum(path.stat().st_size for path in files if path.is_file())


def _moment(path: Path) -> int:
    return path.stat().st_mtime_ns
