"""The commit protocol of docs/protocol.md as a state machine small enough to visit every state of it.

Names are those of `ckpt_core/coordination/attempt.py`: keys of an attempt are the fields of Board, moves of a
rank are methods here. Each request to the store is one move of its own, so that every interleaving of the
ranks' requests is visited. Besides them, up to `faults` times:

    crash     a rank dies; the request that it was making is lost, or arrives at any later time
    deadline  a rank gives up a wait, or holds the one it waits for to be dead, rightly or not
    decline   a rank votes no from another thread, at any moment before it may publish
    repeat    a rank counts its vote twice
    late      a leader hangs as it publishes: the attempt is given up, and it wakes at any later time

When nobody can move any more, deadlines pass without limit: a wait ends, always. But only a wait for who is
dead or hangs may need one, and rank 0 waits for no vote behind a decision against: else `InVain` is raised.

`Bug` names mistakes that can be built in; the checker must find each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple

NONE, GO, NO, UNSURE = "", "go", "no", "unsure"


class InVain(AssertionError):
    """A wait that a deadline alone ends, though whoever it is for lives."""


class Bug(Enum):
    """Mistakes that somebody could make in the protocol."""

    VOTES_BEFORE_ITS_SHARD_IS_DURABLE = auto()
    BELIEVES_THE_COUNT = auto()
    LAST_DECISION_WINS = auto()
    LEADER_PUBLISHES_AT_ITS_DEADLINE = auto()
    LEADER_DOES_NOT_WAIT_FOR_THE_DECISION = auto()
    VERDICT_WITHOUT_REPORTS = auto()
    MEMBER_REMOVES_ITS_SHARD_AT_ITS_DEADLINE = auto()
    MEMBER_REMOVES_ITS_SHARD_WHATEVER_IT_HEARS = auto()
    MEMBER_THAT_LEAVES_AFTER_ITS_VOTE_SAYS_NO = auto()
    KEYS_ARE_DELETED_TOO_EARLY = auto()
    ATTEMPTS_SHARE_THEIR_KEYS = auto()
    RESTORE_IGNORES_THE_ATTEMPT = auto()
    NO_DEADLINE_FOR_THE_DECISION = auto()
    MEMBER_TAKES_GO_FOR_THE_VERDICT = auto()
    LATE_PUBLICATION_REPLACES_A_LATER_ONE = auto()
    VOTES_GO_WITH_THEIR_VOTERS = auto()
    WHO_ABORTS_LEAVES_THE_GATE_OPEN = auto()
    MISSING_VOTES_ARE_AWAITED_BEHIND_A_DECISION = auto()
    RANK_0_OBEYS_A_DECISION_WITHOUT_A_VERDICT = auto()


class Board(NamedTuple):
    """The keys of one attempt."""

    votes: frozenset[int] = frozenset()
    count: int = 0
    gate: str = NONE
    decision: str = NONE
    reports: tuple[tuple[int, str], ...] = ()
    verdict: str = NONE
    acks: int = 0
    miscounted: bool = False


class Rank(NamedTuple):
    """One process: which attempt it is in, what it does next, what it noted."""

    attempt: int = 0
    pc: str = "persist"
    own: bool = False
    said: str = NONE
    alive: bool = True


class Late(NamedTuple):
    """A request on its way: of a rank that died meanwhile, or of the thread that tells a refusal."""

    key: str
    attempt: int
    rank: int
    value: str


class State(NamedTuple):
    """Everything: processes, store, disks."""

    ranks: tuple[Rank, ...]
    boards: tuple[Board, ...]
    shards: frozenset[tuple[int, int]] = frozenset()
    published: tuple[tuple[int, int], ...] = ()
    told: frozenset[tuple[int, int, str]] = frozenset()
    late: frozenset[Late] = frozenset()
    faults: int = 0


_WAITS = {"gate?", "votes?", "decision?", "reports?", "verdict?"}
_ABORT = {"abort", "against", "verdict"}
_WRITES = {"vote", "count", "gate", "decide", "report", "judge", "verdict"}


@dataclass(frozen=True)
class Model:
    """A world: ranks in groups, `attempts` tries at one step, and at most `faults` faults."""

    groups: tuple[tuple[int, ...], ...]
    attempts: int = 1
    faults: int = 2
    bugs: frozenset[Bug] = field(default_factory=frozenset)

    @property
    def world_size(self) -> int:
        return sum(map(len, self.groups))

    @property
    def leaders(self) -> tuple[int, ...]:
        return tuple(group[0] for group in self.groups)

    def members(self, leader: int) -> tuple[int, ...]:
        return next(group for group in self.groups if group[0] == leader)

    def start(self) -> State:
        return State((Rank(),) * self.world_size, (Board(),) * self.attempts, faults=self.faults)

    # -- all moves from a state ------------------------------------------------------------------

    def moves(self, state: State) -> Iterator[tuple[str, State]]:
        found = False
        self._check_behind_a_decision(state)
        for r, rank in enumerate(state.ranks):
            if rank.alive and rank.pc != "done":
                for name, after in self._step(state, r):
                    found = True
                    yield f"rank {r}: {name}", after
        for late in sorted(state.late):
            found = True
            yield f"late {late}", self._arrive(state, late)
        for r, rank in enumerate(state.ranks):
            if not rank.alive or rank.pc == "done":
                continue
            if rank.pc in _WAITS and not found:
                self._check_awaited(state, r)
            if rank.pc in _WAITS and (state.faults or not found):
                spent = state._replace(faults=max(state.faults - 1, 0))
                for name, after in self._deadline(spent, r):
                    yield f"rank {r}: {name}", after
            if state.faults:
                yield from self._faults(state._replace(faults=state.faults - 1), r)

    def _check_behind_a_decision(self, state: State) -> None:
        rank, board = state.ranks[0], self._board(state, 0)
        waits = rank.alive and rank.pc in ("gate?", "votes?") and board.decision == NO
        if waits and next(self._step(state, 0), None) is None:
            raise InVain(f"rank 0 waits at {rank.pc} behind a decision against")

    def _check_awaited(self, state: State, r: int) -> None:
        """Where only deadlines are left, whoever waits does so for one that is dead, hangs or waits."""
        rank, board = state.ranks[r], self._board(state, r)
        everyone = frozenset(range(self.world_size))
        missing = everyone - board.votes
        awaited = {
            "gate?": missing or everyone,
            "votes?": missing,
            "reports?": frozenset(self.leaders) - dict(board.reports).keys(),
        }.get(rank.pc, frozenset({0}))
        # A count that is wrong may say that a vote is there which never comes.
        wrong = rank.pc == "votes?" and board.miscounted
        if not wrong and all(self._is_through(state, one, rank.attempt) for one in awaited - {r}):
            raise InVain(f"rank {r} waits at {rank.pc} for {sorted(awaited)}, who are through")

    def _is_through(self, state: State, r: int, attempt: int) -> bool:
        rank = state.ranks[r]
        gone = rank.pc == "done" or rank.attempt > attempt
        return rank.alive and gone and (attempt, r, "hung") not in state.told

    def _faults(self, state: State, r: int) -> Iterator[tuple[str, State]]:
        rank = state.ranks[r]
        dead = self._rank(state, r, rank._replace(alive=False))
        yield f"rank {r}: crash", dead
        unsaid = {late for late in state.late if late.rank == r and late.key in _ABORT}
        if unsaid:
            yield f"rank {r}: crash, as it aborts", dead._replace(late=dead.late - unsaid)
        if rank.pc in _WRITES:
            request = self._request(state, r)
            yield f"rank {r}: crash, request on its way", dead._replace(late=dead.late | request)
        if rank.pc == "count":
            board = self._board(state, r)
            board = board._replace(count=board.count + 1, miscounted=True)
            yield f"rank {r}: repeat", self._write(state, r, board)
        if rank.pc == "publish" and rank.attempt + 1 < self.attempts:
            yield f"rank {r}: hangs as it publishes", self._hang(state, r)
        going = rank.pc in ("publish", "report", "reports?", "judge") or rank.said == GO
        if not rank.own and not going:
            yield f"rank {r}: decline", self._decline(state, r)

    def _hang(self, state: State, r: int) -> State:
        k = state.ranks[r].attempt
        late, told = state.late | {Late("publish", k, r, GO)}, state.told | {(k, r, "hung")}
        return self._rank(state._replace(late=late, told=told), r, Rank(k + 1))

    def _decline(self, state: State, r: int) -> State:
        k = state.ranks[r].attempt
        telling = {Late("gate", k, r, NO)}
        if r == 0:
            telling.add(Late("abort", k, r, NO))
        elif r in self.leaders:
            telling.add(Late("report", k, r, NO))
        state = self._rank(state, r, state.ranks[r]._replace(own=True))
        return state._replace(late=state.late | telling)

    # -- what a rank does next -------------------------------------------------------------------

    def _step(self, state: State, r: int) -> Iterator[tuple[str, State]]:
        rank, board = state.ranks[r], self._board(state, r)
        if rank.own and rank.pc in {"persist", "vote", *_WAITS}:
            lies = Bug.MEMBER_THAT_LEAVES_AFTER_ITS_VOTE_SAYS_NO in self.bugs
            left = lies and r not in self.leaders and r in board.votes
            yield "declined", self._end(state, r, NO if left else "own")
            return
        yield from getattr(self, "_" + rank.pc.rstrip("?") + ("_wait" * rank.pc.endswith("?")))(
            state, r, board
        )

    def _persist(self, state: State, r: int, board: Board) -> Iterator[tuple[str, State]]:
        late = Bug.VOTES_BEFORE_ITS_SHARD_IS_DURABLE in self.bugs
        if late and r == self.world_size - 1:
            yield "vote before persist", self._go(state, r, "vote")
        durable = state._replace(shards=state.shards | {(state.ranks[r].attempt, r)})
        yield "persist", self._go(durable, r, "vote")

    def _vote(self, state: State, r: int, board: Board) -> Iterator[tuple[str, State]]:
        yield "vote", self._go(self._write(state, r, self._put(board, "vote", r, GO)), r, "count")

    def _count(self, state: State, r: int, board: Board) -> Iterator[tuple[str, State]]:
        count = board.count + 1
        state = self._write(state, r, board._replace(count=count))
        yield "count", self._go(state, r, "gate" if count >= self.world_size else self._after(r))

    def _gate(self, state: State, r: int, board: Board) -> Iterator[tuple[str, State]]:
        state = self._write(state, r, self._put(board, "gate", r, GO))
        yield "gate", self._go(state, r, self._after(r))

    def _after(self, r: int) -> str:
        if r == 0:
            return "gate?"
        if r not in self.leaders:
            return "verdict?"
        wrong = Bug.LEADER_DOES_NOT_WAIT_FOR_THE_DECISION in self.bugs
        return "publish" if wrong else "decision?"

    def _gate_wait(self, state: State, r: int, board: Board) -> Iterator[tuple[str, State]]:
        if board.gate == GO and Bug.BELIEVES_THE_COUNT not in self.bugs:
            yield "gate is ready", self._go(state, r, "votes?")
        elif board.gate:
            yield f"gate says {board.gate}", self._go(state, r, "decide", said=board.gate)

    def _votes_wait(self, state: State, r: int, board: Board) -> Iterator[tuple[str, State]]:
        if len(board.votes) == self.world_size:
            yield "every vote is there", self._go(state, r, "decide", said=GO)
        elif board.decision and Bug.MISSING_VOTES_ARE_AWAITED_BEHIND_A_DECISION not in self.bugs:
            yield "a decision stands", self._go(state, r, "decide", said=NO)

    def _decide(self, state: State, r: int, board: Board) -> Iterator[tuple[str, State]]:
        rank = state.ranks[r]
        value = NO if rank.own else rank.said
        board = self._put(board, "decision", r, value)
        state = self._write(state, r, board)
        if (
            value == GO != board.decision
            and Bug.RANK_0_OBEYS_A_DECISION_WITHOUT_A_VERDICT in self.bugs
        ):
            yield "obeys", self._end(state, r, board.decision)
            return
        after = "publish" if board.decision == GO else "verdict"
        yield f"decide {value}", self._go(state, r, after, said=board.decision)

    def _decision_wait(self, state: State, r: int, board: Board) -> Iterator[tuple[str, State]]:
        if board.decision == GO:
            yield "reads go", self._go(state, r, "publish", said=GO)
        elif board.decision:
            yield "reads no", self._end(state, r, NO)

    def _publish(self, state: State, r: int, board: Board) -> Iterator[tuple[str, State]]:
        k = state.ranks[r].attempt
        kept = tuple(one for one in state.published if one[0] != r)
        done = state._replace(published=(*kept, (r, k)))
        yield "publish", self._go(done, r, "report", said=GO)
        if state.faults:
            failed = state._replace(faults=state.faults - 1)
            yield "cannot publish", self._go(failed, r, "report", said=NO)

    def _report(self, state: State, r: int, board: Board) -> Iterator[tuple[str, State]]:
        said = state.ranks[r].said
        state = self._write(state, r, self._put(board, "report", r, said))
        if said == NO:
            yield (
                "report no",
                (
                    self._go(state, r, "verdict", said=UNSURE)
                    if r == 0
                    else self._end(state, r, "own")
                ),
            )
        else:
            yield "report", self._go(state, r, "verdict?" if r else "reports?")

    def _reports_wait(self, state: State, r: int, board: Board) -> Iterator[tuple[str, State]]:
        everyone = len(board.reports) == len(self.leaders)
        if everyone or Bug.VERDICT_WITHOUT_REPORTS in self.bugs:
            fine = all(value == GO for _, value in board.reports)
            yield "reports are there", self._go(state, r, "judge", said=GO if fine else UNSURE)

    def _judge(self, state: State, r: int, board: Board) -> Iterator[tuple[str, State]]:
        board = self._put(board, "verdict", r, state.ranks[r].said)
        yield "verdict", self._end(self._write(state, r, board), r, board.verdict)

    def _verdict(self, state: State, r: int, board: Board) -> Iterator[tuple[str, State]]:
        """Rank 0 after a decision against, or that it could not publish itself."""
        board = self._put(board, "verdict", r, state.ranks[r].said)
        yield "verdict", self._end(self._write(state, r, board), r, "own")

    def _verdict_wait(self, state: State, r: int, board: Board) -> Iterator[tuple[str, State]]:
        verdict = board.verdict
        if Bug.MEMBER_TAKES_GO_FOR_THE_VERDICT in self.bugs and r not in self.leaders:
            verdict = verdict or board.decision
        if verdict:
            yield "reads the verdict", self._end(state, r, verdict)

    # -- waits that end without what they wait for -----------------------------------------------

    def _deadline(self, state: State, r: int) -> Iterator[tuple[str, State]]:
        rank, board = state.ranks[r], self._board(state, r)
        k = rank.attempt
        if rank.pc == "gate?":
            missing = len(board.votes) < self.world_size
            board = self._put(board, "gate", r, NO if missing else GO)
            yield "closes the gate", self._write(state, r, board)
        elif rank.pc == "votes?":
            yield "votes are missing", self._go(state, r, "decide", said=NO)
        elif rank.pc == "reports?":
            for leader in self.leaders:
                board = self._put(board, "report", leader, NO)
            yield "reports are missing", self._write(state, r, board)
        elif rank.pc == "decision?" and Bug.NO_DEADLINE_FOR_THE_DECISION in self.bugs:
            return
        else:
            gave_up = {Late("gate", k, r, NO)}
            if rank.pc == "decision?":
                gave_up.add(Late("report", k, r, NO))
            if rank.pc == "decision?" and Bug.LEADER_PUBLISHES_AT_ITS_DEADLINE in self.bugs:
                yield "publishes anyway", self._go(state, r, "publish")
                return
            over = self._end(state, r, "late")
            yield "gives up", over._replace(late=over.late | gave_up)
            taken = state._replace(late=state.late | {Late("abort", k, r, NO)})
            yield "holds rank 0 for dead", taken

    # -- small things ----------------------------------------------------------------------------

    def _arrive(self, state: State, late: Late) -> State:
        state = state._replace(late=state.late - {late})
        k = self._index(late.attempt)
        board = state.boards[k]
        if late.key == "publish":
            return self._publish_late(state, late)
        if late.key == "count":
            board = board._replace(count=board.count + 1)
        elif late.key == "abort":
            open_gate = Bug.WHO_ABORTS_LEAVES_THE_GATE_OPEN in self.bugs
            board = board if open_gate else self._put(board, "gate", late.rank, NO)
            state = state._replace(late=state.late | {late._replace(key="against")})
        elif late.key == "against":
            board = self._put(board, "decision", late.rank, NO)
            # What the decision then is, the verdict follows from.
            value = NO if board.decision == NO else (NONE if late.rank == 0 else UNSURE)
            if value:
                follows = Late("verdict", late.attempt, late.rank, value)
                state = state._replace(late=state.late | {follows})
        else:
            board = self._put(board, late.key, late.rank, late.value)
        return state._replace(boards=(*state.boards[:k], board, *state.boards[k + 1 :]))

    def _publish_late(self, state: State, late: Late) -> State:
        r, k = late.rank, late.attempt
        wrong = Bug.LATE_PUBLICATION_REPLACES_A_LATER_ONE in self.bugs
        if not wrong and any(one[0] == r and one[1] > k for one in state.published):
            return state
        kept = tuple(one for one in state.published if one[0] != r)
        return state._replace(published=(*kept, (r, k)))

    def _request(self, state: State, r: int) -> set[Late]:
        rank = state.ranks[r]
        key = {"decide": "decision", "judge": "verdict"}.get(rank.pc, rank.pc)
        value = rank.said if rank.pc in ("decide", "judge", "report", "verdict") else GO
        return {Late(key, rank.attempt, r, value)}

    def _put(self, board: Board, key: str, r: int, value: str) -> Board:
        """Set a key; but for votes, the first value wins."""
        if key == "vote":
            return board._replace(votes=board.votes | {r})
        if key == "report":
            known = dict(board.reports)
            return board._replace(reports=tuple(sorted({r: value, **known}.items())))
        if key == "decision" and Bug.LAST_DECISION_WINS in self.bugs:
            return board._replace(decision=value)
        return board if getattr(board, key) else board._replace(**{key: value})

    def _end(self, state: State, r: int, said: str) -> State:
        """Through with the attempt: acknowledge, clean up, go on to the next attempt."""
        rank, board = state.ranks[r], self._board(state, r)
        k = rank.attempt
        acks = board.acks + 1
        # Until all are through: who gives up or aborts may do so before rank 0 and its leader look at votes.
        left = {r} if Bug.VOTES_GO_WITH_THEIR_VOTERS in self.bugs else frozenset[int]()
        board = board._replace(votes=board.votes - left, acks=acks)
        early = Bug.KEYS_ARE_DELETED_TOO_EARLY in self.bugs
        if acks >= self.world_size - early:
            board = Board()
        state = self._write(state, r, board)
        removes = r in self.leaders and said != GO and (r, k) not in state.published
        gone = {(k, member) for member in self.members(r)} if removes else set()
        if Bug.MEMBER_REMOVES_ITS_SHARD_AT_ITS_DEADLINE in self.bugs and said == "late":
            gone |= {(k, r)}
        # A slower rank may make the directory again behind the leader's removal: what was read counts.
        if said == NO or (
            Bug.MEMBER_REMOVES_ITS_SHARD_WHATEVER_IT_HEARS in self.bugs and said != GO
        ):
            gone |= {(k, r)}
        state = state._replace(told=state.told | {(k, r, said)}, shards=state.shards - gone)
        again = k + 1 < self.attempts
        return self._rank(state, r, Rank(k + again, "persist" if again else "done"))

    def _go(self, state: State, r: int, pc: str, said: str | None = None) -> State:
        rank = state.ranks[r]
        said = rank.said if said is None else said
        return self._rank(state, r, rank._replace(pc=pc, said=said))

    def _rank(self, state: State, r: int, rank: Rank) -> State:
        return state._replace(ranks=(*state.ranks[:r], rank, *state.ranks[r + 1 :]))

    def _index(self, attempt: int) -> int:
        return 0 if Bug.ATTEMPTS_SHARE_THEIR_KEYS in self.bugs else attempt

    def _board(self, state: State, r: int) -> Board:
        return state.boards[self._index(state.ranks[r].attempt)]

    def _write(self, state: State, r: int, board: Board) -> State:
        k = self._index(state.ranks[r].attempt)
        return state._replace(boards=(*state.boards[:k], board, *state.boards[k + 1 :]))

    def with_bug(self, bug: Bug) -> Model:
        return replace(self, bugs=frozenset({bug}))
