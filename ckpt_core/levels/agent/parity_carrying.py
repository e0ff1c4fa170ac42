"""`ParityCarrier`: keeps parity of the steps of a group of nodes, and the steps of this one for it.

look      what is here, and what the first node of the group says (the first node: what all others keep)
make      hold the step that is next in the root, read the others' blocks, publish the parity of them
tidy      once a newer step is reached, let older ones go: the parity first, then the hold on the step

See `ckpt_core.levels.parity.agreeing` for why nobody lets go too early.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ckpt_core.errors import CorruptCheckpoint, UnknownFormat
from ckpt_core.levels.agent.board import Board, Timing
from ckpt_core.levels.agent.carrier import Carrier
from ckpt_core.levels.agent.retiring import agreement, doomed, with_sought
from ckpt_core.levels.agreed import Agreed
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.levels.far.door import Away, Copy
from ckpt_core.levels.far.looking import HOPELESS
from ckpt_core.levels.mailbox import Plan
from ckpt_core.levels.parity.agreeing import FILE, Said, say
from ckpt_core.levels.parity.encoding import How, Sources, encode
from ckpt_core.levels.parity.holds import held_steps, hold, let_go
from ckpt_core.levels.parity.meeting import Met
from ckpt_core.levels.parity.objects import step_of
from ckpt_core.levels.parity.parts import read_part
from ckpt_core.levels.wants import but_for, coming, lasting, meets, newest_of, wanted
from ckpt_core.options import Level
from ckpt_core.store import pinned_steps
from ckpt_core.system.files import Files, advice

logger = logging.getLogger(__name__)

_FIRST_REST_S, _LONGER = 0.02, 1.5


class ParityCarrier(Carrier):
    """The parity of one plan, as a level: a step is there when all nodes of the group keep its parity."""

    def __init__(self, root: Path, url: str, board: Board, *, files: Files, timing: Timing) -> None:
        super().__init__(root, url, board, files=files, timing=timing)
        self._met: Met | None = None
        self._agreed = Agreed("")
        self._asked_s = float("-inf")
        self._rested: tuple[dict[int, str], float] = ({}, 0.0)

    def _rest_s(self) -> float:
        """Shortly while parity is to come, of which nobody tells; the longer it takes, the longer."""
        before, rested_s = self._rested
        first = not self._waiting or before != self._waiting
        rest_s = min(self._timing.poll_s, _FIRST_REST_S if first else rested_s * _LONGER)
        self._rested = self._waiting, rest_s
        return rest_s if self._waiting else self._timing.poll_s

    def _beat(self) -> None:
        """There is no lease: what is published here is in a directory of this node alone."""
        self._threads[0].join()
        if self._met is not None:
            self._met.close()

    # -- one turn ----------------------------------------------------------------------------------

    def _turn(self) -> bool:
        level, plan = self._level(), self._board.plan
        met = self._meet(plan)
        if met is None:
            return False
        apart = {*plan.apart}
        # Order matters: what is let go from here on is chosen by this, and whoever reads that relies on it.
        agreed = self._agreed = agreement(self._root, plan, self.url)
        self._board.goes_by(self.url, plan, agreed.order, never=self._damaged)
        here = but_for(self._here(), apart)
        there = met.own.directories()
        kept = {
            step: attempt
            for step, attempt in here.items()
            if (copy := met.group.copy(Copy(step, attempt))) == there.get(copy.target)
        }
        self._there = {step: one for step, one in self._there.items() if here.get(step) == one}
        self._pins.look(met.own)
        kept_here = {step for name in there if (step := step_of(name)) is not None}
        self._pins.pin(met.own, kept_here.union(self._there))
        moved = False
        # Where something is to come, at each turn: what is next may not stay for long before it is held.
        if self._waiting or time.monotonic() - self._asked_s >= self._timing.agrees_s:
            if met.leads:
                self._lead(met, level, here, kept)
            else:
                self._follow(met, here, kept)
            try:
                moved = self._make(met, here, kept)
            except Away:
                self._let_go(met, level, here)  # where it is full, what is older makes room
                raise
            # Not while it was busy: others wait for what has just been made.
            self._asked_s = float("-inf") if moved else time.monotonic()
            if moved:
                self._rested = {}, 0.0
        self._board.seen(self.url, self._there)
        if agreed.begun or plan.restored:
            # Before that training may go back to a step that is older than what this group has reached.
            self._note_all(here, level, apart)
        self._waiting = {step: here[step] for step in self._wanted(here, level)}
        ahead = coming(here, level, there=self._there, want=self._waiting)
        self._pins.unpin(met.own, ahead)
        self._let_go(met, level, here)
        return moved

    def _note_all(self, here: dict[int, str], level: Level, apart: set[str]) -> None:
        sought = self._agreed.sought
        if sought is not None and (sought in self._damaged or sought[1] in apart):
            self._notes.give_up(*sought)  # so that another one is sought
        self._note(here, level, sought)

    def _folders(self) -> list[Path]:
        """Parity is made of what lies in roots."""
        return [self._root]

    def _wanted(self, here: dict[int, str], level: Level) -> tuple[int, ...]:
        last = self._board.is_last(newest_of(here))
        fine = {step: attempt for step, attempt in here.items() if not self._is_lost(step, attempt)}
        want = wanted(fine, level, there=self._there, last=last)
        return with_sought(want, self._agreed.sought, here=fine, there=self._there)

    def _is_lost(self, step: int, attempt: str) -> bool:
        return (step, attempt) in self._damaged

    def _meet(self, plan: Plan) -> Met | None:
        """The group; made anew with each plan, and what is known of what others keep with it."""
        if self._met is not None and plan == replace(
            self._met.plan,
            apart=plan.apart,
            last=plan.last,
            restored=plan.restored,
            closed=plan.closed,
        ):
            return self._met
        if self._met is not None:
            self._met.close()
        self._met, self._there, self._asked_s = None, {}, float("-inf")
        self._met = Met.of(plan, files=self._files)
        return self._met

    # -- agreeing ----------------------------------------------------------------------------------

    def _lead(self, met: Met, level: Level, here: dict[int, str], kept: dict[int, str]) -> None:
        """Find out what all keep, and say what is next."""
        newest = max(self._there, default=-1)
        met.failed = {
            one for one in met.failed if Copy.of(one).step > newest or one in here.values()
        }
        next_one = met.said.save if met.said is not None else None
        for step, attempt in sorted(kept.items()):
            is_open = step > newest or (step, attempt) == self._agreed.sought
            if step in self._there or not is_open:
                continue
            if met.all_keep(Copy(step, attempt)):
                self._has_reached(Copy(step, attempt))
        if next_one is not None and not self._goes_on(met, next_one, here):
            next_one = None
        if next_one is None:
            next_one = self._next(met, level, here)
        said = Said(
            met.mark,
            tuple(sorted(self._there.items())),
            next_one.attempt if next_one is not None else "",
            tuple(sorted(met.failed)),
        )
        self._say(met, said)
        met.heard = said

    def _goes_on(self, met: Met, save: Copy, here: dict[int, str]) -> bool:
        """Whether parity of a save is still to come."""
        if self._there.get(save.step) == save.attempt or self._is_lost(save.step, save.attempt):
            return False
        if here.get(save.step) != save.attempt:
            if save.attempt not in self._board.plan.apart:
                met.failed.add(save.attempt)  # so that the others do not wait for it
            return False
        copy = met.group.copy(save)
        for one in met.others:
            if one.keeps(copy):
                continue
            failed = save.attempt in met.heard_of(one).failed
            if failed or one.root.steps().get(save.step) != save.attempt:
                met.failed.add(save.attempt)  # so that the others hear of it
                self._give_up(
                    save, f"{one.part} {'cannot read it' if failed else 'has it no more'}"
                )
                return False
        return True

    def _next(self, met: Met, level: Level, here: dict[int, str]) -> Copy | None:
        """The step to go on with: of those that are wanted, one that all nodes have.

        What the nodes of all groups wait for comes first.
        """
        last, newest = self._board.is_last(newest_of(here)), max(self._there, default=-1)
        sought = self._agreed.sought
        fine = {
            step: attempt
            for step, attempt in here.items()
            if not self._is_lost(step, attempt)
            and self._there.get(step) != attempt
            and ((step > newest and (last or meets(step, level))) or (step, attempt) == sought)
        }
        for one in met.others if fine else ():
            steps = one.root.steps()
            fine = {step: attempt for step, attempt in fine.items() if steps.get(step) == attempt}
        if not fine:
            return None
        if sought is not None and sought in fine.items():
            return Copy(*sought)
        lasts = lasting(fine, level, there=self._there)
        want = {*self._wanted(fine, level)}
        if not want:
            return None  # the last one is not with all nodes yet
        if last:
            step = max(want)
        elif lasts is not None and any(step > newest for step, _ in self._damaged):
            step = lasts  # saves are faster than this: others would go before they are read
        else:
            step = min(want)
        return Copy(step, here[step])

    def _follow(self, met: Met, here: dict[int, str], kept: dict[int, str]) -> None:
        """Hear what the first node says, and say what cannot be done here."""
        met.heard = met.heard_of(met.first)
        if met.heard.reached:
            # A step that the first node names no more may have lost its parity somewhere.
            named = {*met.heard.reached}
            self._there = {step: one for step, one in self._there.items() if (step, one) in named}
        gone = {*met.heard.failed}
        for step, attempt in here.items():
            if attempt in gone and step not in self._there and not self._is_lost(step, attempt):
                self._give_up(Copy(step, attempt), f"{met.first.part} has given it up")
        for step, attempt in met.heard.reached:
            if kept.get(step) == attempt and step not in self._there:
                self._has_reached(Copy(step, attempt))
        if met.failed:
            self._say(met, Said(met.mark, failed=tuple(sorted(met.failed))))

    def _say(self, met: Met, said: Said) -> None:
        if said != met.said:
            with _as_away(f"{met.folder}: could not write {FILE}"):
                say(met.folder, said, files=self._files)
            met.said = said

    def _has_reached(self, save: Copy) -> None:
        self._there[save.step] = save.attempt
        # Order matters: who hears that it has reached votes at once, and is to find it there.
        self._board.seen(self.url, self._there)
        self._board.moved()
        with self._board.change(self.url) as status:
            status.rests()
            status.has_reached(save.step, save.attempt)
            status.skipped.pop(save.step, None)
            if not self._trouble.is_there:
                status.problem, status.since_s = "", 0.0
        logger.info("%s: parity of step %d is there, at all nodes", self.url, save.step)

    def _give_up(self, save: Copy, why: str) -> None:
        """This save never gets its parity: it has gone somewhere, before all had made theirs."""
        self._damaged.add((save.step, save.attempt))
        self._notes.give_up(save.step, save.attempt)
        logger.info("%s: no parity of step %d: %s", self.url, save.step, why)

    # -- making ------------------------------------------------------------------------------------

    def _make(self, met: Met, here: dict[int, str], kept: dict[int, str]) -> bool:
        """Make parity of what is next, if it is not there; whether it was made."""
        save = met.heard.save
        if save is None or here.get(save.step) != save.attempt or kept.get(save.step):
            return False
        if save.attempt in met.failed or not self._may_replace(met, save):
            return False
        with _as_away(f"{self._root}: could not hold step {save.step}"):
            # Order matters: from here on the step stays in the root, whatever retention says.
            if not hold(self._root, save.step, files=self._files):
                return False
        begun = time.monotonic()
        try:
            return self._encode(met, save)
        except (CorruptCheckpoint, UnknownFormat) as damage:
            met.own.drop(met.group.copy(save))
            met.failed.add(save.attempt)
            said = met.said if met.said is not None else Said(met.mark)
            self._say(met, replace(said, failed=tuple(sorted(met.failed))))
            self._found_damaged(save, damage)
        finally:
            with self._board.change(self.url) as status:
                status.rests()
                status.busy_s += time.monotonic() - begun
        return True

    def _may_replace(self, met: Met, save: Copy) -> bool:
        """Whether parity of that step may be written here: that of another group is what nodes are rebuilt
        from, until all ranks have gone on from a step.
        """
        copy = met.group.copy(save)
        there = met.own.directories().get(copy.target)
        is_free = there is None or there.attempt == copy.attempt
        return is_free or self._agreed.begun or bool(self._board.plan.restored)

    def _encode(self, met: Met, save: Copy) -> bool:
        """Whether it was made: not where a node has the save no more, which the first node finds out."""
        fars = met.readers(DirectoryFar(self._root, files=self._files))
        found = [read_part(far, save) for far in fars]
        parts = [part for part in found if part is not None]
        if len(parts) < len(found):
            return False
        total = sum(part.nbytes for n, part in enumerate(parts) if n != met.mine)
        with self._board.change(self.url) as status:
            status.begins(save.step, total * met.group.shape.m // len(met.others))

        def progress(done: int) -> None:
            with self._board.change(self.url) as status:
                status.bytes_all += done - status.sent_bytes
                status.sent_bytes = done
            self._board.moved()

        how = How(self._pace.let_through, progress)
        encode(met.group, met.mine, save, Sources(fars, parts), met.own, how)
        self._board.moved()
        logger.info("%s: parity of step %d is kept here", self.url, save.step)
        return True

    # -- letting go --------------------------------------------------------------------------------

    def _let_go(self, met: Met, level: Level, here: dict[int, str]) -> None:
        """What is older than the newest step that is reached, beyond those that are to be kept."""
        agreed = self._agreed
        if not agreed.begun:
            return
        # Also what no node says is there: one that has lost its root does not know of it any more.
        pinned = pinned_steps(self._root) | met.own.pins() | agreed.keeps
        there = {
            step: name for name in met.own.directories() if (step := step_of(name)) is not None
        }
        pinned |= _for_ever(there, level, newest=max(here, default=-1))
        going = doomed(self._there, level, kept=pinned)
        kept = {step for step in self._there if step not in going}
        if not kept:
            kept |= here.keys()  # all that may still be needed, of earlier groups too
        kept |= pinned
        if met.heard.save is not None:
            kept.add(met.heard.save.step)
        gone = [name for step, name in there.items() if step not in kept]
        if gone:
            # Order matters: without the step there is no use in its parity, nor in that of others with it.
            met.own.retire(gone)
        staying = {step for step in there if step in kept}
        if met.heard.save is not None:
            staying.add(met.heard.save.step)
        with _as_away(f"{self._root}: could not let steps go"):
            let_go(self._root, held_steps(self._root) - staying, files=self._files)
        for step in going:
            self._there.pop(step, None)
        if going:
            self._board.seen(self.url, self._there)


def _for_ever(there: Collection[int], level: Level, *, newest: int) -> set[int]:
    """Steps whose parity stays, also where one of the nodes has been replaced and not all keep theirs."""
    old = [step for step in there if step <= newest]
    if level.keep_last is None:
        return {*old}
    return {step for step in old if level.keep_every and step % level.keep_every == 0}


@contextmanager
def _as_away(doing: str) -> Iterator[None]:
    """Where trouble with a disk becomes trouble of the level."""
    try:
        yield
    except OSError as exc:
        text = f"{doing}: {exc.strerror or exc}. Nothing is lost. {advice(exc)}"
        raise Away(text, hopeless=exc.errno in HOPELESS) from exc
