"""One rank's part in a run: the attempts under way, who is told what, and an orderly end."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from ckpt_core.coordination.agreement import Ballot, Json
from ckpt_core.coordination.attempt import Attempt
from ckpt_core.coordination.begun import Begun
from ckpt_core.coordination.channel import Channel
from ckpt_core.coordination.client import Clients, StoreGone
from ckpt_core.coordination.crew import Crew
from ckpt_core.coordination.gathering import Gathering, Gatherings
from ckpt_core.coordination.heartbeat import Heartbeat, Liveness
from ckpt_core.coordination.meeting import Run
from ckpt_core.coordination.options import StoreOptions
from ckpt_core.coordination.outcome import Words
from ckpt_core.errors import CkptError, CommitError, ConfigError, CoordinationTimeout
from ckpt_core.system.threads import at_exit, own_lock
from ckpt_core.types import RankInfo

_REMEMBERED = 256
"""So many attempts that have ended are remembered, so that a late call for one of them is recognised."""

_STEPS_COUNTED = 10_000
_UNREAPED = 64
"""After so many more attempts, rank 0 deletes the keys of one that a dead rank has never acknowledged."""

_LINGER_S = 10.0
_FAREWELL_S = 2.0


@dataclass(slots=True)
class _Part:
    """This rank's part in one attempt.

    Attributes:
        attempt: what it knows.
        busy: threads inside `agree` or `settle`.
        telling: the heartbeat has still to tell the others that this rank declines.
        cut_off: the store did not answer, so that nothing more is asked of it.
    """

    attempt: Attempt
    busy: int = 0
    telling: bool = False
    cut_off: bool = False


class Session:
    """What a TorchStore does once its ranks have met; see `Coordination` for the methods of that name."""

    def __init__(self, clients: Clients, run: Run, rank: int, options: StoreOptions) -> None:
        groups = run.groups()
        group = None if list(groups) == [None] else groups[run.nodes[rank]]
        liveness = Liveness(run.beat_key, beat_s=options.beat_s, dead_after_s=options.dead_after_s)
        neighbours = run.hosts.count(run.hosts[rank])
        self.info = RankInfo(rank, len(run.nodes), group, neighbours)
        leaders = tuple(ranks[0] for ranks in groups.values())
        self._begun = Begun()
        self._crew = Crew(self.info, leaders, run.prefix, liveness, self._begun)
        self._clients = clients
        self._options = options
        self._pid = os.getpid()
        self._lock = own_lock()
        self._closed = self._lingered = self._left = False
        self._live: dict[str, _Part] = {}
        self._ended: OrderedDict[str, Words | None] = OrderedDict()
        self._times: OrderedDict[int, int] = OrderedDict()
        self._word = ""
        self._gatherings = Gatherings(self._crew)
        self._unreaped: deque[Attempt | Gathering] = deque()
        self._heart = Heartbeat(
            lambda: self._channel(options.beat_s),
            run.beat_key(rank),
            options.beat_s,
            self._begun.under_way,
        )
        # After a Checkpointer's own (priority 10).
        self._at_exit = at_exit(self.close, self.close, priority=5)

    # -- what ranks do together ------------------------------------------------------------------

    def gather(self, topic: str, value: Json, timeout_s: float) -> tuple[Json, ...]:
        """See Coordination."""
        self._check_here()
        text = json.dumps(
            value
        )  # a value that is no JSON fails here, on this rank, before anything
        gathering = self._gatherings.begin(topic)
        channel = self._channel(timeout_s)
        with self._exchanging(topic):
            try:
                return gathering.run(channel, json.loads(text))
            finally:
                self._reap_later(gathering, channel)

    def call_id(self) -> str:
        """See Coordination."""
        return self._gatherings.call_id()

    def leave(self, call: str, mine: Json, others: Json) -> None:
        """See Coordination."""

        def tell(channel: Channel) -> None:
            for gathering in self._gatherings.leave(channel, call, mine, others):
                self._reap_later(gathering, channel)

        if os.getpid() == self._pid:
            self._gatherings.begun(call)
            self._heart.do(tell)

    def tell_once(self, topic: str, value: Json, timeout_s: float) -> Json:
        """See TorchStore."""
        self._check_here()
        with self._exchanging(topic):
            return json.loads(
                self._channel(timeout_s).put_first(self._told_key(topic), json.dumps(value))
            )

    def told(self, topic: str, timeout_s: float) -> Json | None:
        """See TorchStore."""
        self._check_here()
        with self._exchanging(topic):
            text = self._channel(timeout_s).read(self._told_key(topic))
        return None if text is None else json.loads(text)

    def _told_key(self, topic: str) -> str:
        return f"{self._crew.prefix}/told/{topic}"

    @contextlib.contextmanager
    def _exchanging(self, topic: str) -> Iterator[None]:
        try:
            yield
        except StoreGone as exc:
            raise CommitError(
                f"the ranks could not exchange {topic!r}: {exc}. Nothing was changed. Look for the process "
                f"that keeps the store ({self._clients.address.kept_by})",
                failures=self._blamed(exc),
                rank=self.info.rank,
            ) from exc

    def attempt_id(self, step: int) -> str:
        """See Coordination."""
        while len(self._times) > _STEPS_COUNTED:
            self._times.popitem(last=False)
        number = self._times.get(step, 0)
        if number:
            self._times.move_to_end(step)
        drawn = xxhash.xxh32_hexdigest(f"{self._crew.prefix}{self._word}/{step}/{number}".encode())
        name = f"{step:012d}-{drawn}"
        self._begun.add(name)
        # Order matters: no interrupt comes between the two, so that whoever has drawn it knows it. The ranks
        # would draw different ones from then on.
        self._times[step] = number + 1
        return name

    def count_anew(self, word: str) -> None:
        """See Coordination."""
        self._word = f"/{word}"
        self._times.clear()

    def agree(
        self, attempt_id: str, step: int, ballot: Ballot, timeout_s: float
    ) -> tuple[Json, ...]:
        """See Coordination."""
        channel = self._channel(timeout_s)
        with self._taking_part(attempt_id, step, channel) as part:
            try:
                return part.attempt.agree(channel, ballot)
            except StoreGone as exc:
                part.cut_off = True
                raise self._cut_off(part.attempt, exc) from exc

    def settle(
        self, attempt_id: str, step: int, error: BaseException | None, timeout_s: float
    ) -> None:
        """See Coordination."""
        channel = self._channel(timeout_s)
        with self._taking_part(attempt_id, step, channel) as part:
            try:
                part.attempt.settle(channel, error)
            except StoreGone as exc:
                part.cut_off = True
                raise self._unsettled(step, error, exc) from (error or exc)
            self._end(attempt_id, None, channel)

    def decline(self, attempt_id: str, step: int, error: BaseException) -> None:
        """See Coordination."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if attempt_id in self._ended or self._closed:
                return
            part = self._part(attempt_id, step)
            if not part.attempt.refuse(error):
                return
            part.telling = True
        self._heart.do(lambda channel: self._tell_refusal(attempt_id, part, channel))

    def refusal(self, attempt_id: str, step: int, timeout_s: float) -> CkptError | None:
        """See Coordination."""
        channel = self._channel(timeout_s)
        with (
            contextlib.suppress(CkptError, StoreGone),
            self._taking_part(attempt_id, step, channel) as part,
        ):
            outcome = part.attempt.refusal(channel)
            return None if outcome is None or outcome.ok else outcome.error(step)
        return None

    # -- the life of an attempt ------------------------------------------------------------------

    @contextlib.contextmanager
    def _taking_part(self, attempt_id: str, step: int, channel: Channel) -> Iterator[_Part]:
        """While inside, this rank may still use the attempt's keys; an error ends it here."""
        self._check_here()
        with self._lock:
            if attempt_id in self._ended:
                raise self._over(attempt_id, step)
            part = self._part(attempt_id, step)
            part.busy += 1
        error: CkptError | None = None
        try:
            yield part
        except CkptError as exc:
            error = exc
            raise
        finally:
            with self._lock:
                part.busy -= 1
                # While the heartbeat tells the others that this rank declines, it uses the keys: then it
                # ends the attempt. Exactly one of the two does.
                mine = part.busy == 0 and not part.telling
            if mine and (error is not None or part.attempt.own is not None):
                self._end(attempt_id, error or self._declined(part.attempt), channel)

    def _part(self, attempt_id: str, step: int) -> _Part:
        if attempt_id not in self._live:
            self._live[attempt_id] = _Part(Attempt(self._crew, attempt_id, step))
        return self._live[attempt_id]

    def _tell_refusal(self, attempt_id: str, part: _Part, channel: Channel) -> None:
        try:
            part.attempt.tell_refusal(channel)
        except StoreGone:
            part.cut_off = True
            raise
        finally:
            with self._lock:
                part.telling = False
                idle = part.busy == 0
            if idle:
                self._end(attempt_id, self._declined(part.attempt), channel)

    def _end(self, attempt_id: str, error: CkptError | None, channel: Channel) -> None:
        """Nothing here will use the attempt's keys again."""
        self._begun.ended(attempt_id)
        with self._lock:
            part = self._live.pop(attempt_id, None)
            if part is None:
                return
            self._ended[attempt_id] = None if error is None else Words.of(error)
            while len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
        if part.cut_off:
            return
        # How it ended is known; whether the store is tidied up changes nothing about it.
        with contextlib.suppress(StoreGone):
            part.attempt.finish(channel)
            self._reap_later(part.attempt, channel)

    def _reap_later(self, item: Attempt | Gathering, channel: Channel) -> None:
        if self.info.rank != 0:
            return
        with self._lock:
            self._unreaped.append(item)
            oldest = self._unreaped.popleft() if len(self._unreaped) > _UNREAPED else None
        if oldest is not None:
            oldest.reap(channel)

    # -- leaving ---------------------------------------------------------------------------------

    def close(self) -> None:
        """See Coordination. Takes at most some seconds, also when the store is gone."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._left:
                return
            live = dict(self._live)
        for attempt_id, part in live.items():
            error = CommitError(
                f"rank {self.info.rank} has closed its TorchStore", rank=self.info.rank
            )
            self.decline(attempt_id, part.attempt.step, error)
        with self._lock:
            self._closed = True
        self._heart.stop(_FAREWELL_S)
        if self.info.rank == 0 and not self._lingered:
            # Not twice: whoever interrupts it does not want to wait.
            self._lingered = True
            self._linger()
        self._clients.close()
        # Last: interrupted before, it can be closed again.
        self._at_exit.cancel()
        self._left = True

    def keep(self, store: object) -> None:
        """Hold a reference to a store of this process until `close`."""
        self._clients.kept.append(store)

    def _linger(self) -> None:
        """Rank 0 may keep the store: stay until the others have read how their attempts ended."""
        linger_s = min(self._options.dead_after_s, _LINGER_S)
        channel = self._channel(linger_s)
        others = range(1, self.info.world_size)
        with contextlib.suppress(StoreGone):
            while others and time.monotonic() < channel.deadline:
                with self._lock:
                    waiting = list(self._unreaped)
                if not any(item.is_pending(channel) for item in waiting):
                    return
                if len(self._crew.liveness.look(channel, others)) == len(others):
                    return
                time.sleep(0.02)

    # -- small things ----------------------------------------------------------------------------

    def _channel(self, timeout_s: float) -> Channel:
        return Channel(self._clients, time.monotonic() + timeout_s, self._options.beat_s)

    def _check_here(self) -> None:
        if os.getpid() != self._pid:
            raise ConfigError(
                "this process was forked from the one that made the TorchStore: save and restore there"
            )
        if self._closed:
            raise ConfigError("this TorchStore is closed: make a new one on every rank")

    def _blamed(self, exc: StoreGone) -> dict[int, BaseException]:
        by_rank_0 = self._clients.address.kept_by == "rank 0" and self.info.rank != 0
        return {0: CoordinationTimeout(str(exc), rank=0)} if by_rank_0 else {}

    def _cut_off(self, attempt: Attempt, exc: StoreGone) -> CkptError:
        # A vote that was under way may have counted, and then the leader of this rank may publish.
        state = _state_of(attempt, self.info)
        return CommitError(
            f"step {attempt.step} {state}: {exc}. Committed steps are safe. Look for the process that keeps "
            f"the store ({self._clients.address.kept_by})",
            failures=self._blamed(exc),
            step=attempt.step,
            rank=self.info.rank,
        )

    def _unsettled(self, step: int, error: BaseException | None, exc: StoreGone) -> CkptError:
        if error is not None:
            return CommitError(
                f"step {step} is not committed: {error}; and the other ranks could not be told: {exc}. "
                "Committed steps are safe",
                failures={self.info.rank: error},
                step=step,
                rank=self.info.rank,
            )
        return CoordinationTimeout(
            f"step {step} may be committed or not (look at `steps()`): {exc}. Committed steps are safe. Look "
            f"for the process that keeps the store ({self._clients.address.kept_by})",
            step=step,
            rank=self.info.rank,
        )

    def _declined(self, attempt: Attempt) -> CkptError:
        state = _state_of(attempt, self.info)
        text = f"step {attempt.step} {state}: rank {self.info.rank} declined: {attempt.own}"
        assert attempt.own is not None
        return CommitError(text, failures={self.info.rank: attempt.own}, step=attempt.step)

    def _over(self, attempt_id: str, step: int) -> CkptError:
        words = self._ended[attempt_id]
        if words is not None:
            return words.error()
        return CommitError(
            f"step {step}: the attempt {attempt_id} has ended before, well", step=step
        )


def _state_of(attempt: Attempt, info: RankInfo) -> str:
    """What a rank knows of an attempt that it has left."""
    if attempt.voted and not info.leads:
        return "may be committed or not (look at `steps()`)"
    return "is not committed"
