"""Who is told that a Checkpointer closes: those that hold a save open, and seal it then. And who may wait."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from ckpt_core.errors import ConfigError
from ckpt_core.system.threads import Worker, locks_held

Callback = Callable[[], object]


class OnClose:
    """Used on the training thread."""

    def __init__(self) -> None:
        self._callbacks: list[Callback] = []
        self._called: Callback | None = None

    def add(self, callback: Callback) -> None:
        """Call it at the end.

        Raises:
            ConfigError: it cannot be called.
        """
        if not callable(callback):
            raise ConfigError(f"on_close({callback!r}): give a function without arguments")
        self._callbacks.append(callback)

    def clear(self) -> None:
        """Call none of them."""
        self._callbacks.clear()

    def call(self) -> Exception | None:
        """Call each, in their order; the first error, with a note of the others.

        One that is interrupted is called again at the next call, and so are those after it. One that calls
        this itself is not called again.
        """
        error: Exception | None = None
        while self._callbacks and self._called is not self._callbacks[0]:
            try:
                self._called = self._callbacks[0]
                self._called()
            except Exception as exc:
                if error is None:
                    error = exc
                else:
                    error.add_note(f"Then also: {exc}")
            finally:
                self._called = None
            # Order matters: an interrupt above leaves it in its place.
            del self._callbacks[0]
        return error


def closed_meanwhile(root: Path) -> ConfigError:
    """What a call raises whose Checkpointer was closed before it came to an end."""
    return ConfigError(
        f"the Checkpointer of {root} was closed during this call, which has saved nothing; committed steps "
        f"are safe"
    )


def refuse_on(workers: Iterable[Worker], call: str) -> None:
    """Before a call that waits for these threads: subscribers, and callbacks of futures, run on them.

    Raises:
        ConfigError: one of them calls, or a signal handler, in the middle of another call.
    """
    refuse_halfway(call)
    if any(worker.runs_here for worker in workers):
        raise ConfigError(
            f"{call}() was called by a callback or a subscriber, on a thread of the Checkpointer, and would "
            f"wait for that very thread: call it on the thread that trains"
        )


def refuse_halfway(call: str) -> None:
    """Before a call that takes locks: a signal handler that has interrupted another one may have them.

    Raises:
        ConfigError: this thread has one, and would wait for itself.
    """
    if locks_held():
        raise halfway(call)


def halfway(call: str) -> ConfigError:
    """What a call raises that was made in the middle of another one, and would wait for that."""
    return ConfigError(
        f"{call}() was called in the middle of another call of the Checkpointer on the same thread, as by a "
        f"signal handler or a subscriber, and would wait for that very call: nothing was done, and that one "
        f"goes on. Set a flag there, and look at it between two steps: for SIGTERM on_sigterm='save' does so"
    )


def refuse_fork(root: Path, pid: int) -> None:
    """The threads stayed behind in the process of this id: whoever waits for them in a fork waits for ever.

    Raises:
        ConfigError: this is another one.
    """
    if os.getpid() != pid:
        made = f"the Checkpointer of {root} was made in process {pid}, and this is a fork"
        raise ConfigError(f"{made} of it: make one in this process, with a root of its own")
