"""What a process that trains has of its levels: a thread that reads a small file, and an agent beside it.

    start -> open -> follow(save) -> reached(level) | wait(level) -> close        or give_up

The thread alone starts the agent, writes the plan and settles futures, so that no interrupt of the training
thread leaves one of these half done. It opens no connection; `joining` has that done by another process.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ckpt_core._version import __version__
from ckpt_core.coordination import Aside, Coordination
from ckpt_core.errors import CommitError, ConfigError, PersistError
from ckpt_core.levels.errands import Errands
from ckpt_core.levels.far.door import Copy
from ckpt_core.levels.mailbox import (
    AGENT_LOG,
    LEVELS,
    STATUS,
    LevelStatus,
    Plan,
    Status,
    read_status,
    write_plan,
)
from ckpt_core.levels.parity.holds import held_steps
from ckpt_core.levels.trainer.awaiting import Attempts, Due, awaited
from ckpt_core.levels.trainer.following import Following
from ckpt_core.levels.trainer.joining import Claim, check, claim_together, of_nodes, write_run
from ckpt_core.levels.trainer.peering import Peers, number_of
from ckpt_core.levels.trainer.places import check_places, same_disk
from ckpt_core.levels.trainer.rhythm import Rhythm
from ckpt_core.levels.trainer.spawning import Agent
from ckpt_core.levels.trainer.tending import Tender
from ckpt_core.observe import EventLog
from ckpt_core.options import Level
from ckpt_core.save import Followed, LevelGauge, NoLevels, Reaching
from ckpt_core.store import committed_steps
from ckpt_core.system.files import Files

_log = logging.getLogger("ckpt_core")

_LOOK_AGAIN_S = 0.05

_SILENT_S = 60.0
"""An agent says something every ten seconds, and oftener when there is something to say."""

_CLOSED = (
    "was not there yet when the Checkpointer was closed; the agent goes on, see `ckpt-core ls`"
)
_FENCED = "is taken there no more by this process: another Checkpointer goes on with this run"


class Levels(NoLevels):
    """The further levels of one Checkpointer, as one rank has them.

    Attributes:
        errands: the process that has claimed the levels; a restore that follows has its errands done by it.
    """

    def __init__(
        self,
        root: Path,
        levels: Sequence[Level],
        coordination: Coordination,
        *,
        files: Files,
        events: EventLog,
        timeout_s: float,
    ) -> None:
        """Starts nothing.

        Raises:
            ConfigError: the places do not fit together, or a client is missing.
        """
        self.stays = False
        self.errands = Errands()
        self._levels = tuple(levels)
        self._root, self._files = root, files
        self._plain = tuple([level for level in levels if not level.of_nodes])
        check_places(root, self._plain)
        self._peers = Peers.among(levels, root, coordination, files=files, timeout_s=timeout_s)
        self._coordination, self._timeout_s = coordination, timeout_s
        self._pid = os.getpid()
        self._claim: Claim | None = None
        self._following = Following(self._levels, events)
        self._rhythm = Rhythm(self._levels, root)
        self._attempts = Attempts(root)
        self._due = Due(root, files=files, saved=self._following.last_saved)
        self._agent = Agent(root)
        self._works = self._closed_plan = False
        self._last: tuple[str, ...] = ()
        self._restored: Copy | None = None
        self._saves = False
        self._problem = ""
        self._heard_s = time.monotonic()
        self._is_silent = False
        self._sign: object = None
        self._tender = Tender(root, look=self._look, finish=self._finish)
        self.workers = (self._tender.worker,)

    # -- training thread: the beginning and the end ------------------------------------------------

    def start(self) -> None:
        """See `NoLevels.start`."""
        self._tender.start()

    def open(self) -> None:
        """Claim the levels on all ranks, and have an agent at work for each root.

        Raises:
            ConfigError, RootBusy, RestoreError, PersistError: a level cannot be used; says which, and why.
            CommitError, CoordinationTimeout: another rank's error.
        """
        self._following.begin(committed_steps(self._root))
        known = None if self._peers is None else self._peers.know()
        among, timeout_s = self._coordination, self._timeout_s
        claim = claim_together(
            self._root, self._plain, among, errands=self.errands, timeout_s=timeout_s, known=known
        )
        of_nodes(lambda: self._settle(claim), among, "agents", timeout_s=timeout_s)
        if self._peers is not None:
            claim = self._meet(self._peers, claim)
        self._heard_s = time.monotonic()
        self._claim = claim  # last: from here on statuses count

    def _meet(self, peers: Peers, claim: Claim) -> Claim:
        """Find out where the copies of this node go, and have its agent take them there."""
        there = peers.meet(claim)
        if there.parity is None:
            claim = dataclasses.replace(claim, own=(*claim.own, there.url))
        self._levels = tuple([there if one.of_nodes else one for one in self._levels])
        self._following.lead_to(self._levels)

        def settle() -> None:
            if there.parity is None:
                check(self._root, [there], self.errands)
            self._tender.do(lambda: self._write_plan(claim, closed=False))

        of_nodes(settle, self._coordination, "agents", timeout_s=self._timeout_s)
        return claim

    def _settle(self, claim: Claim) -> None:
        for text in same_disk(self._root, self._plain):
            _log.warning("%s", text)
        if self._coordination.info.rank != 0:
            check(self._root, self._plain, self.errands)
        write_run(self._root, claim.run, files=self._files)
        self._tender.do(lambda: self._begin(claim))

    @property
    def sources(self) -> list[str]:
        """Where steps may be brought from, the nearest first."""
        urls = [level.url for level in self._levels]
        return urls if self._peers is None else self._peers.and_others(urls)

    def close(self) -> None:
        """See `NoLevels.close`. It can be called again where it was interrupted."""
        self._closed_plan = self._works and self._claim is not None
        if not self._end():
            _log.warning("the thread ckpt-levels hangs on storage, and is left behind")

    def give_up(self) -> None:
        """See `NoLevels.give_up`."""
        self._end()

    def _end(self) -> bool:
        ended = self._tender.end()
        # Order matters: until then the thread looks after it.
        self.errands.close()
        return ended

    # -- training thread: saves --------------------------------------------------------------------

    def follow(self, save: Followed) -> Reaching:
        """See `NoLevels.follow`."""
        self._following.note(save)
        if save.destination is None:
            self._rhythm.follow(save)
            self._saves = True
            save.committed.add_done_callback(self._has_ended)
        # The agent may have it at a level before the name is synced here, and says so once.
        save.committed.add_done_callback(self._tender.ring)

        def reached(level: int | str) -> Future[None]:
            number = number_of(level, self._levels, self._peers)
            if os.getpid() != self._pid:
                raise ConfigError(
                    f"step {save.step} was saved by process {self._pid}, and this is a fork of it: ask there"
                )
            future = self._following.ask(save, number)
            self._tender.ring()
            return future

        return reached

    def wait(self, level: int | str, *, deadline: float, last: bool = False) -> None:
        """Block until all that is committed and due at a level has come there, directories of files too.

        Args:
            last: and what was saved last, whatever `every` says: the agent of this root is told.

        Raises:
            ConfigError: there is no such level.
            CommitError: it does not come there; says why.
            Away: the root cannot be read.
            PersistError: the agent cannot be told.
        """
        number = number_of(level, self._levels, self._peers)
        # Of nodes that keep one another's steps a new one has nothing yet, whatever `every` says.
        place, nodes = self._levels[number], self._is_of_nodes(number)
        lasts = self._take_last(nodes) if last else ()
        needed = self._restored if nodes else None
        while left := self._due.left(
            place, self._seen(number), apart=self._apart(), last=lasts, needed=needed, nodes=nodes
        ):
            status = self._following.seen[number]
            problem = (self._problem or ("" if status is None else status.problem)).rstrip(".")
            hopeless = status is not None and status.hopeless
            if hopeless or self._problem == _FENCED or time.monotonic() >= deadline:
                raise CommitError(
                    f"{place.url} has not got {', '.join(left)}"
                    f"{': ' + problem if problem else ' within `timeout`'}. All of it is safe where it is, "
                    f"and is taken there once that is possible"
                )
            time.sleep(_LOOK_AGAIN_S)

    def _is_of_nodes(self, number: int) -> bool:
        return self._peers is not None and self._levels[number].url == self._peers.url

    def _seen(self, number: int) -> LevelStatus | None:
        """What is known of a level; None: nothing, or nothing since training went on from another step."""
        seen, claim, peers = self._following.seen[number], self._claim, self._peers
        if seen is None or claim is None or peers is None or not self._is_of_nodes(number):
            return seen
        return seen if (seen.token, seen.restored) == (claim.token, peers.restored) else None

    def _take_last(self, nodes: bool) -> tuple[Copy, ...]:
        claim, lasts = self._claim, self._due.newest(apart=self._apart(), nodes=nodes)
        self._last = tuple([one.attempt for one in lasts])
        if self._works and claim is not None:
            self._tender.do(lambda: self._write_plan(claim, closed=False))
        return lasts

    # -- any thread --------------------------------------------------------------------------------

    def awaited(self, committed: Sequence[int]) -> Collection[int]:
        """See `NoLevels.awaited`. Called by one thread at a time."""
        seen = self._following.seen
        there = {step for one in seen if one is not None for step in one.steps}
        # No manifest is read of a step that is nowhere else.
        apart = self._apart()
        known = self._attempts.of([step for step in committed if apart or step in there])
        kept = () if self._peers is None else self._peers.keeps(committed)
        here = {step: known.get(step, "") for step in committed}
        return awaited(here, self._levels, seen, apart=apart).union(kept)

    def aside(self, step: int, attempt: str) -> Aside | None:
        """See `NoLevels.aside`."""
        return None if self._peers is None else self._peers.vote(step, attempt)

    def restored(self, step: int) -> None:
        """See `NoLevels.restored`."""
        claim, peers = self._claim, self._peers
        attempt = self._attempts.of([step])[step]
        if peers is None or not attempt:
            return
        save = Copy(step, attempt)
        # Once steps are voted on, one of those is what comes first.
        self._restored = None if self._saves else save
        if peers.go_on_from(save, self._attempts) and claim and self._works:
            self._tender.do(lambda: self._write_plan(claim, closed=False))

    def _has_ended(self, committed: Future[Any]) -> None:
        if not committed.cancelled() and committed.exception() is None:
            self._restored = None

    def _apart(self) -> frozenset[str]:
        return frozenset() if self._peers is None else self._peers.apart

    def held(self) -> Collection[int]:
        """See `NoLevels.held`."""
        return held_steps(self._root) if self._peers is not None and self._peers.parity else ()

    def gauges(self) -> tuple[LevelGauge, ...]:
        """See `NoLevels.gauges`."""
        newest = max(committed_steps(self._root), default=None)
        return self._following.gauges(newest, problem=self._problem)

    # -- the thread --------------------------------------------------------------------------------

    def _begin(self, claim: Claim) -> None:
        self._write_plan(claim, closed=False)
        self._works = True
        self._agent.start()

    def _write_plan(self, claim: Claim, *, closed: bool) -> None:
        plan = Plan(
            claim.run,
            claim.session,
            claim.token,
            self._levels,
            closed=closed,
            own=claim.own,
            sweeps=self._coordination.info.rank == 0,
            release=__version__,
            last=self._last,
        )
        if self._peers is not None:
            plan = self._peers.planned(plan)
        try:
            write_plan(self._root, plan, others=claim.others)
        except OSError as exc:
            raise PersistError(
                f"the plan for the agent of {self._root} could not be written: {exc.strerror}. Committed "
                f"steps are safe",
                path=self._root,
            ) from exc

    def _look(self) -> None:
        self.errands.look()
        claim = self._claim
        if claim is None:
            return
        status = self._news(claim)
        if status is not None:
            self._heard_s = time.monotonic()
            self._following.take(status)
        if status is not None and status.ended.startswith("fenced"):
            self._fence()
        elif self._works and self._problem != _FENCED:
            self._problem = self._agent.look() or self._silence()
        self._rhythm.look(self._following.seen if self._works else ())
        self._following.settle()

    def _silence(self) -> str:
        """What is to be said of an agent that is there, and says nothing."""
        silent_s = time.monotonic() - self._heard_s
        if silent_s < _SILENT_S:
            self._is_silent = False
            return ""
        if not self._is_silent:
            self._is_silent = True
            log = self._root / LEVELS / AGENT_LOG
            text = "the agent of %s has said nothing for %.0f s: nothing may be taken on; see %s"
            _log.warning(text, self._root, silent_s, log)
        return f"its agent has said nothing for {silent_s:.0f} s"

    def _news(self, claim: Claim) -> Status | None:
        """The status, if it is a new one of the agent that goes by our plan."""
        try:
            found = os.stat(self._root / LEVELS / STATUS)
        except OSError:
            return None
        sign = (found.st_ino, found.st_mtime_ns, found.st_size)
        if sign == self._sign:
            return None
        status = read_status(self._root)
        if status is None or status.token != claim.token:
            return None
        self._sign = sign
        return status

    def _fence(self) -> None:
        if self._problem != _FENCED:
            self._problem = _FENCED
            _log.warning(
                "the levels of %s: another Checkpointer goes on with this run, so that nothing of this one "
                "is taken there any more; training and its root go on",
                self._root,
            )
            self._following.end(_FENCED)

    def _finish(self) -> None:
        try:
            self._look_last()
        finally:
            self._following.end(_CLOSED)

    def _look_last(self) -> None:
        claim = self._claim
        if not self.stays:
            self._agent.kill()
            return
        if self._closed_plan and claim is not None:
            try:
                # Before the root is unlocked: whoever locks it next writes a plan of its own.
                self._write_plan(claim, closed=True)
            except PersistError as exc:
                _log.warning("%s. The agent ends all the same", exc)
        self._look()
