"""Processes that import what a job would import, and tell what came of it.

In processes of their own: an import may take seconds, end the process, or start a device.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_MARK = "ckpt-core doctor: "
_TIMEOUT_S = 120.0

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

    def __init__(self, program: str) -> None:
        """Start it."""
        whole = _FRAME.format(program=program, mark=_MARK)
        # As this process finds modules, so shall that one: it may run from a checkout.
        path = os.pathsep.join([entry for entry in sys.path if entry])
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", whole],
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
def trials(programs: Mapping[str, str]) -> Iterator[dict[str, RunningTrial]]:
    """Trials of these programs, all at the same time, by the same names; none is left behind."""
    running: dict[str, RunningTrial] = {}
    try:
        for name, program in programs.items():
            running[name] = RunningTrial(program)
        yield running
    finally:
        for trial in running.values():
            trial.end()
