"""The process of one condition: trains block after block, and turns the second job on and off.

Started as `python -m ckpt_core.bench.policy.worker NAME ROOT FD`, like the processes of the other suites.
Requests: hello -> decide; open -> settle, disturb, change, compare, check. The second job is a child of this
process, so that it begins between two known iterations.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_core.bench.contenders.base import release
from ckpt_core.bench.policy.processors import Shares, here, keep_to
from ckpt_core.bench.remote import Remote
from ckpt_core.bench.serving import Answer

if TYPE_CHECKING:
    from ckpt_core.bench.policy.job import Block, Job

_WORKER = "ckpt_core.bench.policy.interference:Interference"
_PAUSE_S = 0.001
_NEVER = 10**9


class JobWorker:
    """One condition."""

    def __init__(self, name: str, root: Path) -> None:
        self._root = root
        self._job: Job | None = None
        self._load: Remote | None = None
        self._shares: Shares | None = None

    def hello(self) -> Answer:
        """What it is."""
        return {"version": release("ckpt-core")}

    def decide(self, questions: int) -> Answer:
        """Time one question after the other, between two looks of `Auto` at what saves cost."""
        import torch

        from ckpt_core.checkpointer import Checkpointer
        from ckpt_core.policy import Auto

        policy, state = Auto(min_steps=_NEVER, cache=False), {"weights": torch.zeros(1024)}
        with Checkpointer(self._root / "decision") as checkpointer:
            policy.watch(checkpointer)
            step = 0  # of the last question
            while policy.interval is None:
                time.sleep(_PAUSE_S)
                step += 1
                if policy.should_save(step):
                    checkpointer.save(step, state)
            seconds = []
            for asked in range(step + 1, step + 1 + questions):
                began = time.perf_counter()
                policy.should_save(asked)
                seconds.append(time.perf_counter() - began)
        return {
            "questions": questions,
            "median_s": statistics.median(seconds),
            "mean_s": statistics.fmean(seconds),
            "worst_s": max(seconds),
        }

    def open(
        self,
        size: dict[str, Any],
        policy: dict[str, Any],
        load: dict[str, int],
        threads: int,
        staging_bytes: int | None,
        timeout_s: float,
    ) -> Answer:
        """Build the job, and the second one, which waits. `policy`: "interval" or "max_overhead"."""
        from ckpt_core.bench.policy.job import FromTheLast, Job
        from ckpt_core.options import Options
        from ckpt_core.policy import Auto

        # First, so that it starts while the model is built.
        self._load = self._second(timeout_s)
        options = Options(keep_last=1, staging_bytes=staging_bytes, timeout=timeout_s)
        given = policy["interval"]
        chosen = Auto(policy["max_overhead"], cache=False) if given is None else FromTheLast(given)
        self._job = Job(size, self._root / "ckpts", chosen, options)
        self._shares = here(threads)
        self._load.call("prepare", **load, processors=self._shares.second)
        state_bytes, leaves = self._job.size()
        return {"state_bytes": state_bytes, "leaves": leaves}

    def _second(self, timeout_s: float) -> Remote:
        folder = self._root / "second"
        folder.mkdir()
        threads = {"OMP_NUM_THREADS": "1"}
        return Remote("second", folder, timeout_s=timeout_s, worker=_WORKER, environment=threads)

    def settle(self, saves: int, within_s: float) -> Answer:
        """Train until the policy knows its interval."""
        block = self._opened().settle(saves, within_s=within_s)
        assert self._shares is not None, "open comes first"
        # Not before: threads of the engine, which saves have started, may run anywhere.
        keep_to(self._shares.training)
        return {"block": _plain(block)}

    def disturb(self, on: bool) -> Answer:
        """Begin or end the second job."""
        assert self._load is not None, "open comes first"
        return self._load.call("start" if on else "stop")

    def change(self, below: int, quiet: int, least: int, within_s: float) -> Answer:
        """Train until the interval is short again, then let the second job begin, and train on."""
        job, load = self._opened(), self._load
        assert load is not None, "open comes first"
        calm = job.calm(below, most=quiet, within_s=within_s)
        # What it answers is read later: training does not wait for it.
        block = job.change(least, lambda: load.send("start"), within_s=within_s)
        load.answer("start")
        return {"calm": _plain(calm), "change": _plain(block)}

    def compare(self, pairs: int, base: int, saving: int, within_s: float) -> Answer:
        """Iterations without saves and with them, by turns, and without them at the end."""
        job = self._opened()
        blocks, told = [], []
        for _ in range(pairs):
            before = _plain(job.base(base))
            block = _plain(job.saving(saving, within_s=within_s))
            told.append(job.told_overhead)
            drain = _plain(job.drain())
            blocks.append({"before": before, "saving": block, "drain": drain})
        return {"pairs": blocks, "after": _plain(job.base(base)), "told": told}

    def check(self) -> Answer:
        """Whether the newest committed step is what training had."""
        live, restored = self._opened().check()
        return {"live": live, "restored": restored}

    def close(self) -> None:
        """End the second job, and the own one."""
        if self._load is not None:
            self._load.close()
        if self._job is not None:
            self._job.close()

    def _opened(self) -> Job:
        assert self._job is not None, "open comes first"
        return self._job


def _plain(block: Block) -> dict[str, Any]:
    return dataclasses.asdict(block)
