"""The parent's side of a contender's process: start it, ask it, end it; nothing waits for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from ckpt_core.errors import CkptError

_GRACE_S = 30.0
_LOG_TAIL = 2000


class ContenderFailed(CkptError):
    """A contender could not do what it was asked; the workload goes on without it."""


class Remote:
    """One contender's process. Used by one thread; close it, or use it in a `with` block."""

    def __init__(self, name: str, root: Path, *, timeout_s: float) -> None:
        """Start the process; its first answer is awaited by the first `call`.

        Args:
            name: of the contender.
            root: existing, empty directory of its own.
            timeout_s: deadline of each call.
        """
        self.name = name
        self.root = root
        self._timeout_s = timeout_s
        self._log_path = root.parent / f"{name}.log"
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "ckpt_core.bench.worker", name, str(root)]
        with self._log_path.open("ab") as log, theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(os.environ),
                pass_fds=[theirs.fileno()],
            )

    @property
    def pid(self) -> int:
        """Process to look at from outside."""
        return self._process.pid

    def call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Ask for one operation of `worker.Worker` and wait for its answer.

        Raises:
            ContenderFailed: it raised, died, or did not answer in time.
        """
        request = {"op": operation, **arguments}
        try:
            self._connection.send_bytes(json.dumps(request).encode())
            if not self._connection.poll(self._timeout_s):
                raise ContenderFailed(
                    f"{self.name}: no answer to {operation} in {self._timeout_s:.0f} s"
                )
            answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as exc:
            raise ContenderFailed(
                f"{self.name}: its process ended during {operation}: {self.log_tail()}"
            ) from exc
        if "error" in answer:
            raise ContenderFailed(f"{self.name}: {operation} failed: {answer['error']}")
        return answer

    def log_tail(self) -> str:
        """Last words of the process."""
        return self._log_path.read_bytes()[-_LOG_TAIL:].decode(errors="replace").strip()

    def close(self) -> None:
        """End the process; idempotent."""
        self._connection.close()
        for end in (None, self._process.terminate, self._process.kill):
            if end is not None:
                end()
            try:
                self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                continue
            return


def _environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The same environment, in which this very package is found wherever it runs from."""
    source = str(Path(__file__).resolve().parents[2])
    known = inherited.get("PYTHONPATH", "")
    return {**inherited, "PYTHONPATH": os.pathsep.join(filter(None, [source, known]))}
