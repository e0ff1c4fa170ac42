"""`Tender`: the thread that looks after the levels of one Checkpointer, and does what has to be whole."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from pathlib import Path

from ckpt_core.errors import PersistError
from ckpt_core.levels.mailbox import LEVELS
from ckpt_core.system.bell import Bell
from ckpt_core.system.threads import Monitor, Worker

_log = logging.getLogger("ckpt_core")

_LOOK_S = 0.2
_BEGINS_WITHIN_S = 30.0
_ENDS_WITHIN_S = 5.0


class Tender:
    """Looks when the agent has said something, when it is rung for, and five times in a second.

    Args:
        root: whose agent it is.
        look: called on the thread, again and again.
        finish: called there at its end.
    """

    def __init__(self, root: Path, *, look: Callable[[], None], finish: Callable[[], None]) -> None:
        self._root, self._look, self._finish = root, look, finish
        self._bell: Bell | None = None
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = Monitor()
        self.worker = Worker(self._run, name="ckpt-levels")

    def start(self) -> None:
        """Begin. Raises PersistError: the system gives no more threads."""
        self.worker.start()

    def ring(self, *_: object) -> None:
        """Have it look now. Any thread."""
        if self._bell is not None:
            self._bell.ring()

    def do(self, work: Callable[[], None]) -> None:
        """Have something done there, and wait for it.

        Raises:
            PersistError: it takes too long.
            What `work` raises.
        """
        done: list[BaseException | None] = []

        def run() -> None:
            error: BaseException | None = None
            try:
                work()
            except Exception as exc:
                error = exc
            with self._changed.lock:
                done.append(error)
                self._changed.notify_all()

        self._tasks.put(run)
        self.ring()
        deadline = time.monotonic() + _BEGINS_WITHIN_S
        if not self._changed.wait_for(lambda: bool(done), deadline=deadline):
            raise PersistError(
                f"the agent of {self._root} could not be started within {_BEGINS_WITHIN_S:g} s: storage "
                f"hangs. Committed steps are safe",
                path=self._root,
            )
        if done[0] is not None:
            raise done[0]

    def end(self) -> bool:
        """Have it end; whether it has, or hangs. It can be called again where it was interrupted."""
        self._tasks.put(None)
        self.ring()
        return self.worker.join(deadline=time.monotonic() + _ENDS_WITHIN_S)

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        with Bell() as bell:
            # Whoever has come before is heard, too: there is a look before the first wait.
            self._bell = bell
            failed = False
            while self._done():
                try:
                    self._look()
                except Exception:
                    if not failed:
                        _log.exception(
                            "looking after the levels failed; later errors are not logged"
                        )
                    failed = True
                bell.wait(_LOOK_S, folders=[self._root / LEVELS])
            self._finish()

    def _done(self) -> bool:
        """Do what there is; whether to go on."""
        while True:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                return True
            if task is None:
                return False
            task()
