"""The parent's side of measured processes: start them, ask them, end them; nothing waits for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from ckpt_core.bench.closing import Closing
from ckpt_core.errors import CkptError

_GRACE_S = 30.0
_LOG_TAIL = 2000
_RUN_TIMEOUT_S = 600.0


Answers = list[dict[str, Any]]
"""Of several processes that were asked the same."""


class ContenderFailed(CkptError):
    """A contender could not do what it was asked; the workload goes on without it."""


class Line(Closing):
    """Requests to one process that runs `ckpt_core.bench.serving.serve`, and its answers.

    Used by one thread; close it, or use it in a `with` block.
    """

    def __init__(self, name: str, connection: Connection, *, timeout_s: float, log: Path) -> None:
        """Over an open connection.

        Args:
            name: of the process, in errors.
            connection: to it; closed by `close`.
            timeout_s: deadline of each call.
            log: what it prints goes there.
        """
        self.name = name
        self._connection = connection
        self._timeout_s = timeout_s
        self._log_path = log

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
        return log_tail(self._log_path)

    @property
    def ready(self) -> Connection:
        """What becomes readable when there is an answer, or when the process has ended."""
        return self._connection

    def hang_up(self) -> None:
        """Let the process end as soon as it is not at work, and do not wait for that. Idempotent."""
        self._connection.close()

    def close(self) -> None:
        """Hang up. Idempotent."""
        self.hang_up()


class Remote(Line):
    """One measured process."""

    def __init__(
        self,
        name: str,
        root: Path,
        *,
        timeout_s: float,
        worker: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process; its first answer is awaited by the first `call`.

        Args:
            name: of the process, which is told it.
            root: existing, empty directory of its own.
            timeout_s: deadline of each call.
            worker: "module:Class" that answers (`ckpt_core.bench.serving`).
            environment: variables besides those of this process.
        """
        self.root = root
        connection, theirs = Pipe()
        super().__init__(name, connection, timeout_s=timeout_s, log=root.parent / f"{name}.log")
        command = [sys.executable, "-m", "ckpt_core.bench.serving", worker, name, str(root)]
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

    def kill(self) -> None:
        """End the process whatever it does; for one that waits for another that failed. Idempotent."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """End the process; idempotent."""
        super().close()
        for end in (None, self._process.terminate, self._process.kill):
            if end is not None:
                end()
            try:
                self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                continue
            return


def ask_all(lines: Sequence[Line], operation: str, within_s: float, /, **arguments: Any) -> Answers:
    """Ask several processes at once; their answers in the same order, which must come within that time.

    Raises:
        ContenderFailed: one of them failed; the others may wait for it for ever, so end them all.
    """
    if len(lines) == 1:
        return [lines[0].call(operation, **arguments)]
    for line in lines:
        line.send(operation, **arguments)
    deadline = time.monotonic() + within_s
    waiting = dict(enumerate(lines))
    answers: dict[int, dict[str, Any]] = {}
    while waiting:
        left = max(0.0, deadline - time.monotonic())
        ready = wait([line.ready for line in waiting.values()], left)
        if not ready:
            late = ", ".join(line.name for line in waiting.values())
            raise ContenderFailed(f"no answer to {operation} from {late} in {within_s:.0f} s")
        for number, line in list(waiting.items()):
            if line.ready in ready:
                answers[number] = waiting.pop(number).answer(operation)
    return [answers[number] for number in range(len(lines))]


def run_module(
    module: str,
    numbers: Sequence[int],
    *,
    what: str,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """What a module prints as JSON when it is run with these arguments, in a process of its own.

    Args:
        module: its name.
        numbers: its arguments.
        what: it does, in errors.
        environment: variables besides those of this process.

    Raises:
        CkptError: the process failed, or took longer than ten minutes.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *[str(number) for number in numbers]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_RUN_TIMEOUT_S,
            env=environment_for_children(environment),
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise CkptError(f"{what} took longer than {_RUN_TIMEOUT_S:.0f} s") from exc
    if done.returncode != 0:
        raise CkptError(f"{what} failed: {done.stderr[-_LOG_TAIL:]}")
    return json.loads(done.stdout)


def log_tail(log: Path) -> str:
    """Last words in a log."""
    return log.read_bytes()[-_LOG_TAIL:].decode(errors="replace").strip()


def environment_for_children(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's variables and some more; this very package is found wherever it runs from."""
    source = str(Path(__file__).resolve().parents[2])
    known = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [source, known]))
    return {**os.environ, **(more or {}), "PYTHONPATH": path}
