"""One rank: it trains under DeepSpeed with one way to save, and does what the parent tells both ranks.

Both ranks get the same requests: rank 0 alone: host; join, then for each stage of ZeRO: build -> warm ->
check -> save, train, each followed by tidy -> drop.
"""

from __future__ import annotations

import gc
import logging
import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_core.bench.contenders.base import missing, release, sync_path
from ckpt_core.bench.meeting import HOST, Member
from ckpt_core.bench.proc import processor_s
from ckpt_core.bench.serving import Answer
from ckpt_core.bench.window import Window
from ckpt_deepspeed_tools.bench import ways

if TYPE_CHECKING:
    from ckpt_deepspeed_tools.bench.saving import Stock
    from ckpt_deepspeed_tools.bench.training import Training

_WARM_SAVES = 3
_POLL_S = 0.001
_PAST = 2
"""Steps behind the checked save: the copy must not have taken anything of them."""


class DeepSpeedWorker(Member):
    """One rank of a pair."""

    def __init__(self, name: str, root: Path) -> None:
        # A group of its own: DeepSpeed's decoupled engine leaves its child behind when a rank dies.
        os.setpgid(0, 0)
        warnings.simplefilter("ignore")
        super().__init__(name, root)
        self._training: Training | None = None
        self._way: Stock | None = None
        self._tags: list[str] = []
        self._count = 0

    def join(self, port: int, world_size: int) -> Answer:
        """Become a rank of a job; what is compiled on a machine's first run is compiled here."""
        reason = missing("deepspeed", "ckpt_deepspeed")
        if reason is not None:
            return {"reason": f"{reason}; {ways.INSTALL}", "version": ""}
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        os.environ |= _launcher_variables(self._rank, world_size, port)
        super().join(port, world_size)
        deepspeed.init_distributed("gloo")
        return {"reason": None, "version": release("deepspeed")}

    def build(self, name: str, stage: int, size: dict[str, Any], engine: dict[str, Any]) -> Answer:
        """A training engine that saves in this way, with all its state after a first step.

        Args:
            engine: keys for `checkpoint_engine`, where that is what the way sets.
        """
        from ckpt_deepspeed_tools.bench.saving import (
            CLASSES,
            Stock,
            detach_before_the_child_process,
        )
        from ckpt_deepspeed_tools.bench.training import Training

        if name == ways.DECOUPLED_PATCHED:
            detach_before_the_child_process()
        config = dict(ways.WAYS[name].config)
        if ways.CKPT_CORE in config:
            config[ways.CKPT_CORE] = {**config[ways.CKPT_CORE], **engine}
        self._training = Training(size, stage=stage, config=config)
        root = self._root / f"zero-{stage}"
        root.mkdir(exist_ok=True)
        self._way = CLASSES.get(name, Stock)(root, self._training.engine)
        self._training.step()
        gc.collect()
        gc.freeze()  # what is imported need not be looked through again before each window
        return {"engine": type(self._training.engine.checkpoint_engine).__name__}

    def warm(self) -> Answer:
        """Saves at consecutive steps, then some steps more: memory is at its highest, files are new."""
        training, way = self._at_work()
        for _ in range(_WARM_SAVES):
            training.step()
            way.save(self._next_tag())
        live = training.digest()
        for _ in range(_PAST):
            training.step()
        way.settle()
        return {"live": live}

    def check(self) -> Answer:
        """Destroy the state and load the last tag of `warm`; how large that tag is."""
        from ckpt_deepspeed_tools.bench.training import held_by

        training, way = self._at_work()
        training.scramble()
        self._barrier()
        loaded = way.load(self._tags[-1])
        answer: Answer = {"saved": training.digest(), "problem": loaded.problem}
        tag = way.root / self._tags[-1]
        answer["state_bytes"], answer["leaves"] = held_by(tag)
        answer["file_bytes"] = sum(path.stat().st_size for path in tag.rglob("*.pt"))
        answer["latest"] = (way.root / "latest").read_text() == tag.name
        return answer

    def save(self, quiet: int, tail: int) -> Answer:
        """One save in training, and the steps after it until `latest` names it, `tail` at least."""
        training, way = self._at_work()
        quiet_s = statistics.median([_seconds(training.step) for _ in range(quiet)])
        tag = self._next_tag()
        gc.collect()
        self._barrier()
        with _Watch(way, tag, looks=self._rank == 0) as watch:
            call_s = _seconds(lambda: way.save(tag))
            steps_s: list[float] = []
            while len(steps_s) < tail or not self._all_told(watch.over):
                steps_s.append(_seconds(training.step))
        fsync_s = way.fsync(tag)
        way.settle()
        return {
            "call_s": call_s,
            "extra_s": sum(steps_s) - len(steps_s) * quiet_s,
            "latest_s": watch.named_s,
            "durable_s": watch.durable_s,
            "fsync_s": fsync_s,
            "step_s": quiet_s,
        }

    def train(self, every: int, lead: int, steps: int) -> Answer:
        """A window of steps; what is in flight at its end is waited for outside the clock."""
        training, way = self._at_work()
        window = Window(every, lead, steps)
        for _ in range(lead):
            training.step()
        gc.collect()
        self._barrier()
        worked_s = processor_s(os.getpid())
        began = time.perf_counter()
        for step in range(1, steps + 1):
            training.step()
            if window.due(lead + step):
                way.save(self._next_tag())
        seconds = time.perf_counter() - began
        training.step()  # DeepSpeed's decoupled engine finishes in a step
        way.settle()
        return {"step_s": seconds / steps, "processor_s": processor_s(os.getpid()) - worked_s}

    def tidy(self) -> Answer:
        """Leave no tag and no dirty page behind for whoever has the next turn."""
        from ckpt_deepspeed_tools.bench.saving import remove_tags

        _, way = self._at_work()
        self._barrier()  # no rank writes any more
        if self._rank == 0:
            remove_tags(way.root, self._tags)
        self._tags.clear()
        self._barrier()
        return {}

    def drop(self) -> Answer:
        """Give back all that `build` made."""
        way, self._way, self._training = self._way, None, None
        if way is not None:
            way.close()
        gc.unfreeze()
        gc.collect()
        return {}

    def _at_work(self) -> tuple[Training, Stock]:
        assert self._training is not None and self._way is not None, "build comes first"
        return self._training, self._way

    def _next_tag(self) -> str:
        self._count += 1
        self._tags.append(f"step-{self._count}")
        return self._tags[-1]

    def _barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier()

    def _all_told(self, named: bool) -> bool:
        """What rank 0 has seen, on both ranks: they make the same steps."""
        import torch
        import torch.distributed as dist

        told = torch.tensor([float(named)])
        dist.broadcast(told, src=0)
        return bool(told.item())


class _Watch:
    """Looks for the moment when `latest` names a tag, in a `with` block that begins with the save.

    Attributes:
        named_s: seconds until then; None while it does not, and on ranks that do not look.
        durable_s: seconds until it does so durably, if files that it names are durable; else `named_s`.
    """

    def __init__(self, way: Stock, tag: str, *, looks: bool) -> None:
        self._way = way
        self._tag = tag
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="bench-latest", daemon=True)
        self._looks = looks and way.names_anything
        self._began = 0.0
        self.named_s: float | None = None
        self.durable_s: float | None = None

    def __enter__(self) -> _Watch:
        self._began = time.perf_counter()
        if self._looks:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._looks:
            self._thread.join()

    @property
    def over(self) -> bool:
        """Whether there is nothing to wait for any more; of use on the rank that looks."""
        return self.durable_s is not None or not self._looks

    def _look(self) -> None:
        while not self._stop.is_set():
            if self._named():
                named_s = time.perf_counter() - self._began
                if self._way.names_durable:
                    # The rename has been seen; what makes it durable may be under way, and is waited for.
                    sync_path(self._way.root)
                self.named_s, self.durable_s = named_s, time.perf_counter() - self._began
                return
            self._stop.wait(_POLL_S)

    def _named(self) -> bool:
        try:
            return (self._way.root / "latest").read_text() == self._tag
        except FileNotFoundError:
            return False


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _launcher_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Those that DeepSpeed's launcher sets; its `fast` and decoupled engines need CROSS_SIZE."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
    }
