"""Whose a level is now, as its words say: the session of the run, and the lease of its agent."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from ckpt_core.errors import CkptError
from ckpt_core.layout import RUN_NAME
from ckpt_core.levels.claiming import LEASE, claim_word, parsed, pids_here
from ckpt_core.levels.far.door import Away, Conflict, Far, Word
from ckpt_core.levels.mailbox import Plan, noted_claims


class Fenced(CkptError):
    """A later session of the run has the level. Never leaves the agent."""


def check_fence(far: Far, plan: Plan, root: Path) -> None:
    """Be sure that no later session has the level. Called before anything is published or retired.

    A claim of this very root is none: its start is on the way to its plan, or was cut off before it, and
    nobody else takes what is here to the level.
    One that was claimed, and is filled anew since, is claimed anew by the agent that has the lease there.

    Raises:
        Fenced: one has.
        Away: it cannot be told, or the level is another run's, or a first root now.
    """
    word = far.read_word(RUN_NAME)
    _check(far, word, plan, root)
    if word is None and plan.sweeps:
        _write(far, None, plan)


def _check(far: Far, word: Word | None, plan: Plan, root: Path) -> None:
    there = parsed(word)
    if not there:
        return
    if there.get("run") != plan.run:
        text = f"{far.url} belongs to another run ({there.get('run')}): name another place for this one"
        raise Away(text, hopeless=True)
    if there.get("session", 0) > plan.session:
        if there.get("first_root"):
            text = (
                f"{far.url} is a first root now: process {there.get('pid')} on {there.get('host')} saves to "
                "it. Nothing is sent or retired there any more; to have it as a level again, end that job "
                "and start this run anew"
            )
            # Not for the other levels: these are still of this session.
            raise Away(text, hopeless=True)
        if there.get("token") in noted_claims(root):
            return
        raise Fenced(
            f"{far.url} is at session {there['session']}, by {there.get('host')}, and this agent at "
            f"{plan.session}: it publishes and retires nothing any more"
        )


def take(far: Far, plan: Plan, root: Path) -> None:
    """Claim a level that no other root of the job has, for the run and the session of this one.

    Raises:
        Fenced, Away: as `check_fence`; another one takes it this moment.
    """
    # Order matters: what is replaced is what was looked at, so that a later session keeps its claim.
    word = far.read_word(RUN_NAME)
    _check(far, word, plan, root)
    if parsed(word).get("session", -1) < plan.session:
        _write(far, word, plan)


def _write(far: Far, word: Word | None, plan: Plan) -> None:
    mine = claim_word(plan.run, plan.session, host=socket.gethostname(), pid=os.getpid())
    try:
        far.write_word(RUN_NAME, mine, over=None if word is None else word.tag)
    except Conflict as exc:
        raise Away(str(exc)) from None


def beat(far: Far, plan: Plan, *, closed: bool = False) -> None:
    """Renew the lease, unless a later session has it.

    Raises:
        Away: it could not be renewed.
    """
    word = far.read_word(LEASE)
    there = parsed(word)
    if there.get("run", plan.run) != plan.run or there.get("session", 0) > plan.session:
        return
    lease = {
        "run": plan.run,
        "session": plan.session,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pids": pids_here(),
        "beat": time.time(),
        "closed": closed,
    }
    with suppress(Conflict):  # somebody has taken it this moment
        far.write_word(LEASE, json.dumps(lease).encode(), over=None if word is None else word.tag)


def renew(far: Far, plan: Plan, *, closed: bool = False) -> bool:
    """As `beat`; whether it could be done: that a level is away is told by who sends to it."""
    try:
        beat(far, plan, closed=closed)
    except CkptError:
        return False
    return True
