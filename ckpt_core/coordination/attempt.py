"""One attempt at one step, as one rank takes part in it: docs/protocol.md, line by line.

Keys of an attempt, and who writes them:

    vote/<r>    rank r: its plan and data
    count       every voter adds 1; the one that completes it sets the gate
    gate        ready, by the last voter; or why not, by whoever declines or aborts. The first one wins
    decision    go, by rank 0 alone; or why not, by rank 0 or whoever holds it for dead. The first one wins
    report/<l>  leader l: whether it has published
    verdict     how the attempt ended, by whoever may decide. The first one wins
    detail/<r>  rank r, if the decision asks for it: what it has. Deleted by r when it is through
    finding     rank 0: the decision again, saying what differs
    acks        every rank that is through adds 1; the last one deletes the keys
"""

from __future__ import annotations

import base64
import dataclasses
import json
import time
from collections.abc import Iterable

from ckpt_core.coordination.agreement import Aside, Ballot, Json, Parts, Reference
from ckpt_core.coordination.begun import Elsewhere, step_of
from ckpt_core.coordination.channel import Channel
from ckpt_core.coordination.client import StoreGone
from ckpt_core.coordination.comparing import compared, explained
from ckpt_core.coordination.crew import Crew, Keys
from ckpt_core.coordination.outcome import Cause, Outcome
from ckpt_core.errors import CkptError, ConfigError, CoordinationTimeout
from ckpt_core.system.threads import own_lock

_GO = Outcome()
_EXPLAIN_S = 10.0
"""So long ranks wait for words about what differs; that they differ is known by then."""


class Attempt:
    """What one rank knows of one attempt, and its moves. `agree` and `settle` run in one thread at a time;
    `decline` may come from another thread at any moment.
    """

    def __init__(self, crew: Crew, attempt_id: str, step: int) -> None:
        self._crew = crew
        self._info = crew.info
        self.step = step
        self.keys = Keys(crew, attempt_id)
        self._elsewhere = Elsewhere(attempt_id)
        self.lock = own_lock()
        self.voted = False
        self.going = False
        self.own: BaseException | None = None
        self.reference: Reference | None = None
        self.aside: Aside | None = None
        self.parts: Parts | None = None
        self.showed = False

    # -- declining -------------------------------------------------------------------------------

    def refuse(self, error: BaseException) -> bool:
        """Note that this rank declines; False when that is too late, or not news."""
        with self.lock:
            if self.going or self.own is not None:
                return False
            self.own = error
            return True

    def tell_refusal(self, channel: Channel) -> None:
        """Make the refusal known; may be repeated."""
        outcome = self._failed()
        stands = Outcome.decode(channel.put_first(self.keys.gate, outcome.encode()))
        if self._info.rank == 0:
            # Whoever declined first: this rank may only miss files that were removed because of it.
            self._abort(channel, outcome if stands.ok else stands)
        elif self._info.leads:
            channel.put_first(self.keys.report(self._info.rank), outcome.encode())

    def _failed(self, published: bool = False) -> Outcome:
        assert self.own is not None
        return Outcome({self._info.rank: Cause.of(self.own)}, published)

    def refusal(self, channel: Channel) -> Outcome | None:
        """Why another rank has declined; None if none has in time."""
        found = channel.wait([self.keys.gate])
        text = channel.read(self.keys.gate) if found else None
        return None if text is None else Outcome.decode(text)

    # -- agreeing --------------------------------------------------------------------------------

    def agree(self, channel: Channel, ballot: Ballot) -> tuple[Json, ...]:
        """See Coordination.agree; StoreGone as it comes."""
        self._check_own()
        self.reference, self.aside, self.parts = ballot.reference, ballot.aside, ballot.parts
        self._vote(channel, ballot)
        if not self._info.leads:
            return ()
        decide = self._decide if self._info.rank == 0 else self._await_decision
        decision = decide(channel)
        self._raise_unless_ok(decision)
        if self.aside is not None and decision.aside is not None:
            self.aside.hear(decision.aside)
        votes = channel.read_all([self.keys.votes[rank] for rank in self._info.members])
        if votes is None:
            raise self._over(channel)
        return tuple(json.loads(vote)["data"] for vote in votes)

    def _vote(self, channel: Channel, ballot: Ballot) -> None:
        with self.lock:
            repeated, self.voted = self.voted, True
        marks = None if ballot.reference is None else dict(ballot.reference.marks())
        said = None if ballot.aside is None else ballot.aside.say()
        vote = {"plan": ballot.plan, "marks": marks, "data": ballot.data, "aside": said}
        vote |= {"parts": None if ballot.parts is None else ballot.parts.say()}
        channel.put(self.keys.votes[self._info.rank], json.dumps(vote))
        # Invariant: the count never runs ahead of the votes, or rank 0 would look for votes too early.
        if not repeated and channel.count(self.keys.count) >= self._info.world_size:
            channel.put_first(self.keys.gate, _GO.encode())

    def _decide(self, channel: Channel) -> Outcome:
        """Rank 0: wait for all votes, or for one that says no; the decision."""
        # A little early, so that those with the same deadline still hear who was late.
        if not channel.early().wait([self.keys.gate], lambda: self._watch_voters(channel)):
            late = dict.fromkeys(self._missing(channel), "it has not voted in time")
            channel.put_first(self.keys.gate, Outcome.lost(late).encode())
        gate = channel.read(self.keys.gate)
        if gate is None:
            raise self._over(channel)
        outcome, odd = Outcome.decode(gate), dict[int, int]()
        if outcome.ok:
            outcome, odd = self._counted(channel)
        decision = self._conclude(channel, outcome)
        return self._find_out(channel, decision, odd) if decision.asks else decision

    def _counted(self, channel: Channel) -> tuple[Outcome, dict[int, int]]:
        """Rank 0: whether every vote is there and for the same; and who differs from whom."""
        # Not the count but the votes themselves count: a count may be wrong, a vote may not.
        channel.early().wait(self.keys.votes, lambda: self._watch_votes(channel))
        votes = channel.read_all(self.keys.votes)
        if votes is None:
            late = self._missing(channel) or [self._info.rank]
            return Outcome.lost(dict.fromkeys(late, "its vote was not found")), {}
        given = [json.loads(vote) for vote in votes]
        outcome, odd = compared(given, self.parts)
        if outcome.ok and self.aside is not None:
            concluded = self.aside.conclude([vote["aside"] for vote in given])
            outcome = dataclasses.replace(outcome, aside=concluded)
        return outcome, odd

    def _conclude(self, channel: Channel, outcome: Outcome) -> Outcome:
        """Rank 0: write the decision; what it then is."""
        with self.lock:
            if outcome.ok and self.own is not None:
                outcome = self._failed()
            # From here on this rank cannot decline; only `settle` says how it went.
            self.going = outcome.ok
        # Decision point: whoever publishes has read `go` here.
        return self._put_decision(channel, outcome, self.keys)

    def _await_decision(self, channel: Channel) -> Outcome:
        """A leader other than rank 0: the decision."""
        if not channel.wait([self.keys.decision], lambda: self._watch_rank_0(channel)):
            late = Outcome.lost({0: "it has not decided in time"}, published=True)
            mine = Outcome.lost({self._info.rank: "it has given up waiting for a decision"})
            channel.put_first(self.keys.gate, mine.encode())
            channel.put_first(self.keys.report(self._info.rank), mine.encode())
            return late
        text = channel.read(self.keys.decision)
        if text is None:
            raise self._over(channel)
        outcome = Outcome.decode(text)
        with self.lock:
            self.going = outcome.ok and self.own is None
        self._check_own()
        return self._in_words(channel, outcome)

    # -- saying what differs ---------------------------------------------------------------------

    def _find_out(self, channel: Channel, decision: Outcome, odd: dict[int, int]) -> Outcome:
        """Rank 0, after a decision that asks: wait for what the ranks have, and tell what differs."""
        given = {}
        try:
            self._show(channel, decision)
            brief = channel.until(time.monotonic() + _EXPLAIN_S)
            brief.wait([self.keys.details[rank] for rank in decision.asks])
            for rank in decision.asks:
                text = channel.read(self.keys.details[rank])
                if text is not None:
                    given[rank] = base64.b64decode(text)
            if self.reference is not None:
                decision = explained(decision, odd, given, self.reference)
            channel.put_first(self.keys.finding, decision.encode())
        except StoreGone:
            pass  # It is decided; only words are missing.
        return decision

    def _in_words(self, channel: Channel, outcome: Outcome) -> Outcome:
        """Any other rank: the outcome, and what differs if that was found out."""
        if not outcome.asks:
            return outcome
        try:
            self._show(channel, outcome)
            brief = channel.until(time.monotonic() + 1.5 * _EXPLAIN_S)
            if brief.wait([self.keys.finding]):
                text = channel.read(self.keys.finding)
                return outcome if text is None else Outcome.decode(text)
        except StoreGone:
            pass
        return outcome

    def _show(self, channel: Channel, outcome: Outcome) -> None:
        rank = self._info.rank
        if self.reference is not None and rank in outcome.asks:
            self.showed = True
            channel.put(self.keys.details[rank], base64.b64encode(self.reference.encode()).decode())

    # -- settling --------------------------------------------------------------------------------

    def settle(self, channel: Channel, error: BaseException | None) -> None:
        """See Coordination.settle; StoreGone as it comes."""
        if error is not None:
            with self.lock:
                self.own = self.own or error
        elif not self.going:
            self._check_own()
        many = len(self._crew.leaders) > 1
        if self._info.leads:
            outcome = _GO if self.own is None else self._failed(published=many)
            channel.put_first(self.keys.report(self._info.rank), outcome.encode())
            if not outcome.ok and self._info.rank == 0 and self._abort(channel, outcome).ok:
                channel.put_first(self.keys.verdict, outcome.encode())
        elif self.own is not None:
            channel.put_first(self.keys.gate, self._failed().encode())
        if self.own is not None:
            raise self._failed(published=many).error(
                self.step, self.own, self._info.rank
            ) from self.own
        judge = self._judge if self._info.rank == 0 else self._verdict
        self._raise_unless_ok(judge(channel))

    def _judge(self, channel: Channel) -> Outcome:
        """Rank 0: wait for the leaders; the verdict."""
        causes: dict[int, Cause] = {}
        if not channel.early().wait(self.keys.reports, lambda: self._watch_leaders(channel)):
            for leader in self._crew.leaders:
                lost = {leader: "it has not said in time whether it published"}
                outcome = Outcome.lost(lost, published=True)
                channel.put_first(self.keys.report(leader), outcome.encode())
        reports = channel.read_all(self.keys.reports)
        if reports is None:
            raise self._over(channel)
        for text in reports:
            causes |= Outcome.decode(text).failures
        outcome = Outcome(causes, published=bool(causes))
        return Outcome.decode(channel.put_first(self.keys.verdict, outcome.encode()))

    def _verdict(self, channel: Channel) -> Outcome:
        """Any other rank: the verdict."""
        if not channel.wait([self.keys.verdict], lambda: self._watch_rank_0(channel)):
            mine = Outcome.lost({self._info.rank: "it has given up waiting for the verdict"})
            channel.put_first(self.keys.gate, mine.encode())
            return Outcome.lost(
                {0: "it has not said in time how the attempt ended"}, published=True
            )
        text = channel.read(self.keys.verdict)
        if text is None:
            raise self._over(channel)
        return self._in_words(channel, Outcome.decode(text))

    # -- looking after the others ----------------------------------------------------------------

    def _watch_voters(self, channel: Channel) -> None:
        """Rank 0, while the gate is not set: a rank that is lost and has not voted closes it."""
        others = range(1, self._info.world_size)
        lost = self._crew.liveness.look(channel, others) if others else {}
        if lost:
            missing = self._missing(channel)
            gone = {rank: text for rank, text in lost.items() if rank in missing}
            # If no vote is missing, the last voter died before it could set the gate: that is done here.
            if gone or not missing:
                channel.put_first(self.keys.gate, Outcome.lost(gone).encode())
        self._look_elsewhere(channel, others)

    def _look_elsewhere(self, channel: Channel, ranks: Iterable[int]) -> None:
        """Rank 0, while the gate is not set: ranks that save another step will never vote for this one."""
        wrong = {}
        for rank in ranks:
            for theirs in self._elsewhere.attempts_of(rank, self._crew.liveness, self._crew.begun):
                wrong[rank] = _other_step(step_of(theirs), self.step)
                # They are told as well: as soon as this attempt has ended, they would see nothing strange.
                self._abort(channel, Outcome({rank: wrong[rank]}), Keys(self._crew, theirs))
        if wrong:
            channel.put_first(self.keys.gate, Outcome(wrong).encode())

    def _watch_votes(self, channel: Channel) -> None:
        """Rank 0, while a vote that was counted is missing: of a rank that is lost, or of no use any more."""
        missing = self._missing(channel)
        lost = self._crew.liveness.look(channel, missing) if missing else {}
        text = channel.read(self.keys.decision)
        if lost or text is not None:
            stands = Outcome.lost(lost) if text is None else Outcome.decode(text)
            self._raise_unless_ok(self._abort(channel, stands))

    def _watch_leaders(self, channel: Channel) -> None:
        """Rank 0, while reports are missing: a leader that is lost counts as one that could not publish."""
        others = [leader for leader in self._crew.leaders if leader != 0]
        lost = self._crew.liveness.look(channel, others) if others else {}
        for leader, why in lost.items():
            outcome = Outcome.lost({leader: why}, published=True)
            channel.put_first(self.keys.report(leader), outcome.encode())

    def _watch_rank_0(self, channel: Channel) -> None:
        """Any other rank, while it waits for rank 0: if that is lost, end the attempt for everybody."""
        self._check_own()
        lost = self._crew.liveness.look(channel, [0])
        if not lost:
            for first in self._elsewhere.attempts_of(0, self._crew.liveness, self._crew.begun):
                mine = Outcome({self._info.rank: _other_step(self.step, step_of(first))})
                channel.put_first(Keys(self._crew, first).gate, mine.encode())
                self._abort(channel, mine)
            return
        if self._abort(channel, Outcome.lost(lost)).ok:
            # It said go and may have published before it was lost. Nobody will ever know here.
            channel.put_first(self.keys.verdict, Outcome.lost(lost, published=True).encode())

    def _abort(self, channel: Channel, outcome: Outcome, keys: Keys | None = None) -> Outcome:
        """End the attempt for everybody, unless another decision came first; the decision that stands."""
        keys = keys or self.keys
        # Order matters: behind a decision against, rank 0 waits for no more votes.
        channel.put_first(keys.gate, outcome.encode())
        return self._put_decision(channel, outcome, keys)

    def _put_decision(self, channel: Channel, outcome: Outcome, keys: Keys) -> Outcome:
        """Write a decision, unless another came first; the one that stands, with what follows from it."""
        decision = Outcome.decode(channel.put_first(keys.decision, outcome.encode()))
        if not decision.ok:
            # Whoever wrote it may have died before it could.
            channel.put_first(keys.verdict, decision.encode())
        return decision

    # -- ending ----------------------------------------------------------------------------------

    def finish(self, channel: Channel) -> None:
        """This rank will not look at the attempt again; the last one to say so deletes its keys."""
        # Rank 0 keeps the attempt until it is reaped, and these hold a whole state.
        self.own = self.reference = self.aside = self.parts = None
        # Not its vote: rank 0, or the leader of this rank, may come to it only now.
        channel.delete([self.keys.details[self._info.rank]] if self.showed else [])
        if channel.count(self.keys.acks) >= self._info.world_size:
            channel.delete(self.keys.shared())

    def is_pending(self, channel: Channel) -> bool:
        """After `finish`: whether some rank is not through yet."""
        return channel.has([self.keys.acks])

    def reap(self, channel: Channel) -> None:
        """Rank 0, long after: delete what a rank that died has left; nothing if all were through."""
        if self.is_pending(channel):
            channel.delete([*self.keys.details, *self.keys.shared()])

    def _missing(self, channel: Channel) -> list[int]:
        missing = set(channel.missing(self.keys.votes))
        return [rank for rank, key in enumerate(self.keys.votes) if key in missing]

    def _check_own(self) -> None:
        if self.own is not None:
            # What it has voted for may be published by its leader, whatever it did later.
            unsure = self.voted and not self._info.leads
            found = self._failed().error(self.step, self.own, self._info.rank, unsure=unsure)
            raise found from self.own

    def _raise_unless_ok(self, outcome: Outcome) -> None:
        if not outcome.ok:
            self._check_own()
            error = outcome.error(self.step)
            # What the store has said of the attempt as a whole: nobody has published, and nobody will.
            error.nowhere = not outcome.published
            raise error

    def _over(self, channel: Channel) -> CkptError:
        """Keys of the attempt are gone before this rank could read them: how it ended, if that is known."""
        self._check_own()
        text = channel.read(self.keys.verdict)
        verdict = _GO if text is None else Outcome.decode(text)
        if not verdict.ok:
            return verdict.error(self.step)
        return CoordinationTimeout(
            f"step {self.step} may be committed or not: the attempt had ended before this rank could hear "
            f"how. Look at `steps()`; committed steps are safe. The next save starts afresh",
            step=self.step,
            rank=self._info.rank,
        )


def _other_step(step: int, first: int) -> Cause:
    text = (
        f"it saves step {step} while rank 0 saves step {first}: all ranks must save the same steps, in the "
        f"same order and equally often"
    )
    return Cause(ConfigError.__name__, text)
