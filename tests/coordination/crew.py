"""Real processes that save together, each with a faulty store below its TorchStore if the test wants one.

They are forked from a server that has torch loaded, so that one costs a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ckpt_core.coordination import StoreOptions, TorchStore, client
from ckpt_core.errors import CkptError

TIMEOUT_S = 60.0
"""Longer than any test should take; one that reaches it has failed."""

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch.distributed", "tests.coordination.crew"])


@dataclass(frozen=True)
class Seat:
    """What a member of a crew is told."""

    rank: int
    world_size: int
    host: str
    port: int
    folder: str
    hosted: bool | None = None
    node: str | None = None
    dead_after: float = 30.0
    die_before_write: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def join(self) -> TorchStore:
        if self.die_before_write is not None:
            client.open_store = _deadly(client.open_store, self.die_before_write)
        return TorchStore(
            self.host,
            self.port,
            rank=self.rank,
            world_size=self.world_size,
            node=self.node,
            options=StoreOptions(dead_after=self.dead_after, timeout=TIMEOUT_S, hosted=self.hosted),
        )

    def leave_file(self, name: str) -> None:
        (Path(self.folder) / name).write_text(str(self.rank))


@dataclass(frozen=True)
class Said:
    """How a member's program ended: with a value, or with an error."""

    value: Any = None
    kind: str = ""
    text: str = ""
    blamed: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.kind


Program = Callable[[Seat], Any]


def _member(pipe: Connection, program: Program, seat: Seat) -> None:
    # torch describes each lost connection at length.
    log = os.open(Path(seat.folder) / f"stderr-{seat.rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 2)
    try:
        pipe.send(Said(program(seat)))
    except CkptError as exc:
        blamed = {*getattr(exc, "failures", {}), *([] if exc.rank is None else [exc.rank])}
        pipe.send(Said(None, type(exc).__name__, str(exc), tuple(sorted(blamed))))
    except BaseException as exc:
        pipe.send(Said(None, type(exc).__name__, traceback.format_exc()))


class Crew:
    """Starts one process for each seat; ends them all in `__exit__`."""

    def __init__(self, program: Program, seats: Sequence[Seat]) -> None:
        self.processes = []
        self._pipes = []
        for seat in seats:
            mine, theirs = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(target=_member, args=(theirs, program, seat))
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(mine)

    def said(self) -> list[Said | None]:
        """What each member has to say at its end; None for one that was killed."""
        deadline = time.monotonic() + TIMEOUT_S
        answers: list[Said | None] = []
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            wait([pipe], max(deadline - time.monotonic(), 0.0))
            try:
                answers.append(pipe.recv() if pipe.poll() else Said(None, "hang"))
            except EOFError:
                answers.append(None)
            process.join(max(deadline - time.monotonic(), 0.0))
        return answers

    def exit_codes(self) -> list[int | None]:
        for process in self.processes:
            process.join(TIMEOUT_S)
        return [process.exitcode for process in self.processes]

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()


def _deadly(open_store: Callable[..., Any], before_write: int) -> Callable[..., Any]:
    """Stores that kill this process right before the n-th write that concerns an attempt.

    Deleting is not counted: nobody waits for it.
    """
    writes = [0]

    class Deadly:
        def __init__(self, real: Any) -> None:
            self._real = real

        def __getattr__(self, name: str) -> Any:
            action = getattr(self._real, name)
            if name not in ("set", "add", "compare_set"):
                return action

            def write(key: str, *rest: Any) -> Any:
                if "/attempt/" in key:
                    writes[0] += 1
                    if writes[0] == before_write:
                        os.kill(os.getpid(), signal.SIGKILL)
                return action(key, *rest)

            return write

    return lambda *args, **settings: Deadly(open_store(*args, **settings))
