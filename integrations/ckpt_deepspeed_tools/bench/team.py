"""The two ranks of one way, and whatever processes DeepSpeed starts for them."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from ckpt_core.bench.ranks.store_process import HOST
from ckpt_core.bench.ranks.team import Team


class DeepSpeedTeam(Team):
    """Running ranks, each the leader of a process group. Close it, or use it in a `with` block."""

    worker = "ckpt_deepspeed_tools.bench.worker:DeepSpeedWorker"
    environment: ClassVar[Mapping[str, str]] = {**Team.environment, "DS_ACCELERATOR": "cpu"}

    def kill(self) -> None:
        """End both ranks and their child processes, those whose rank has died among them; idempotent."""
        for pid in self.pids:
            # Before a rank is waited for: until then its number means its group alone.
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        super().kill()
        # DeepSpeed's all-reduce leaves 66 MiB of shared memory for each rank, however that has ended.
        for path in Path("/dev/shm").glob(f"deepspeed_*_{HOST}_{self._port}_*"):
            path.unlink(missing_ok=True)
