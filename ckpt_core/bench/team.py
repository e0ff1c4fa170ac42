"""One job of 1..n ranks, as the parent sees it: they are asked the same at once, and end together.

`Team` is what a crew needs; who starts the processes is the launcher's business: `Alone` and `Ranks` here,
another suite's own where a framework brings its launcher.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt_core.bench import proc
from ckpt_core.bench.closing import Closing
from ckpt_core.bench.remote import Answers, ContenderFailed, Line, Remote, ask_all


class Team(Closing):
    """Running ranks. Close it, or use it in a `with` block: after an error they are killed.

    Attributes:
        root: directory for what they write.
    """

    def __init__(self, root: Path, timeout_s: float) -> None:
        """With no process yet; `timeout_s` is the deadline of each request."""
        self.root = root
        self.timeout_s = timeout_s

    @property
    @abstractmethod
    def lines(self) -> Sequence[Line]:
        """To the ranks, in their order."""

    @property
    @abstractmethod
    def pids(self) -> list[int]:
        """Processes in rank order."""

    @abstractmethod
    def kill(self) -> None:
        """End all ranks, whatever they do or wait for; idempotent."""

    def ask(self, operation: str, /, **arguments: Any) -> Answers:
        """Ask all ranks at once; their answers in rank order.

        Each answer has `read_bytes` and `written_bytes`, what storage has seen meanwhile of the rank and its
        children, from outside.

        Raises:
            ContenderFailed: one of them failed; the others may wait for it for ever: end them all.
        """
        pids = self.pids
        before = [proc.io_bytes(pid) for pid in pids]
        answers = ask_all(self.lines, operation, self.timeout_s, **arguments)
        for answer, pid, earlier in zip(answers, pids, before, strict=True):
            moved = proc.io_bytes(pid).since(earlier)
            answer["read_bytes"], answer["written_bytes"] = moved.read, moved.written
        return answers

    def hang_up(self) -> None:
        """Let them end as soon as they are not at work, where they can do so each alone. Idempotent."""

    def abandon(self) -> None:
        """End them after a failure."""
        self.kill()

    def break_off(self) -> None:
        """Nobody is asked to finish."""
        self.kill()


class Started(Team):
    """Processes that this one has started itself."""

    def __init__(self, remotes: list[Remote], timeout_s: float) -> None:
        """Of one or more, in the order of ranks; they share a directory."""
        super().__init__(remotes[0].root, timeout_s)
        self._remotes = remotes

    @property
    def lines(self) -> Sequence[Line]:
        """Of all."""
        return self._remotes

    @property
    def pids(self) -> list[int]:
        """Of all."""
        return [remote.pid for remote in self._remotes]

    def kill(self) -> None:
        """Whatever they do or wait for."""
        while self._remotes:
            self._remotes.pop().kill()


class Alone(Started):
    """One process, which waits for nobody."""

    def hang_up(self) -> None:
        """It ends as soon as it is not at work."""
        for remote in self._remotes:
            remote.hang_up()

    def abandon(self) -> None:
        """It may still clean up behind itself: its children, its memory."""
        self.close()

    def close(self) -> None:
        """Wait for its end; idempotent."""
        while self._remotes:
            self._remotes.pop().close()


class Ranks(Started):
    """Processes that meet at a store which rank 0 hosts; their worker knows `host`, `join` and `drop`.

    Attributes:
        joined: what the ranks said when they had found each other.
        port: of the store.
    """

    def __init__(self, remotes: list[Remote], timeout_s: float) -> None:
        """Let them find each other.

        Raises:
            ContenderFailed: a rank could not start; all are ended.
        """
        super().__init__(remotes, timeout_s)
        try:
            self.port: int = remotes[0].call("host")["port"]
            self.joined = self.ask("join", port=self.port, world_size=len(remotes))
        except BaseException:
            self.kill()
            raise

    def close(self) -> None:
        """Let all ranks give back what they have, then end them; idempotent."""
        try:
            if self._remotes:
                self.ask("drop")
        except ContenderFailed:
            pass  # whatever failed was reported before; now it only has to end
        finally:
            self.kill()


def all_started(ranks: int, start: Callable[[int], Remote]) -> list[Remote]:
    """A process for each rank; if one cannot start, none is left."""
    remotes: list[Remote] = []
    try:
        while len(remotes) < ranks:
            remotes.append(start(len(remotes)))
    except BaseException:
        for remote in remotes:
            remote.kill()
        raise
    return remotes


Launch = Callable[[str, Path, float], Team]
"""Starts the team of a way: its name, an existing empty folder, the deadline of each request."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """Starts one process for a way, or ranks that meet.

    Attributes:
        worker: "module:Class" that answers requests; see `ckpt_core.bench.serving`.
        ranks: how many, named rank-0 and so on; None: one process, which is told the name of its way.
        environment: variables of each process, besides those of this one.
        team: what the ranks become.
    """

    worker: str
    ranks: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    team: type[Ranks] = Ranks

    def __call__(self, name: str, folder: Path, timeout_s: float) -> Team:
        """Start them; returns once they have met.

        Raises:
            ContenderFailed: a rank could not start; all are ended.
        """
        root = folder / "files"
        root.mkdir()
        if self.ranks is None:
            return Alone([self._start(name, root, timeout_s)], timeout_s)
        remotes = all_started(self.ranks, lambda rank: self._start(f"rank-{rank}", root, timeout_s))
        return self.team(remotes, timeout_s)

    def _start(self, name: str, root: Path, timeout_s: float) -> Remote:
        return Remote(
            name, root, timeout_s=timeout_s, worker=self.worker, environment=self.environment
        )


RANKS_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
"""Of ranks that share this machine's processors."""
