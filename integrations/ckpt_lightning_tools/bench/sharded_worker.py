"""The process of one rank and one way to save, under a strategy that shards."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, ParamSpec

from ckpt_core.bench.contenders.base import missing
from ckpt_core.bench.fit_worker import Fitting, settle
from ckpt_core.bench.serving import Answer
from ckpt_lightning_tools.bench.worker import LightningWorker

P = ParamSpec("P")


def _then_settling(request: Callable[P, Answer]) -> Callable[P, Answer]:
    """What a strategy leaves is let go of at once: six of these processes wait, and one is at work."""

    @functools.wraps(request)
    def settling(*args: P.args, **told: P.kwargs) -> Answer:
        answer = request(*args, **told)
        settle()
        return answer

    return settling


class _ShardedWorker(LightningWorker):
    """Each fit has a model of its own: strategies take it apart."""

    strategy: ClassVar[str]

    def fitting(self) -> Fitting:
        """Imported here alone: it needs Lightning."""
        from ckpt_lightning_tools.bench.sharded_fitting import ShardedFitting

        return ShardedFitting(self.strategy, self._size)

    def _module_of(self, size: dict[str, Any]) -> Any:
        self._size = size
        return self.fitting().model(size)

    fit = _then_settling(LightningWorker.fit)
    stop = _then_settling(LightningWorker.stop)
    resume = _then_settling(LightningWorker.resume)

    @contextmanager
    def _new_root(self) -> Iterator[Path]:
        import torch.distributed as dist

        self._fits += 1
        root = self._root / f"fit-{self._fits}"
        yield root
        dist.barrier()  # Order matters: the other rank may still read.
        if dist.get_rank() == 0:
            shutil.rmtree(root, ignore_errors=True)
        os.sync()
        dist.barrier()


class FsdpWorker(_ShardedWorker):
    """Under FSDPStrategy."""

    strategy: ClassVar = "fsdp"


class DeepSpeedWorker(_ShardedWorker):
    """Under DeepSpeedStrategy."""

    strategy: ClassVar = "deepspeed"
    extra: ClassVar = "lightning,deepspeed"

    def hello(self) -> Answer:
        """Whether it can run here."""
        reason = missing("deepspeed", "ckpt_deepspeed")
        if reason is not None:
            return {"reason": f"{reason}; install it with: pip install 'ckpt-core[{self.extra}]'"}
        return super().hello()
