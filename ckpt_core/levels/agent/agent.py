"""The agent: one process for each root, which takes committed steps to the further levels.

    run_agent(root)      until everything is where it is to be and nobody trains any more

One thread for each level carries; the main one reads the plan, sees whether somebody trains, and tells the
status. It changes nothing in the first root but the files in `.levels/`, and may be killed at any time: what
is visible at a level is whole, and the next agent goes on from what is there.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from ckpt_core._version import __version__
from ckpt_core.errors import CkptError, RootBusy
from ckpt_core.levels.agent.board import Board, Timing
from ckpt_core.levels.agent.carrier import Carrier
from ckpt_core.levels.agent.hosting import Hosting
from ckpt_core.levels.mailbox import (
    AGENT_LOG,
    LEVELS,
    PROTOCOL,
    Plan,
    read_plan,
    read_status,
    write_status,
)
from ckpt_core.options import PARITY, scheme_of
from ckpt_core.store import RootLock, find_root, writer_of
from ckpt_core.system.bell import Bell
from ckpt_core.system.files import Files
from ckpt_core.system.interrupts import stopped_by_signals

logger = logging.getLogger(__name__)

UP_TO_DATE = "up to date"
FENCED = "fenced"
ROOT_GONE = "the root is gone"
OTHER_RELEASE = "another release"
OTHER_TOKEN = "another token"
NO_PROGRESS = "no progress"
STOPPED = "stopped"
NO_PLAN = "no plan"

_NICE = 10
_LOG_BYTES = 1 << 20
_OPEN_FILES = 65536
_SAY_ANYWAY_S = 10.0


def run_agent(
    root: str | os.PathLike[str],
    *,
    files: Files | None = None,
    timing: Timing | None = None,
    stop: threading.Event | None = None,
) -> int:
    """Be the agent of a root, in a process of its own; the exit status.

    Ends at once, and quietly, when the root has one already. SIGTERM and SIGINT end it within seconds, with
    nothing half sent to be seen.

    Args:
        stop: what these signals set, for a caller that goes on afterwards.
    """
    path, files = find_root(Path(root)), files or Files()
    folder = path / LEVELS
    if not folder.is_dir():
        sys.stderr.write(f"{path} has no plan of levels: a Checkpointer(levels=...) writes one\n")
        return 2
    lock = RootLock(folder, files=files)
    try:
        lock.acquire()
    except RootBusy:
        return 0
    _be_modest()
    stop = stopped_by_signals() if stop is None else stop
    with _logged(folder / AGENT_LOG):
        hangs = _serve(path, lock, stop, files=files, timing=timing or Timing())
    if hangs:
        # A thread waits for a store that does not answer: the end of Python would wait for it, too.
        os._exit(0)
    return 0


def _serve(
    root: Path, lock: RootLock, stop: threading.Event, *, files: Files, timing: Timing
) -> bool:
    """Run, and again if somebody wants it the moment it ends; whether a thread hangs."""
    while True:
        agent = Agent(root, lock, stop, files=files, timing=timing)
        ended = agent.run()
        # Order matters: a Checkpointer writes its plan first and starts an agent then, which goes away while
        # this lock is held. So the plan is looked at once more when it is free.
        lock.release()
        if agent.hangs or stop.is_set() or not _is_wanted(root, agent.plan, ended):
            return agent.hangs
        try:
            lock.acquire()
        except CkptError:
            return False


def _is_wanted(root: Path, plan: Plan | None, ended: str) -> bool:
    fresh = read_plan(root)
    if fresh is None or not _is_ours(fresh):
        return False
    if plan is None or fresh.token != plan.token:
        return True
    return ended in (UP_TO_DATE, NO_PROGRESS) and writer_of(root) is not None


class Agent:
    """One life of an agent, with the lock of `.levels` held.

    Attributes:
        plan: that it went by last.
        hangs: a thread of it did not end in time.
    """

    def __init__(
        self, root: Path, lock: RootLock, stop: threading.Event, *, files: Files, timing: Timing
    ) -> None:
        self.plan = read_plan(root)
        self.hangs = False
        self._root, self._lock, self._stop = root, lock, stop
        self._files, self._timing = files, timing
        self._carriers: dict[str, Carrier] = {}
        self._left: list[Carrier] = []
        self._hosting = Hosting(root, files=files)
        self._free_s: float | None = None
        self._said = -1
        self._said_s = float("-inf")

    def run(self) -> str:
        """Carry until there is a reason to end: which it was."""
        if self.plan is None:
            return NO_PLAN
        if not _is_ours(self.plan):
            return OTHER_RELEASE
        with Bell() as bell:
            board = Board(self.plan, read_status(self._root), tell=bell.ring)
            pid, session = os.getpid(), self.plan.session
            logger.info("agent of %s: pid %d, session %d", self._root, pid, session)
            self._follow(board, self.plan)
            try:
                while not (ended := self._reason(board)):
                    self._say(board)
                    bell.wait(self._timing.poll_s, folders=[self._root])
                    for carrier in self._carriers.values():
                        carrier.wake()
            finally:
                self.hangs = not self._end()
        self._say(board, ended)
        logger.info("ended: %s", ended)
        return ended

    def _follow(self, board: Board, plan: Plan) -> None:
        """Carry to the levels of a plan, and to no others."""
        self.plan = plan
        self._hosting.follow(plan.serve)
        board.follow(plan)
        levels = {level.url: level for level in plan.levels}
        for url in self._carriers.keys() - levels:
            self._carriers[url].stop()
            self._left.append(self._carriers.pop(url))
        for url, level in levels.items():
            if url in self._carriers:
                self._carriers[url].go_by(level)
                continue
            kind = _kind(url)
            carrier = kind(self._root, url, board, files=self._files, timing=self._timing)
            carrier.go_by(level)
            self._carriers[url] = carrier
            carrier.start()

    def _reason(self, board: Board) -> str:
        """Why to end now; "" to go on."""
        if self._stop.is_set():
            return STOPPED
        with contextlib.suppress(OSError):  # that cannot be told now: the next look does
            if not self._lock.held():
                return ROOT_GONE
        fresh = read_plan(self._root)
        if fresh is not None and fresh != self.plan:
            if not _is_ours(fresh):
                return OTHER_RELEASE
            if self._is_locked_out(fresh):
                return OTHER_TOKEN
            self._follow(board, fresh)
        self._watch(board)
        self._hosting.look()
        board.hosts(self._hosting.address, self._hosting.refused)
        now = time.monotonic()
        fences = [carrier.fenced_s for carrier in self._carriers.values() if carrier.fenced_s]
        if fences and now - min(fences) >= self._timing.fenced_s:
            return FENCED
        if board.alive:
            return ""
        if all(carrier.done_in == board.epoch for carrier in self._carriers.values()):
            return UP_TO_DATE if self._is_quiet(now) else ""
        return NO_PROGRESS if now - board.progress_s >= self._timing.patience_s else ""

    def _is_locked_out(self, fresh: Plan) -> bool:
        """Whether the next job has another token: all that has a connection begins anew."""
        is_next = self.plan is None or fresh.session != self.plan.session
        return is_next and not self._hosting.has_token(fresh.serve)

    def _is_quiet(self, now: float) -> bool:
        """Whether no other node is on its way any more with what was saved last."""
        gone_s = now - (now if self._free_s is None else self._free_s)
        return (
            not self._hosting.address
            or min(self._hosting.quiet_s(), gone_s) >= self._timing.serves_s
        )

    def _watch(self, board: Board) -> None:
        """See whether somebody trains. A root that is free for a moment may be on its way to the next one."""
        if writer_of(self._root) is not None:
            self._free_s = None
            board.alive = True
            return
        now = time.monotonic()
        self._free_s = now if self._free_s is None else self._free_s
        if now - self._free_s >= self._timing.gone_s:
            board.alive = False

    def _say(self, board: Board, ended: str = "") -> None:
        version, now = board.version, time.monotonic()
        if version == self._said and now - self._said_s < _SAY_ANYWAY_S and not ended:
            return
        if self._root.is_dir():
            with contextlib.suppress(OSError):  # a full disk; said again later
                write_status(self._root, board.told(ended))
                self._said, self._said_s = version, now

    def _end(self) -> bool:
        carriers = [*self._carriers.values(), *self._left]
        for carrier in carriers:
            carrier.stop()
        self._hosting.close()
        deadline = time.monotonic() + self._timing.end_s
        return sum(not carrier.join(deadline=deadline) for carrier in carriers) == 0


def _kind(url: str) -> type[Carrier]:
    if scheme_of(url) != PARITY:
        return Carrier
    # Only here: it needs NumPy.
    from ckpt_core.levels.agent.parity_carrying import ParityCarrier

    return ParityCarrier


def _is_ours(plan: Plan) -> bool:
    return plan.protocol == PROTOCOL and plan.release in ("", __version__)


def _be_modest() -> None:
    """Training comes first, for the processor and for the disk."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    with contextlib.suppress(OSError, AttributeError, psutil.Error):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    with contextlib.suppress(OSError, ValueError):
        # All files of a step are open at once.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[None]:
    """What is to be said goes to a file that grows no further than its bound."""
    handler = logging.handlers.RotatingFileHandler(
        path, maxBytes=_LOG_BYTES, backupCount=1, delay=True
    )
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    ours = logging.getLogger("ckpt_core")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        handler.close()
