"""The parent's side of one measured process: start it, ask it, end it; nothing waits for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from ckpt_core.errors import CkptError

_GRACE_S = 30.0
_LOG_TAIL = 2000


class ContenderFailed(CkptError):
    """A contender could not do what it was asked; the workload goes on without it."""


class Remote:
    """One contender's process. Used by one thread; close it, or use it in a `with` block."""

    def __init__(
        self,
        name: str,
        root: Path,
        *,
        timeout_s: float,
        module: str = "ckpt_core.bench.worker",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process; its first answer is awaited by the first `call`.

        Args:
            name: of the contender.
            root: existing, empty directory of its own.
            timeout_s: deadline of each call.
            module: what the process runs.
            environment: variables besides those of this process.
        """
        self.name = name
        self.root = root
        self._timeout_s = timeout_s
        self._log_path = root.parent / f"{name}.log"
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", module, name, str(root)]
        with self._log_path.open("ab") as log, theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment_for_children(environment),
                pass_fds=[theirs.fileno()],
            )

    @property
    def pid(self) -> int:
        """Process to look at from outside."""
        return self._process.pid

    def call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Ask for one operation of its worker and wait for the answer.

        Raises:
            ContenderFailed: it raised, died, or did not answer in time.
        """
        self.send(operation, **arguments)
        return self.answer(operation)

    def send(self, operation: str, **arguments: Any) -> None:
        """Ask for one operation; `answer` comes next, and several processes may be at work meanwhile.

        Raises:
            ContenderFailed: its process has ended.
        """
        request = {"op": operation, **arguments}
        try:
            self._connection.send_bytes(json.dumps(request).encode())
        except OSError as exc:
            raise self._ended(operation) from exc

    def answer(self, operation: str) -> dict[str, Any]:
        """Wait for the answer to what was sent last.

        Raises:
            ContenderFailed: as for `call`.
        """
        try:
            if not self._connection.poll(self._timeout_s):
                raise ContenderFailed(
                    f"{self.name}: no answer to {operation} in {self._timeout_s:.0f} s"
                )
            answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as exc:
            raise self._ended(operation) from exc
        if "error" in answer:
            raise ContenderFailed(f"{self.name}: {operation} failed: {answer['error']}")
        return answer

    def _ended(self, operation: str) -> ContenderFailed:
        return ContenderFailed(
            f"{self.name}: its process ended during {operation}: {self.log_tail()}"
        )

    def log_tail(self) -> str:
        """Last words of the process."""
        return self._log_path.read_bytes()[-_LOG_TAIL:].decode(errors="replace").strip()

    @property
    def ready(self) -> Connection:
        """What becomes readable when there is an answer, or when the process has ended."""
        return self._connection

    def kill(self) -> None:
        """End the process whatever it does; for one that waits for another that failed. Idempotent."""
        self._process.kill()
        self.close()

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


def environment_for_children(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's variables and some more; this very package is found wherever it runs from."""
    source = str(Path(__file__).resolve().parents[2])
    known = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [source, known]))
    return {**os.environ, **(more or {}), "PYTHONPATH": path}
