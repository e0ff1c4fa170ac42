"""The processes of one job of several ranks, as the parent sees them: they all do the same at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from ckpt_core.bench.closing import Closing
from ckpt_core.bench.remote import Answers, ContenderFailed, Remote, ask_all


class Team(Closing):
    """Running ranks. Close it, or use it in a `with` block.

    Attributes:
        worker: what each rank runs; it knows the requests host, join and drop.
        environment: variables of each rank, besides those of this process.
        joined: what the ranks said when they had found each other.
    """

    worker: ClassVar[str] = "ckpt_core.bench.ranks.worker:RankWorker"
    environment: ClassVar[Mapping[str, str]] = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

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
        self._port = 0
        root = folder / "files"
        root.mkdir()
        self._remotes = [
            Remote(
                f"rank-{rank}",
                root,
                timeout_s=timeout_s,
                worker=self.worker,
                environment=self.environment,
            )
            for rank in range(world_size)
        ]
        try:
            self._port = self._remotes[0].call("host")["port"]
            self.joined = self.ask("join", port=self._port, world_size=world_size)
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
        return ask_all(self._remotes, operation, self._timeout_s, **arguments)

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill() if error else self.close()
