"""The agent of a root, started by hand or by systemd (`ckpt-core agent`).

settle_plan(root, levels)       claim levels and write the plan, or take the one that is there
serve_agent(root, once=True)    be the agent until all is where it is to be, or somebody is needed
serve_agent(root, once=False)   be it until told to end, also while nobody trains
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from ckpt_core._version import __version__
from ckpt_core.errors import CkptError, ConfigError, RootBusy
from ckpt_core.levels.agent.agent import STOPPED, UP_TO_DATE, run_agent
from ckpt_core.levels.errands import Errands
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.levels.mailbox import (
    LEVELS,
    LevelStatus,
    Plan,
    Status,
    read_plan,
    read_status,
    write_plan,
)
from ckpt_core.levels.trainer.joining import claim_here, write_run
from ckpt_core.levels.trainer.places import check_places, same_disk
from ckpt_core.levels.wants import but_for, wanted
from ckpt_core.options import Level
from ckpt_core.store import RootLock, committed_steps, pinned_steps, unpinned_marks, writer_of
from ckpt_core.system.files import Files
from ckpt_core.system.interrupts import stopped_by_signals

logger = logging.getLogger(__name__)

_BY_HAND = "hand-"
_LOOK_S = 0.3
_IDLE_S = 0.5
_PATIENCE_S = 60.0
"""How long a level may have trouble, for whoever waits for all to be there."""


def settle_plan(root: Path, levels: Sequence[Level]) -> Plan:
    """What the agent of a root is to do from now on.

    Args:
        levels: () takes the plan that is there.

    Raises:
        ConfigError: there is no plan, a job that has the root open has its own, or a level cannot be used.
        RootBusy: the root has an agent; or a level belongs to another run, or to a job that runs elsewhere.
        Away: a level cannot be reached.
        PersistError, OSError: the root cannot be locked, or the plan cannot be written.
    """
    refuse_another(root)
    plan = read_plan(root)
    if not levels:
        if plan is None or not plan.levels:
            raise ConfigError(f"{root} has no plan of levels: give --level URL", path=root)
        return plan
    check_places(root, levels)
    with _locked_unless_trained(root) as trained:
        if trained:
            _refuse_planned(root)
        for text in same_disk(root, levels):
            logger.warning("%s", text)
        with closing(Errands()) as errands:
            claim = claim_here(root, levels, errands)
        if trained:
            # Once more: the job may have been about to claim its levels, too, and its plan stays.
            _refuse_planned(root)
        write_run(root, claim["run"], files=Files())
        token = f"{_BY_HAND}{secrets.token_hex(8)}"
        plan = Plan(claim["run"], claim["session"], token, tuple(levels), release=__version__)
        write_plan(root, plan, others=claim["others"])
    return plan


@contextmanager
def _locked_unless_trained(root: Path) -> Iterator[bool]:
    """Nobody else claims levels for a root meanwhile; whether a job has it already."""
    lock, trained = RootLock(root), False
    try:
        try:
            lock.acquire()
        except RootBusy:
            trained = True
        yield trained
    finally:
        lock.release()


def _refuse_planned(root: Path) -> None:
    """Be sure that the job that has a root knows of no levels."""
    plan = read_plan(root)
    if plan is not None and plan.levels and not plan.token.startswith(_BY_HAND):
        raise ConfigError(
            f"the job that has {root} open says where its steps go: leave --level and its options out",
            path=root,
        )


def refuse_another(root: Path) -> None:
    """Be sure that the root has no agent.

    Raises:
        RootBusy: it has one; says which.
    """
    there = writer_of(root / LEVELS)
    if there is not None:
        pid, host = there["pid"] or "unknown", there.get("host", "another host")
        text = f"{root} has an agent: pid {pid} on {host}. It goes by the plan of the root; end it first"
        raise RootBusy(text, path=root)


def serve_agent(root: Path, *, once: bool) -> Status | None:
    """Be the agent of a root whose plan is settled; what it said last.

    Args:
        once: end when all that is committed and due has come where it belongs, or a level has had trouble for
            a minute, or needs somebody. Otherwise only SIGTERM, SIGINT, another session or another release
            end it.
    """
    # One for all that follows: a signal may come while the agent ends by itself.
    stop = stopped_by_signals()
    while True:
        with _watched(root) if once else _unwatched():
            run_agent(root, stop=stop)
        status = read_status(root)
        if once or status is None or status.ended not in ("", UP_TO_DATE, "no progress"):
            return status
        if not _idle(root, _had(root), stop):
            status.ended = STOPPED
            return status


def due_steps(root: Path, plan: Plan, status: Status) -> dict[str, tuple[int, ...]]:
    """Steps that are still to come to each level, by what the agent has said: url -> steps."""
    here = DirectoryFar(root, files=Files()).steps()
    last = writer_of(root) is None
    known = {level.url: level for level in status.levels}
    found = {}
    for level in plan.levels:
        seen = known.get(level.url) or LevelStatus(level.url)
        apart = plan.apart if level.parity else ()
        ours, there = but_for(here, apart), but_for(seen.steps, apart)
        steps = wanted(ours, level, there=there, last=last)
        found[level.url] = tuple(step for step in steps if seen.skipped.get(step) != ours[step])
    return found


@contextmanager
def _unwatched() -> Iterator[None]:
    yield


@contextmanager
def _watched(root: Path) -> Iterator[None]:
    """Tells the agent, which is this process, to end once there is nothing more to wait for."""
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(root, over), name="ckpt-once", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _watch(root: Path, over: threading.Event) -> None:
    while not over.wait(_LOOK_S):
        plan, status = read_plan(root), read_status(root)
        is_ours = status is not None and status.pid == os.getpid() and not status.ended
        if plan is None or status is None or not is_ours or status.token != plan.token:
            continue
        if _is_over(root, plan, status):
            os.kill(os.getpid(), signal.SIGTERM)
            return


def _is_over(root: Path, plan: Plan, status: Status) -> bool:
    now = time.time()
    troubled = [level for level in status.levels if level.problem]
    if any(level.hopeless or now - level.since_s > _PATIENCE_S for level in troubled):
        return True
    if troubled or writer_of(root) is None:
        return False  # an agent ends by itself when nobody trains, once it has taken the newest step, too
    return not any(due_steps(root, plan, status).values())


def _had(root: Path) -> tuple[object, ...]:
    return committed_steps(root), pinned_steps(root), unpinned_marks(root)


def _idle(root: Path, had: tuple[object, ...], stop: threading.Event) -> bool:
    """Wait for something to do, as the one agent of the root; False when told to end."""
    lock = RootLock(root / LEVELS)
    try:
        while not stop.wait(_IDLE_S):
            if _has(lock) and (writer_of(root) is not None or _had(root) != had):
                return True
    finally:
        lock.release()
    return False


def _has(lock: RootLock) -> bool:
    """Whether the lock is ours; else the job has started an agent of its own, which goes by the same plan."""
    with suppress(CkptError):
        lock.acquire()
        return True
    return False
