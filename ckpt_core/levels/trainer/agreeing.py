"""`Agreeing`: one node's part in the agreed step, told and heard with the votes for each commit."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_core.coordination import Json
from ckpt_core.errors import CkptError
from ckpt_core.levels.agreed import (
    HELD,
    Agreed,
    Said,
    Save,
    Standing,
    concluded,
    late,
    write_agreed,
)
from ckpt_core.levels.mailbox import read_status
from ckpt_core.levels.trainer.awaiting import Attempts
from ckpt_core.options import PARITY, scheme_of
from ckpt_core.store import committed_steps
from ckpt_core.system.files import Files
from ckpt_core.system.threads import own_lock

_log = logging.getLogger("ckpt_core")

_LACKS = 8
"""A step that is sought may be missing in a root for so many votes: it is on its way to being committed."""

_LAGS = 50
"""After so many votes in which copies lack the step that is sought it is said."""


class Agreeing:
    """What the leader of a root knows of the agreed step. Thread-safe.

    Args:
        root: of this node.
        agreed: what all nodes begin with; it is in the file.
        copy: the URL of this node's, or of its parity.
    """

    def __init__(
        self,
        root: Path,
        agreed: Agreed,
        copy: str,
        *,
        files: Files,
    ) -> None:
        self._root, self._copy, self._files = root, copy, files
        self._lock = own_lock()
        self._heard = self._latest = agreed
        self._attempts = Attempts(root)
        self._lacked = self._lagged = 0
        self._failed = False
        self._restored: Save | None = None

    def goes_on_from(self, save: Save) -> None:
        """All ranks have restored it: none is newer, of those that all roots have, and it stays in them."""
        self._restored = save

    def keeps(self, committed: Sequence[int]) -> Collection[int]:
        """Those committed steps that are not given away. Never raises, never waits for storage."""
        agreed = self._heard
        return [step for step in committed if step in agreed.keeps or not agreed.begun]

    def say(self) -> Said:
        """How this node stands."""
        with self._lock:
            agreed = self._heard
            try:
                here = committed_steps(self._root)
                standing = self._standing(agreed, here) if agreed.begun else Standing.COMING
            except (CkptError, OSError):
                return Said(agreed.order, Standing.UNKNOWN)
            held = {} if agreed.begun else self._attempts.of(here[-HELD:])
            if self._restored is not None and self._restored[0] in here:
                # There may be more than so many newer ones here, which other nodes have not.
                held = dict([self._restored])
            return Said(agreed.order, standing, tuple(held.items()))

    def conclude(self, said: Sequence[Said | None], save: Save | None) -> Agreed:
        """What follows for all nodes. On rank 0 alone.

        Args:
            said: by rank; None: it does not lead.
        """
        ranks = {rank: one for rank, one in enumerate(said) if one is not None}
        with self._lock:
            before = self._latest
            # Invariant: conclusions follow one another, also where several steps are voted on at once.
            self._latest = concluded(before, list(ranks.values()), save)
            lacking = late(before, list(ranks.values())) if before.sought else []
            self._lag(before, [list(ranks)[number] for number in lacking])
            return self._latest

    def hear(self, agreed: Agreed) -> None:
        """Go by it, from the moment at which it is in the file."""
        with self._lock:
            if agreed.order <= self._heard.order:
                return
            try:
                write_agreed(self._root, agreed, files=self._files)
            except OSError as exc:
                # What was kept stays kept: the conclusion is heard again with the next vote.
                if not self._failed:
                    _log.warning("the agreed step of %s is not kept: %s", self._root, exc)
                self._failed = True
                return
            self._failed, self._lacked, self._heard = False, 0, agreed
            if self._restored in agreed.kept:
                self._restored = None

    # -- inside ----------------------------------------------------------------------------------

    def _standing(self, agreed: Agreed, here: Sequence[int]) -> Standing:
        if agreed.sought is None:
            return Standing.COMING
        step, attempt = agreed.sought
        if step not in here:
            self._lacked += 1
            is_lost = self._lacked > _LACKS or bool(here and here[-1] > step)
            return Standing.LOST if is_lost else Standing.COMING
        if self._attempts.of([step])[step] != attempt:
            return Standing.LOST
        status = read_status(self._root)
        seen = (
            next((one for one in status.levels if one.url == self._copy), None) if status else None
        )
        if seen is None:
            return Standing.COMING
        if seen.skipped.get(step) == attempt and seen.steps.get(step) != attempt:
            return Standing.LOST
        # Order matters: an agent that goes by an earlier conclusion might be giving away what it names.
        is_there = seen.steps.get(step) == attempt and tuple(seen.keeps) == agreed.order
        return Standing.THERE if is_there else Standing.COMING

    def _lag(self, before: Agreed, ranks: list[int]) -> None:
        if self._latest.order != before.order or not ranks:
            self._lagged = 0
            return
        self._lagged += 1
        if self._lagged == _LAGS and before.sought is not None:
            _log.warning(
                "%s: %d steps have been saved since step %d, of which the nodes of ranks %s do not say yet "
                "that it is there: no step after %s is with all nodes for certain. See `ckpt-core ls` there",
                "parity" if scheme_of(self._copy) == PARITY else "peers",
                _LAGS,
                before.sought[0],
                ranks,
                max((step for step, _ in before.kept), default="none"),
            )


@dataclass(frozen=True, slots=True)
class Vote:
    """The aside of one vote (`ckpt_core.coordination.Aside`).

    Attributes:
        agreeing: of this node.
        save: that is voted on; None: the copies do not take it.
    """

    agreeing: Agreeing
    save: Save | None

    def say(self) -> Json:
        """See `Aside`."""
        return self.agreeing.say().to_json()

    def conclude(self, said: Sequence[Json]) -> Json:
        """See `Aside`."""
        found = [None if one is None else Said.from_json(one) for one in said]
        return self.agreeing.conclude(found, self.save).to_json()

    def hear(self, concluded: Json) -> None:
        """See `Aside`."""
        self.agreeing.hear(Agreed.from_json(concluded))
