"""The processes of one job of several ranks, as the parent sees them: they all do the same at once."""

from __future__ import annotations

import time
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any

from ckpt_core.bench.remote import ContenderFailed, Remote

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
_MODULE = "ckpt_core.bench.ranks.worker"

Answers = list[dict[str, Any]]


class Team:
    """Running ranks. Close it, or use it in a `with` block."""

    def __init__(self, folder: Path, world_size: int, *, timeout_s: float) -> None:
        """Start the ranks and let them find each other.

        Args:
            folder: existing, empty directory of this team.
            world_size: how many ranks.
            timeout_s: deadline of each request.

        Raises:
            ContenderFailed: a rank could not start.
        """
        self._timeout_s = timeout_s
        root = folder / "files"
        root.mkdir()
        self._remotes = [
            Remote(
                f"rank-{rank}",
                root,
                timeout_s=timeout_s,
                module=_MODULE,
                environment=ENVIRONMENT,
            )
            for rank in range(world_size)
        ]
        try:
            port = self._remotes[0].call("host")["port"]
            self.ask("join", port=port, world_size=world_size)
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        """Processes in rank order."""
        return [remote.pid for remote in self._remotes]

    def ask(self, operation: str, **arguments: Any) -> Answers:
        """Ask all ranks at once; their answers in rank order.

        Raises:
            ContenderFailed: one of them failed; the others may wait for it for ever, so `kill` comes next.
        """
        for remote in self._remotes:
            remote.send(operation, **arguments)
        deadline = time.monotonic() + self._timeout_s
        waiting = dict(enumerate(self._remotes))
        answers: dict[int, dict[str, Any]] = {}
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            ready = wait([remote.ready for remote in waiting.values()], left)
            if not ready:
                late = ", ".join(remote.name for remote in waiting.values())
                raise ContenderFailed(f"no answer to {operation} from {late}")
            for rank, remote in list(waiting.items()):
                if remote.ready in ready:
                    answers[rank] = waiting.pop(rank).answer(operation)
        return [answers[rank] for rank in range(len(self._remotes))]

    def kill(self) -> None:
        """End all ranks, whatever they wait for; idempotent."""
        while self._remotes:
            self._remotes.pop().kill()

    def close(self) -> None:
        """Let all ranks end; idempotent."""
        try:
            if self._remotes:
                self.ask("drop")
        except ContenderFailed:
            pass  # whatever failed was reported before; now it only has to end
        finally:
            self.kill()

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill() if error else self.close()
