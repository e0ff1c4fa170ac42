"""Newest valid step -> live state, the same step on every rank."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_core.coordination import Coordination, Json, NoCoordination
from ckpt_core.errors import CorruptCheckpoint, RestoreError
from ckpt_core.restore.broadcast import Broadcast, check_groups
from ckpt_core.restore.choosing import (
    SEEN_WITHIN_S,
    Listing,
    alone_beside_levels,
    common_step,
    levels_shared,
    list_alone,
    list_attempts,
    list_until,
    nodes_without,
    unseen,
    wait_for_save,
)
from ckpt_core.restore.deadline import wait_for_copies, within
from ckpt_core.restore.exchange import Exchange, Kind, Together
from ckpt_core.restore.failures import NotBrought, Retired
from ckpt_core.restore.further import FurtherLevels, NoFurtherLevels
from ckpt_core.restore.one_step import ReadStep, Search, read_step, remarks
from ckpt_core.restore.reading import ParallelReader
from ckpt_core.restore.request import RestoreRequest
from ckpt_core.restore.results import Guard, NoGuard, RestoredStep
from ckpt_core.restore.telling import telling
from ckpt_core.restore.trail import GONE, Trail, tell_touched, warn
from ckpt_core.restore.watch import undisturbed
from ckpt_core.store import step_path
from ckpt_core.system.collector import uncollected
from ckpt_core.system.devices import Devices
from ckpt_core.system.files import Files

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


logger = logging.getLogger("ckpt_core")

_BAD = (Kind.CORRUPT, Kind.REFUSED, Kind.GONE, Kind.ELSEWHERE, Kind.MISPLACED)
_BRING_S = 86_400.0
"""No bound on bringing, which ends by itself when nothing moves: only a rank that hangs is not waited for."""


class Restorer:
    """Restores steps of one root. Holds nothing open between calls."""

    def __init__(
        self,
        root: Path,
        *,
        files: Files,
        readers: int,
        timeout_s: float,
        store: Guard | None = None,
        coordination: Coordination | None = None,
        devices: Devices | None = None,
        further: FurtherLevels | None = None,
        shown: bool = False,
    ) -> None:
        """
        Args:
            root: directory of the steps.
            files: how files are read.
            readers: threads that read, each with a buffer of 1 MiB, or two of 8 MiB to fill devices from.
            timeout_s: longest time that one read may take, and that other ranks are waited for.
            store: told which steps are read and which are corrupt; None for a mere reader.
            coordination: the other ranks, which restore at the same time; None: there are none.
            devices: the door to those that the state is on.
            further: where else steps may be, for the rank that leads; None: nowhere.
            shown: the first rank shows how far it is, once a step takes more than a second.
        """
        self._root = root
        self._guard: Guard = NoGuard() if store is None else store
        self._devices = devices or Devices()
        self._how = ParallelReader(
            files=files,
            readers=readers,
            timeout_s=timeout_s,
            exclusive=store is not None,
            devices=self._devices,
        )
        self._together = Together(coordination or NoCoordination(), root=root, timeout_s=timeout_s)
        self._info = self._together.info
        self._further: FurtherLevels = further or NoFurtherLevels()
        self._shown = shown and self._info.rank == 0

    def restore(self, state: Any, request: RestoreRequest | None = None) -> RestoredStep | None:
        """Fill `state` in place from the newest valid step, or the one asked for; None when there is none.

        Called on the training thread of every rank, before training, with the same arguments; all of
        them restore the same step. A step that one of them lacks, finds corrupt or cannot read is passed
        over by all with a `RestoreWarning`, and reported as suspect unless it could merely not be read.
        Steps of further levels count as if every root had them: one that a root lacks, or finds damaged, is
        brought there before it is read.

        Args:
            request: None: the newest step, all of it.

        Raises:
            CorruptCheckpoint: `strict` or `step` forbids falling back, or no step is valid; the text
                says of each step what is wrong, and whether live tensors were changed.
            NotCommitted: `step` is not there (the text names steps that are), or there are steps and no
                one that all ranks hold (the text says which node holds which).
            StateMismatch: names, shapes or dtypes differ; found before anything is changed on this rank.
            UntrustedData, UnknownFormat: see there; likewise.
            ConfigError: `broadcast` is no group of these ranks; `part` names what is not there.
            RestoreError: no step can be read, a read hangs, or another rank failed; names it.
            CoordinationTimeout, CommitError: the other ranks cannot be asked.
        """
        return self.restore_asked(state, lambda: request or RestoreRequest())

    def restore_asked(self, state: Any, ask: Callable[[], RestoreRequest]) -> RestoredStep | None:
        """As `restore`, of what `ask` returns; what that raises the other ranks hear at once."""
        return self._together.call(lambda: self._asked(state, ask()))

    # -- inside ----------------------------------------------------------------------------------

    @uncollected
    def _asked(self, state: Any, request: RestoreRequest) -> RestoredStep | None:
        search = Search(state, request.trusted, request.part)
        try:
            return self._search(search, request)
        except Exception as exc:
            if search.touched:
                tell_touched(exc)
            raise

    def _search(self, search: Search, request: RestoreRequest) -> RestoredStep | None:
        trail = Trail(self._root, request.step, request.strict)
        while (found := self._candidate(search, trail, request.broadcast)) is not None:
            step, attempt = found
            if not self._brought(step, attempt, trail):
                continue
            hold = self._guard.protect(step)
            try:
                read = self._try(step, attempt, search, trail)
            finally:
                hold.release()
            if read is not None:
                search.touched = False  # They hold this step, whole.
                self._settle(trail.listings[self._info.rank], read[0], trail)
                return self._result(step, *read, trail)
        return None

    def _candidate(
        self, search: Search, trail: Trail, broadcast: ProcessGroup | bool
    ) -> tuple[int, str] | None:
        """The step to try next, and its attempt; None where there has never been one.

        Raises:
            CorruptCheckpoint, NotCommitted, RestoreError: none is left to try.
        """
        listings = self._list(search, trail, broadcast)
        found = common_step(listings, asked=trail.asked, tried=trail.tried)
        if found is None:
            trail.raise_if_none_left(listings, touched=search.touched)
            return None
        if trail.asked is None:
            trail.pass_over_lost(listings, found[0])
        return found

    def _list(self, search: Search, trail: Trail, broadcast: ProcessGroup | bool) -> list[Listing]:
        """What every rank sees in its root."""

        def look() -> tuple[None, Json]:
            search.broadcast = Broadcast.of(broadcast, self._info, self._devices)
            further, away = self._further.steps(), self._further.away()
            for text in () if trail.listings else away:
                warn(f"a further level cannot be asked which steps it holds: {text}")
            found = within(
                self._how.timeout_s, lambda: self._look(trail.asked, further), path=self._root
            )
            word = secrets.token_hex(4)
            return None, [replace(found, away=away).to_json(), trail.asked, trail.strict, word]

        exchange = self._together.exchange("restore.steps", look)
        self._raise_if_bad(None, exchange, *_BAD)
        rows = [answer.data for answer in exchange.answers]
        if any(asked != trail.asked for _, asked, *_ in rows):
            texts = ", ".join(sorted({str(asked or "the newest") for _, asked, *_ in rows}))
            text = f"the ranks were asked to restore different steps: {texts}. Nothing was changed"
            raise RestoreError(text, path=self._root)
        self._together.met(rows[0][-1])
        trail.strict = any(strict for _, _, strict, _ in rows)
        trail.listings = levels_shared([Listing.from_json(listing) for listing, *_ in rows])
        if wanted := unseen(trail.listings):
            trail.listings = self._look_again(trail, wanted)
        return list(trail.listings)

    def _look_again(self, trail: Trail, wanted: dict[int, dict[int, str]]) -> list[Listing]:
        """What every rank sees once those that share a root have waited for what others see there."""
        mine, timeout_s = trail.listings[self._info.rank], self._how.timeout_s

        def look() -> Listing:
            return within(timeout_s, lambda: self._look(trail.asked, mine.further), path=self._root)

        def see() -> tuple[None, Json]:
            found = list_until(look, wanted.get(mine.node, {}))
            return None, replace(found, away=mine.away).to_json()

        limit_s = timeout_s + 2 * SEEN_WITHIN_S
        exchange = self._together.exchange("restore.seen", see, timeout_s=limit_s)
        self._raise_if_bad(None, exchange, *_BAD)
        return levels_shared([Listing.from_json(answer.data) for answer in exchange.answers])

    def _look(self, asked: int | None, further: dict[int, tuple[str, ...]]) -> Listing:
        alone, how = self._info.world_size == 1, self._how
        if alone and (not further or (asked is not None and asked not in further)):
            return list_alone(self._root, asked)
        node = self._info.members[0]
        listing = list_attempts(self._root, node, files=how.files, timeout_s=how.timeout_s)
        listing = replace(listing, further=further)
        return alone_beside_levels(listing) if alone else listing

    def _brought(self, step: int, attempt: str, trail: Trail) -> bool:
        """Have a step brought to the roots that lack or damaged it; False: look at all steps again."""
        lacking = nodes_without(trail.listings, step, attempt)
        nodes = lacking | trail.damaged.pop((step, attempt), set())
        if not nodes:
            return True
        trail.tell_others(step, attempt)

        def bring() -> tuple[None, None]:
            if self._info.rank in nodes:
                self._bring(step, attempt, trail)
            return None, None

        exchange = self._together.exchange("restore.bring", bring, step=step, timeout_s=_BRING_S)
        failed = {answer.rank for answer in exchange.answers if answer.kind is not Kind.OK}
        if failed and not failed & lacking and step not in trail.partial:
            return False  # read once more, for what is wrong with it here
        if self._failed(step, exchange, trail):
            return False
        if self._info.members[0] in nodes and not self._info.leads:
            wait_for_save(step_path(self._root, step), attempt, files=self._how.files)
        return True

    def _bring(self, step: int, attempt: str, trail: Trail) -> None:
        lacks, keeps = trail.partial.get(step, ""), step in trail.misplaced
        try:
            with telling(shown=self._shown) as show:
                bring = partial(self._further.bring, whole=bool(lacks), keeps=keeps)
                bring(step, attempt, progress=partial(show, f"bringing step {step}"))
        except CorruptCheckpoint:
            raise
        except RestoreError as exc:
            raise NotBrought(f"{exc}{lacks}", step=step, path=self._root) from exc

    def _try(
        self, step: int, attempt: str, search: Search, trail: Trail
    ) -> tuple[ReadStep, Any] | None:
        """Restore a step on all ranks, or note on all of them why not."""

        def read() -> tuple[ReadStep, Json]:
            search.borrows = not trail.can_mend(step, attempt, self._info.rank)
            found = self._read(search, step, attempt)
            return found, None if found.shares is None else found.shares.to_json()

        exchange = self._together.exchange("restore.read", read, step=step)
        if self._mends(step, attempt, exchange, trail) or self._failed(step, exchange, trail):
            return None
        found = exchange.result
        assert found is not None
        check_groups([answer.data for answer in exchange.answers], path=found.path)

        def finish() -> tuple[Any, Json]:
            if search.broadcast is not None and found.shares is not None:
                filled, timeout_s = found.binding.destinations, self._how.timeout_s
                search.broadcast.run(found.shares, filled, timeout_s=timeout_s)
            search.fills(found.binding.finished)
            state = found.binding.finish()
            wait_for_copies(self._devices, found.binding, self._how.timeout_s)
            return state, None

        # Order matters: nothing of the objects that load changes before every rank has its bytes.
        done = self._together.exchange("restore.done", finish, step=step)
        if self._mends(step, attempt, done, trail) or self._failed(step, done, trail):
            return None
        return found, done.result

    def _mends(self, step: int, attempt: str, exchange: Exchange[Any], trail: Trail) -> bool:
        """Whether ranks could not use a step, and it is brought to their roots anew."""
        kinds = (Kind.CORRUPT, Kind.REFUSED, Kind.ELSEWHERE, Kind.MISPLACED)
        elsewhere = exchange.first(Kind.ELSEWHERE)
        bad = exchange.first(*kinds)
        ranks = [answer.rank for answer in exchange.answers if answer.kind in kinds]
        if bad is None or not trail.mends(step, attempt, ranks, whole=elsewhere is not None):
            return False
        if exchange.first(Kind.MISPLACED) is not None:
            trail.misplaced.add(step)
        if elsewhere is not None:
            trail.partial[step] = f"; and {elsewhere.text}"
        warn(f"step {step} is brought anew from a further level. rank {bad.rank}: {bad.text}")
        return True

    def _failed(self, step: int, exchange: Exchange[Any], trail: Trail) -> bool:
        """Whether a rank could not use a step; raises where nothing else may be tried."""
        self._raise_if_bad(step, exchange, Kind.ELSEWHERE)
        kinds = [answer.kind for answer in exchange.answers]
        bad = exchange.first(Kind.CORRUPT, Kind.REFUSED) or exchange.first(Kind.GONE)
        if bad is None:
            return False
        if any(kinds[rank] is Kind.CORRUPT for rank in self._info.members):
            self._suspect(step)
        elif Kind.CORRUPT in kinds:
            trail.suspects.add(step)
        if trail.asked is not None or (trail.strict and bad.kind is not Kind.GONE):
            self._raise_if_bad(step, exchange, *_BAD)
        if bad.kind is Kind.GONE:
            logger.info("step %d: %s; looking again", step, GONE)
            trail.gone.add(step)
            return True
        error = bad.error(step_path(self._root, step), step)
        if self._info.world_size == 1 and isinstance(exchange.error, RestoreError):
            error = exchange.error  # It need not say of which rank.
        trail.pass_over(step, error)
        return True

    def _raise_if_bad(self, step: int | None, exchange: Exchange[Any], *kinds: Kind) -> None:
        """If a rank's answer is of these kinds: raise this rank's error, or another's for it."""
        bad = exchange.first(*kinds)
        if bad is None:
            return
        exchange.raise_own()
        raise bad.error(self._root if step is None else step_path(self._root, step), step)

    def _read(self, search: Search, step: int, attempt: str) -> ReadStep:
        """Read a step; one that is replaced by a newer save of the same step is read again.

        Raises:
            NotCommitted: it was retired meanwhile, or is from another save than the one that ranks agreed on.
        """
        path, count = step_path(self._root, step), self._info.world_size
        label = f"restoring step {step}" + (f" on rank 0 of {count}" if count > 1 else "")

        def read() -> ReadStep:
            # One for each step that is tried: it is gone when a warning says why an older one is.
            with telling(shown=self._shown) as show:
                how = replace(self._how, progress=partial(show, label))
                found = read_step(path, search, self._info, how=how)
            if attempt not in ("", found.leaves.step.manifest.attempt):
                raise Retired(path)
            return found

        return undisturbed(path, read, timeout_s=self._how.timeout_s)

    def _suspect(self, step: int) -> None:
        if self._info.leads:
            self._guard.suspect(step)

    def _settle(self, listing: Listing, read: ReadStep, trail: Trail) -> None:
        """Once a step is in force: what it makes of newer ones, and what it lacks for this rank."""
        for step in sorted(trail.suspects & (listing.steps.keys() | listing.lost.keys())):
            self._suspect(step)
        for text in remarks(read, self._info):
            warn(text)

    def _result(self, step: int, read: ReadStep, state: Any, trail: Trail) -> RestoredStep:
        borrowed = read.owner.rank != self._info.rank
        return RestoredStep(
            step=step,
            path=read.path,
            state=state,
            skipped=trail.texts(),
            read_bytes=read.read_bytes,
            world_size=read.leaves.step.manifest.world_size,
            borrowed_from=read.owner.rank if borrowed else None,
            left_out=read.binding.left_out,
        )
