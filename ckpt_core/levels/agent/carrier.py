"""`Carrier`: takes steps to one level, on a thread of its own, so that a slow level holds up no other one."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

from ckpt_core.errors import CkptError, CorruptCheckpoint, RestoreError, UnknownFormat
from ckpt_core.levels.agent.board import Board, Timing
from ckpt_core.levels.agent.claims import Fenced, check_fence, renew, take
from ckpt_core.levels.agent.copying import How, Sent, complete, is_still_there, send
from ckpt_core.levels.agent.named_carrying import NamedCarrier
from ckpt_core.levels.agent.noting import Notes
from ckpt_core.levels.agent.pace import Pace, Stopped
from ckpt_core.levels.agent.pinning import Pins
from ckpt_core.levels.agent.retiring import agreement, awaited, doomed, left_behind, with_sought
from ckpt_core.levels.agent.sent_before import SentBefore
from ckpt_core.levels.agent.source import OpenSave, Sources, with_nearest
from ckpt_core.levels.agent.trouble import Trouble
from ckpt_core.levels.agreed import Agreed, Save
from ckpt_core.levels.far.door import Away, Copy, Far
from ckpt_core.levels.far.opening import open_far
from ckpt_core.levels.mailbox import read_mounts
from ckpt_core.levels.wants import coming, meets, newest_of, wanted
from ckpt_core.options import Level, scheme_of
from ckpt_core.store import pinned_steps, step_path
from ckpt_core.system.files import Files
from ckpt_core.types import step_dir_name

logger = logging.getLogger(__name__)


class Carrier:
    """One level of a plan.

    Attributes:
        done_in: the epoch of the board in which it last found that nothing is left to do.
        fenced_s: since when a later session has the level, on the monotonic clock; 0: none has.
    """

    def __init__(self, root: Path, url: str, board: Board, *, files: Files, timing: Timing) -> None:
        self.url = url
        self.done_in = -1
        self.fenced_s = 0.0
        self._root, self._board, self._files, self._timing = root, board, files, timing
        self._stop, self._woken = threading.Event(), threading.Event()
        self._far: Far | None = None
        self._there: dict[int, str] = {}
        self._looked_s = self._swept_s = self._joined_s = float("-inf")
        self._pace = Pace(None, stop=self._stop)
        self._sources = Sources(files=files)
        self._named = NamedCarrier(url, board, files=files, timing=timing)
        self._pins = Pins(root, url, board, files=files)
        self._notes = Notes(url, board)
        self._waiting: dict[int, str] = {}
        self._begun: Copy | None = None
        self._damaged: set[tuple[int, str]] = set()
        self._taken_up = False
        self._taken, self._token = -1, ""
        self._refused: set[Save] = set()
        self._restored: Save | None = None
        self._before = SentBefore()
        self._trouble = Trouble(url, board, timing)
        self._threads = [
            threading.Thread(target=target, daemon=True, name=f"ckpt-level-{target.__name__}")
            for target in (self._carry, self._beat)
        ]

    # -- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def go_by(self, level: Level) -> None:
        """Take from a new plan what counts for a copy under way, too, and have it look at once."""
        self._pace.bytes_per_s = level.bytes_per_s
        self.wake()

    def stop(self) -> None:
        """Have it end before the next block, and before anything is published."""
        self._stop.set()
        self.wake()

    def wake(self) -> None:
        """Have it look at once."""
        self._woken.set()

    def join(self, *, deadline: float) -> bool:
        """Wait for its end until then; whether it came."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _carry(self) -> None:
        while not self._stop.is_set():
            epoch, token = self._board.epoch, self._board.plan.token
            rest_s = pause_s = 0.0
            # Order matters: what comes during the turn is looked at in the next one.
            self._woken.clear()
            try:
                moved = self._turn()
                rest_s = 0.0 if moved else self._rest_s()
                if not moved and not self._waiting and not self._board.alive:
                    self.done_in = epoch
                self.fenced_s = 0.0
                self._trouble.end()
            except Stopped:
                break
            except Fenced as exc:
                self._trouble.tell(str(exc), token, hopeless=True)
                self.fenced_s, pause_s = self.fenced_s or time.monotonic(), self._timing.poll_s
            except Exception as exc:
                if not isinstance(exc, CkptError):
                    logger.exception("%s: unexpected", self.url)
                # What was seen there may have changed meanwhile.
                self._looked_s = float("-inf")
                pause_s = self._trouble.failed(exc, token)
            self._trouble.pause(pause_s, token, woken=self._woken, stop=self._stop)
            self._woken.wait(rest_s)

    def _rest_s(self) -> float:
        """How long to wait, unless woken, where there was nothing to do."""
        return self._timing.poll_s

    def _beat(self) -> None:
        """Renew the lease while somebody trains; give it back at the end, if nobody does then."""
        begun = False
        while not self._stop.is_set():
            if self._far is not None and self._board.plan.sweeps and self._board.alive:
                begun = renew(self._far, self._board.plan) or begun
            self._stop.wait(self._timing.beat_s if begun else self._timing.poll_s)
        if self._far is not None and begun and not self._board.alive:
            renew(self._far, self._board.plan, closed=True)
        self._threads[0].join(self._timing.end_s)
        if self._far is not None and not self._threads[0].is_alive():
            self._far.close()

    # -- one turn ----------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Do what comes first; whether there may be more to do."""
        level, plan = self._level(), self._board.plan
        if self._token != plan.token:
            # What was told of damaged steps has been forgotten, and they may have been replaced since.
            self._token, self._looked_s = plan.token, float("-inf")
            self._damaged.clear()
            self._refused.clear()
        far = self._opened()
        found = self._here()
        lesser = self._sources.lesser(self._there, far)
        self._damaged &= found.items()
        # What was retired there does not come back: its mark refuses it.
        out = self._damaged | {one for one in self._refused if one[0] not in self._there}
        out |= lesser.items()
        here = {step: found[step] for step in found if (step, found[step]) not in out}
        # Order matters: what is retired from here on is chosen by this, and whoever reads that relies on it.
        agreed = agreement(self._root, plan, self.url)
        self._board.goes_by(self.url, plan, agreed.order, never=out)
        self._board.seen(self.url, self._there, leaves=lesser)
        self._restored = None if agreed.begun else agreed.sought
        going = {*left_behind(self._there, found, agreed)} - pinned_steps(self._root)
        if going and (going := going - far.pins()):
            return self._retire(far, going)
        if agreed.sought in out:
            self._notes.give_up(*agreed.sought)  # so that another one is sought
        self._note(here | lesser, level, agreed.sought, lesser.items())
        last = self._board.is_last(newest_of(here))
        want = wanted(here, level, there=self._there, last=last)
        want = with_sought(want, agreed.sought, here=here, there=self._there)
        copies = [Copy(step, here[step]) for step in want]
        ahead = coming(here, level, there=self._there, want=want)
        try:
            # Order matters: where it is slower than the saves, or full, something is always to be sent.
            if self._make_room(far, level, agreed, ahead):
                return True
        except Away:
            with suppress(Away):  # what lets nothing go may take steps all the same
                self._forward(far, level, copies)
            raise
        moved = self._forward(far, level, copies)
        if not moved and not copies:
            self._clear_up(far, here)
        return moved

    def _opened(self) -> Far:
        """The level, and what is there known."""
        if self._far is None:
            mounted = read_mounts(self._root).get(self.url, "")
            self._far = open_far(self.url, files=self._files, mounted=mounted)
        self._look(self._far)
        if not self._taken_up:
            # The lock of `.levels` is held: whoever had begun to send a file of this root is dead.
            self._far.take_up(self._holds)
            self._taken_up = True
        return self._far

    def _holds(self, file: str) -> bool:
        target, _, rest = file.partition("/")
        return (self._root / target / rest.partition("/")[2]).is_file()

    def _is_own(self) -> bool:
        return self.url in self._board.plan.own

    def _level(self) -> Level:
        level = next((one for one in self._board.plan.levels if one.url == self.url), None)
        if level is None:
            raise Stopped("the plan has no such level any more")
        return level

    def _look(self, far: Far, *, now: bool = False) -> None:
        age_s = time.monotonic() - self._looked_s
        is_cheap = self._waiting or scheme_of(self.url) is None
        if now or age_s >= (self._timing.others_s if is_cheap else self._timing.look_s):
            self._claim(far)
            self._there = dict(far.steps())
            self._pins.look(far)
            self._looked_s = time.monotonic()
            self._board.seen(self.url, self._there)

    def _claim(self, far: Far) -> None:
        plan = self._board.plan
        if self._is_own() and scheme_of(self.url) is not None and self._taken != plan.session:
            take(far, plan, self._root)
            self._taken = plan.session
        else:
            check_fence(far, plan, self._root)

    def _folders(self) -> list[Path]:
        """Where steps come from: the directories before this level, the nearest first."""
        levels = self._board.plan.levels
        before = itertools.takewhile(lambda level: level.url != self.url, levels)
        return [self._root, *(Path(level.url) for level in before if level.scheme is None)]

    def _here(self) -> dict[int, str]:
        return self._sources.steps(self._folders())

    def _note(
        self, here: dict[int, str], level: Level, sought: Save | None, lesser: Collection[Save] = ()
    ) -> None:
        fitting = {step: here[step] for step in here if meets(step, level)}
        self._notes.look(fitting, self._there, sought, lesser)

    # -- sending -----------------------------------------------------------------------------------

    def _forward(self, far: Far, level: Level, copies: list[Copy]) -> bool:
        """Pin and send what comes first; whether there may be more to do."""
        self._pins.pin(far, self._there)
        moved = False
        unsent = [one for one in copies if self._waiting.get(one.step) != one.attempt]
        if unsent:
            moved = self._send(far, unsent[0])
        elif copies:
            moved = self._join_parts(far, copies)
        else:
            self._waiting.clear()
        # Also behind a step: where something always waits to be sent they would never have their turn.
        return self._named.turn(far, level, self._folders(), self._how) or moved

    def _send(self, far: Far, copy: Copy) -> bool:
        if self._begun not in (None, copy):
            far.drop(self._begun)
        self._begun = copy
        try:
            with_nearest(
                self._folders(),
                copy,
                lambda save: self._ended(copy, self._carried(far, save)),
                files=self._files,
            )
        except (CorruptCheckpoint, UnknownFormat) as damage:
            self._found_damaged(copy, damage)
        return True

    def _carried(self, far: Far, save: OpenSave) -> Sent:
        copy = save.copy
        with self._board.change(self.url) as status:
            status.begins(copy.step, save.nbytes)
            if status.skipped.get(copy.step) == copy.attempt:
                del status.skipped[copy.step]
        begun = time.monotonic()
        try:
            return send(save, far, self._how(far, copy))
        finally:
            with self._board.change(self.url) as status:
                status.busy_s += time.monotonic() - begun

    def _how(self, far: Far, copy: Copy) -> How:
        def may_publish() -> None:
            self._pace.let_through(0)  # told to end: nothing is published any more
            check_fence(far, self._board.plan, self._root)
            if copy.directory is None:
                self._pins.before(far, copy.step)

        def progress(done: int) -> None:
            with self._board.change(self.url) as status:
                status.sent_bytes = done
            self._board.moved()

        there, sent = self._there.get(copy.step), partial(self._board.has_sent, self.url)
        if there is None and self._is_own() and (copy.step, copy.attempt) == self._restored:
            # All have gone on from it: it comes back here, also where it was retired.
            there = copy.attempt
        return How(
            self._pace, there, may_publish, progress, sent, before=self._before, own=self._is_own()
        )

    def _ended(self, copy: Copy, sent: Sent) -> None:
        self._waiting.pop(copy.step, None)
        self._begun = None
        if sent is Sent.REACHED:
            self._there[copy.step] = copy.attempt
            self._board.seen(self.url, self._there)
            logger.info("%s: step %d is there", self.url, copy.step)
        elif sent is Sent.WAITS:
            self._waiting[copy.step] = copy.attempt
        else:
            self._looked_s = float("-inf")
            if sent is Sent.RETIRED:
                self._notes.give_up(copy.step, copy.attempt)
            if sent is Sent.RETIRED or self._is_own():
                self._refused.add((copy.step, copy.attempt))
        self._board.moved()
        with self._board.change(self.url) as status:
            status.rests()
            if sent is Sent.REACHED:
                status.has_reached(copy.step, copy.attempt)
                is_behind = all(step < copy.step for step, _ in self._damaged)
                if is_behind and not self._trouble.is_there:
                    status.problem, status.since_s = "", 0.0

    def _found_damaged(self, copy: Copy, damage: CkptError) -> None:
        self._damaged.add((copy.step, copy.attempt))
        text = f"step {copy.step} is damaged and was not sent to {self.url}: {damage}"
        logger.error("%s", text)
        with self._board.change(self.url) as status:
            status.has_skipped(copy.step, copy.attempt)
            status.sending = None
            status.problem, status.since_s = text, time.time()

    def _join_parts(self, far: Far, copies: list[Copy]) -> bool:
        """Publish what waits for other nodes, if their parts came; whether one of ours is sent anew."""
        if time.monotonic() - self._joined_s < self._timing.others_s:
            return False
        self._joined_s, again = time.monotonic(), False
        for copy in copies:
            if self._there.get(copy.step) == copy.attempt:
                continue
            for folder in self._folders():
                with (
                    suppress(RestoreError),  # it has gone: others publish it
                    OpenSave(step_path(folder, copy.step), files=self._files) as save,
                ):
                    if save.copy == copy:
                        sent = complete(save, far, self._how(far, copy))
                        if sent is not Sent.WAITS:
                            self._ended(copy, sent)
                        elif not is_still_there(save, far):
                            del self._waiting[copy.step]
                            again = True
                        break
        return again

    # -- the rest ----------------------------------------------------------------------------------

    def _make_room(self, far: Far, level: Level, agreed: Agreed, ahead: frozenset[Save]) -> bool:
        """Retention; whether anything went."""
        self._pins.unpin(far, ahead)
        if not self._retires() or not agreed.begun:
            return False
        behind = self._board.behind(self.url)
        kept = {*awaited(self._there, behind, last=not self._board.alive)}
        kept |= pinned_steps(self._root) | agreed.keeps
        if not doomed(self._there, level, kept=kept):
            return False
        return self._retire(far, doomed(self._there, level, kept=kept | far.pins()))

    def _retires(self) -> bool:
        return self._board.plan.sweeps or self._is_own()

    def _clear_up(self, far: Far, here: dict[int, str]) -> None:
        """What has been left: by this root, and now and then by others."""
        far.give_up()
        if self._retires() and time.monotonic() - self._swept_s >= self._timing.sweep_s:
            far.sweep([Copy(step, attempt) for step, attempt in here.items()])
            self._swept_s = time.monotonic()

    def _retire(self, far: Far, going: Collection[int]) -> bool:
        if going:
            check_fence(far, self._board.plan, self._root)
            far.retire([step_dir_name(step) for step in going])
            self._look(far, now=True)
        return bool(going) and not set(going) & set(self._there)
