"""Imports of what a job would import, and what came of them.

In processes of their own: an import may take seconds, end the process, or start a device. They are forked
from one that has imported torch, which takes most of the time of each of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ckpt_core.cli.doctor import importing

_TIMEOUT_S = 120.0
_GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class Trial:
    """What an import gave: facts that its program tells, or why it failed."""

    told: dict[str, Any]
    error: str | None = None


class RunningTrials:
    """Processes that import; ended by the `with` of `trials`, at the latest."""

    def __init__(self, programs: Mapping[str, str]) -> None:
        """Start them."""
        self._names = tuple(programs)
        # As this process finds modules, so shall those: it may run from a checkout.
        path = os.pathsep.join([entry for entry in sys.path if entry])
        told = (json.dumps(dict(programs)), str(_TIMEOUT_S))
        self._process = subprocess.Popen(
            [sys.executable, "-P", importing.__file__, *told],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # the group is ended as one
        )

    def results(self) -> dict[str, Trial]:
        """What came of each, by name; waits for the end of the processes."""
        late = Trial({}, f"not imported within {_TIMEOUT_S:.0f} s")
        try:
            out, err = self._process.communicate(timeout=_TIMEOUT_S + _GRACE_S)
        except subprocess.TimeoutExpired:
            return dict.fromkeys(self._names, late)
        code = self._process.returncode
        other = late if code == 0 else Trial({}, _why(code, err))
        return dict.fromkeys(self._names, other) | dict(_told(out))

    def end(self) -> None:
        """Kill the processes that are still there, and wait for the first."""
        with self._process:  # closes the pipes, and waits
            if self._process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)


def _told(out: str) -> Iterator[tuple[str, Trial]]:
    for name, code, said, err in _marked(out):
        told = _marked(said)
        yield name, Trial(told[-1]) if code == 0 and told else Trial({}, _why(code, err))


def _marked(out: str) -> list[Any]:
    mark = importing.MARK
    return [json.loads(line[len(mark) :]) for line in out.splitlines() if line.startswith(mark)]


def _why(code: int, err: str) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    said = [line.strip() for line in err.splitlines() if line.strip()]
    return said[-1] if said else f"ended with {code}"


@contextmanager
def trials(programs: Mapping[str, str]) -> Iterator[RunningTrials | None]:
    """Trials of these programs, all at the same time; None if there are none. None is left behind."""
    if not programs:
        yield None
        return
    running = RunningTrials(programs)
    try:
        yield running
    finally:
        running.end()
