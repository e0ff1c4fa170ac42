"""Processes that import what a job would import, and tell what came of it.

In processes of their own: an import may take seconds, end the process, or start a device.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_MARK = "ckpt-core doctor: "
_TIMEOUT_S = 120.0

_TORCH = """
import warnings
import torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.cuda.get_device_properties(index) for index in range(count)]
told["build"] = torch.version.cuda or torch.version.hip
told["devices"] = [[device.name, device.total_memory] for device in devices]
told["said"] = [str(warning.message) for warning in caught]
"""
_HOROVOD = """
import horovod.torch as hvd
import ckpt_horovod
told["controllers"] = [name for name in ("gloo", "mpi") if getattr(hvd, name + "_built")()]
"""
_PROGRAMS = {
    "torch": _TORCH,
    "lightning": "import ckpt_lightning",
    "deepspeed": "import ckpt_deepspeed",
    "horovod": _HOROVOD,
}
_FRAME = """
import json, sys
told = {{}}
{program}
sys.stdout.write("\\n{mark}" + json.dumps(told) + "\\n")
"""


@dataclass(frozen=True, slots=True)
class Trial:
    """What an import gave: facts that its program tells, or why it failed."""

    told: dict[str, Any]
    error: str | None = None


class RunningTrial:
    """A process that imports; ended by the `with` of `trials`, at the latest."""

    def __init__(self, name: str) -> None:
        program = _FRAME.format(program=_PROGRAMS[name], mark=_MARK)
        # As this process finds modules, so shall that one: it may run from a checkout.
        path = os.pathsep.join([entry for entry in sys.path if entry])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | {"PYTHONPATH": path},
        )

    def result(self) -> Trial:
        """What came of it; waits for the end of the process."""
        try:
            out, err = self._process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return Trial({}, f"not imported within {_TIMEOUT_S:.0f} s")
        code = self._process.returncode
        lines = [line for line in out.splitlines() if line.startswith(_MARK)]
        if code == 0 and lines:
            return Trial(json.loads(lines[-1].removeprefix(_MARK)))
        if code < 0:
            return Trial({}, f"ended by {signal.Signals(-code).name}")
        said = [line.strip() for line in err.splitlines() if line.strip()]
        return Trial({}, said[-1] if said else f"ended with {code}")

    def end(self) -> None:
        """Kill the process if it is still there, and wait for it."""
        with self._process:  # closes the pipes, and waits
            self._process.kill()


@contextmanager
def trials(names: Iterable[str]) -> Iterator[dict[str, RunningTrial]]:
    """Trials of these frameworks, all at the same time; none is left behind."""
    running: dict[str, RunningTrial] = {}
    try:
        for name in names:
            running[name] = RunningTrial(name)
        yield running
    finally:
        for trial in running.values():
            trial.end()
