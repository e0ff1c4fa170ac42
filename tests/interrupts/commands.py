"""A command of `ckpt-core` that gets a signal in the middle of its work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

TOP = Path(__file__).parents[2]
_WITHIN_S = 60


@dataclass(frozen=True)
class Ended:
    """How it ended.

    Attributes:
        code: its exit code.
        started: processes that it had when the signal came.
        left: those of them that did not end.
    """

    code: int
    started: Sequence[psutil.Process]
    left: Sequence[psutil.Process]


def end_at_a_step(arguments: Sequence[object], disk: Path, number: int) -> Ended:
    """Send a signal once there is a step below `disk`."""
    command = subprocess.Popen(
        [sys.executable, "-m", "ckpt_core", *map(str, arguments)],
        cwd=TOP,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A job in the background of a shell, such as CI may be, has it ignored, and hands that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while not _has_a_step(disk):
            assert command.poll() is None
            time.sleep(0.01)
        started = psutil.Process(command.pid).children(recursive=True)
        command.send_signal(number)
        code = command.wait(_WITHIN_S)
        _, left = psutil.wait_procs(started, timeout=_WITHIN_S)
    finally:
        command.kill()
        command.wait()
    return Ended(code, started, left)


def _has_a_step(disk: Path) -> bool:
    """Looked for by `os.walk`, which takes it that directories go while it looks, as those of attempts do."""
    return any(name.startswith("step-") for _, names, _ in os.walk(disk) for name in names)
