"""Several ranks agree, or do not; here they are threads with a TorchStore each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from ckpt_core.coordination import Ballot, TorchStore
from ckpt_core.coordination.channel import Channel
from ckpt_core.coordination.crew import Keys
from ckpt_core.coordination.gathering import Gathering
from ckpt_core.coordination.outcome import Cause, Outcome
from ckpt_core.errors import CkptError, CommitError, ConfigError, CoordinationTimeout, PersistError
from ckpt_core.types import RankInfo

Make = Callable[..., Any]
LONG_S = 50.0
SILENT = "rank 0: it has been silent"


def commit(store: TorchStore, step: int = 7, plan: str = "plan", **ballot: Any) -> tuple[Any, ...]:
    attempt = store.attempt_id(step)
    data = store.agree(attempt, step, Ballot(plan, store.info.rank, **ballot), LONG_S)
    store.settle(attempt, step, None, LONG_S)
    return data


def no_decline_is_under_way(store: TorchStore) -> None:
    """Jobs of the heartbeat run in order: when this one has, the earlier ones have."""
    done = threading.Event()
    store._session._heart.do(lambda channel: done.set())
    assert done.wait(LONG_S)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_leader_gets_the_data_of_all_and_everybody_learns_that_it_is_committed(
    ranks: Make, world_size: int
) -> None:
    crew = ranks(world_size)
    for step in range(3):
        found = crew.do(lambda store, step=step: commit(store, step))
        assert found == [tuple(range(world_size)), *[()] * (world_size - 1)]


def test_ranks_of_a_node_form_a_group_and_its_first_rank_leads(ranks: Make) -> None:
    crew = ranks(nodes="baab")
    assert [store.info for store in crew.stores] == [
        RankInfo(0, 4, (0, 3), neighbours=4),
        RankInfo(1, 4, (1, 2), neighbours=4),
        RankInfo(2, 4, (1, 2), neighbours=4),
        RankInfo(3, 4, (0, 3), neighbours=4),
    ]
    assert crew.do(commit) == [(0, 3), (1, 2), (), ()]


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_rank_that_declines_ends_the_attempt_on_every_rank(ranks: Make, who: int) -> None:
    crew = ranks(nodes="aab")

    def save(store: TorchStore) -> None:
        attempt = store.attempt_id(7)
        if store.info.rank == who:
            store.decline(attempt, 7, PersistError("no space left"))
            no_decline_is_under_way(store)
        store.agree(attempt, 7, Ballot("plan", None), LONG_S)
        store.settle(attempt, 7, None, LONG_S)

    for error in crew.do(save):
        assert isinstance(error, CommitError)
        assert list(error.failures) == [who]
        assert "no space left" in str(error)
        assert isinstance(error.failures[who], PersistError)
    assert [isinstance(one, tuple) for one in crew.do(commit)] == [True] * 3, "the next save works"


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_ranks_that_decline_the_first_is_named_to_the_others(
    ranks: Make, first: int
) -> None:
    crew = ranks(nodes="aab")
    ids = [store.attempt_id(7) for store in crew.stores]
    for rank in (first, 1 - first):
        crew.stores[rank].decline(ids[rank], 7, PersistError(f"a reason of rank {rank}"))
        no_decline_is_under_way(crew.stores[rank])
    with pytest.raises(CommitError, match=f"a reason of rank {first}") as caught:
        crew.stores[2].agree(ids[2], 7, Ballot("plan", None), LONG_S)
    assert list(caught.value.failures) == [first]
    assert [isinstance(one, tuple) for one in crew.do(commit)] == [True] * 3, "the next save works"


def test_a_rank_with_another_plan_is_named_on_every_rank(ranks: Make) -> None:
    crew = ranks(4)
    for error in crew.do(lambda store: commit(store, plan="ab"[store.info.rank in (1, 3)])):
        assert isinstance(error, CommitError)
        assert sorted(error.failures) == [1, 3]
        assert "structure" in str(error)


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("nodes", [None, "aab"])
def test_ranks_that_save_different_steps_hear_so_long_before_the_deadline(
    ranks: Make, odd: int, nodes: str | None
) -> None:
    options = {"dead_after": 1.5}
    crew = ranks(nodes=nodes, **options) if nodes else ranks(3, **options)
    assert all(isinstance(one, tuple) for one in crew.do(lambda store: commit(store, 10)))
    began = time.monotonic()
    found = crew.do(lambda store: commit(store, 12 if store.info.rank == odd else 11))
    assert time.monotonic() - began < LONG_S / 2
    for rank, error in enumerate(found):
        assert isinstance(error, CommitError), (rank, error)
        mine, other = (12, 11) if rank == odd else (11, 12)
        assert f"step {mine}" in str(error) and f"step {other}" in str(error)
        assert error.failures and 0 not in error.failures
    again = crew.do(lambda store: commit(store, 13))
    assert all(isinstance(one, tuple) for one in again), again


def test_a_rank_that_is_one_save_ahead_of_many_saves_the_same_steps(ranks: Make) -> None:
    crew = ranks(2, dead_after=1.5)
    liveness, ahead = crew.stores[0]._session._crew.liveness, threading.Event()

    def save(store: TorchStore) -> None:
        rank = store.info.rank
        attempts = [store.attempt_id(step) for step in range(10 + rank)]
        if rank == 1:
            ahead.set()
            seen = set[str]()
            until = time.monotonic() + LONG_S
            while len(seen) < 4:  # rank 0 has looked at some beats of this one meanwhile
                assert time.monotonic() < until
                seen.add(liveness.seen(1)[0])
        assert ahead.wait(LONG_S)
        store.agree(attempts[0], 0, Ballot("plan", None), LONG_S)
        store.settle(attempts[0], 0, None, LONG_S)

    assert crew.do(save) == [None, None]


def test_a_moment_without_threads_does_not_end_the_heartbeat(
    ranks: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = ranks(2, dead_after=1.5).stores[1]._session
    start, refused = threading.Thread.start, threading.Event()

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("ckpt-store"):
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for connection in session._clients._idle:
            connection.idle_since -= 1000.0  # it needs a new one
        assert refused.wait(LONG_S)
    beats, until = set[str | None](), time.monotonic() + LONG_S
    while len(beats) < 3:
        assert time.monotonic() < until
        beats.add(session._channel(LONG_S).read(session._heart._key))
        time.sleep(0.01)


class Names:
    """A Reference of one name, which is its own mark."""

    def __init__(self, name: str) -> None:
        self.name = name

    def marks(self) -> dict[str, str]:
        return {"name": self.name}

    def encode(self) -> bytes:
        return self.name.encode()

    def difference(self, one: bytes, other: bytes, rank: int) -> str | None:
        if b"raise" in (one, other):
            raise ValueError("cannot compare")
        return f"leaf {one.decode()!r} is not on rank {rank}, which has {other.decode()!r}"


@pytest.mark.parametrize(
    ("names", "odd", "right"),
    [("wwv", [2], 0), ("vww", [0], 1), ("wv", [1], 0), ("vwwv", [1, 2], 0), ("wvww", [1], 0)],
)
@pytest.mark.parametrize("nodes", [False, True])
def test_ranks_that_differ_from_most_are_named_with_the_leaf_on_every_rank(
    ranks: Make, names: str, odd: list[int], right: int, nodes: bool
) -> None:
    crew = ranks(nodes="abab"[: len(names)]) if nodes else ranks(len(names))
    before = crew.keys()
    for error in crew.do(lambda store: commit(store, reference=Names(names[store.info.rank]))):
        assert isinstance(error, CommitError)
        assert list(error.failures) == odd
        for rank in odd:
            told = f"leaf {names[rank]!r} is not on rank {right}, which has {names[right]!r}"
            assert told in str(error.failures[rank]) and told in str(error)
    assert crew.keys() == before, "what was exchanged is deleted"
    found = crew.do(lambda store: commit(store, reference=Names("w")))
    assert all(isinstance(one, tuple) for one in found), "the next save works"


def test_another_plan_is_explained_as_well(ranks: Make) -> None:
    crew = ranks(3)

    def save(store: TorchStore) -> None:
        name = "wvw"[store.info.rank]
        commit(store, plan=name, reference=Names(name))

    for error in crew.do(save):
        assert list(error.failures) == [1]
        assert "leaf 'v' is not on rank 0" in str(error)


def test_marks_that_are_equal_or_given_by_some_ranks_only_pass(ranks: Make) -> None:
    crew = ranks(3)
    for holders in ({0, 1, 2}, {0}, {1, 2}, {0, 2}):
        found = crew.do(
            lambda store, holders=holders: commit(
                store, reference=Names("w") if store.info.rank in holders else None
            )
        )
        assert found == [(0, 1, 2), (), ()]


def test_a_comparison_that_raises_fails_the_save_and_leaves_nobody_waiting(ranks: Make) -> None:
    crew = ranks(2)
    names = ["w", "raise"]
    for error in crew.do(lambda store: commit(store, reference=Names(names[store.info.rank]))):
        assert isinstance(error, CommitError)
        assert "cannot compare" in str(error)


@pytest.mark.parametrize("who", [0, 2])
def test_a_leader_that_cannot_publish_fails_the_step_everywhere(ranks: Make, who: int) -> None:
    crew = ranks(nodes="aabb")

    def save(store: TorchStore) -> None:
        attempt = store.attempt_id(7)
        store.agree(attempt, 7, Ballot("plan", None), LONG_S)
        failed = OSError(5, "Input/output error") if store.info.rank == who else None
        store.settle(attempt, 7, failed, LONG_S)

    for error in crew.do(save):
        assert isinstance(error, CommitError)
        assert list(error.failures) == [who]
        assert "not committed in every root" in str(error)
        assert isinstance(error.failures[who], OSError)


def test_two_attempts_voted_in_opposite_order_do_not_deadlock(ranks: Make) -> None:
    crew = ranks(nodes="ab")

    def save(store: TorchStore) -> list[tuple[Any, ...]]:
        steps = (1, 2) if store.info.rank == 0 else (2, 1)
        ids = {step: store.attempt_id(step) for step in steps}
        entered = threading.Event()
        found: list[tuple[Any, ...]] = []

        def one(step: int) -> None:
            entered.set()
            found.append(store.agree(ids[step], step, Ballot("plan", step), LONG_S))
            store.settle(ids[step], step, None, LONG_S)

        threads = []
        for step in steps:
            threads.append(threading.Thread(target=one, args=(step,)))
            threads[-1].start()
            assert entered.wait(LONG_S)
            entered.clear()
        for thread in threads:
            thread.join(LONG_S)
        return sorted(found)

    assert crew.do(save) == [[(1,), (2,)]] * 2


def test_a_rank_that_does_not_vote_in_time_is_named_and_its_late_vote_is_harmless(
    ranks: Make,
) -> None:
    crew = ranks(3)
    late = crew.stores[2].attempt_id(7)

    def save(store: TorchStore) -> None:
        if store.info.rank != 2:
            attempt = store.attempt_id(7)
            store.agree(attempt, 7, Ballot("plan", None), 6.0)
            store.settle(attempt, 7, None, LONG_S)

    errors = crew.do(save)[:2]
    for error in errors:
        assert isinstance(error, CoordinationTimeout)
        assert error.rank == 2
        assert "rank 2: it has not voted in time" in str(error)
    assert crew.stores[2].agree(late, 7, Ballot("plan", None), LONG_S) == ()
    with pytest.raises(CoordinationTimeout, match="rank 2: it has not voted in time"):
        crew.stores[2].settle(late, 7, None, LONG_S)
    assert crew.do(commit) == [(0, 1, 2), (), ()]


def test_votes_that_are_repeated_or_stale_change_nothing(ranks: Make) -> None:
    crew = ranks(3)
    ids = [store.attempt_id(1) for store in crew.stores]
    for _ in range(3):
        assert crew.stores[1].agree(ids[1], 1, Ballot("plan", 1), LONG_S) == ()
    first = crew.do(
        lambda store: (
            store.agree(ids[store.info.rank], 1, Ballot("plan", 0), LONG_S),
            store.settle(ids[store.info.rank], 1, None, LONG_S),
        )
    )
    assert [one[0] for one in first] == [(0, 0, 0), (), ()]
    for store in crew.stores:
        with pytest.raises(CommitError, match="has ended"):
            store.agree(ids[0], 1, Ballot("plan", 9), LONG_S)
        store.decline(ids[0], 1, RuntimeError("stale"))
    crew.do(no_decline_is_under_way)
    keys = crew.keys()
    assert crew.do(commit) == [(0, 1, 2), (), ()]
    crew.do(no_decline_is_under_way)
    assert crew.keys() == keys


def test_a_rank_that_has_closed_is_named_at_once(ranks: Make) -> None:
    crew = ranks(3, dead_after=5.0)
    crew.stores[1].close()
    found = crew.do(lambda store: None if store.info.rank == 1 else commit(store))
    for error in (found[0], found[2]):
        assert isinstance(error, CoordinationTimeout)
        assert "rank 1: it has closed its TorchStore" in str(error)
    with pytest.raises(ConfigError, match="is closed"):
        commit(crew.stores[1])


class Stopped:
    """Rank 0 does not beat, so that the others hold it for dead; it lives all the same."""

    def __init__(self, store: TorchStore) -> None:
        self.heart = store._session._heart
        self.go_on = threading.Event()

    def __enter__(self) -> None:
        def sleep(channel: Channel) -> None:
            self.go_on.wait(LONG_S)

        self.heart.do(sleep)

    def __exit__(self, *error: object) -> None:
        self.go_on.set()


def test_rank_0_that_was_held_for_dead_hears_at_once_how_the_attempt_has_ended(ranks: Make) -> None:
    crew = ranks(2, dead_after=1.5)
    with Stopped(crew.stores[0]):
        late = crew.stores[0].attempt_id(7)
        with pytest.raises(CoordinationTimeout, match=SILENT):
            commit(crew.stores[1])
    began = time.monotonic()
    with pytest.raises(CoordinationTimeout, match=SILENT):
        crew.stores[0].agree(late, 7, Ballot("plan", None), LONG_S)
    assert time.monotonic() - began < LONG_S / 2
    assert crew.do(commit) == [(0, 1), ()], "the next save works"


def test_rank_0_waits_for_no_slow_rank_where_another_has_ended_the_attempt(ranks: Make) -> None:
    crew = ranks(3, dead_after=1.5)
    ids = [store.attempt_id(7) for store in crew.stores]
    crew.stores[1].agree(ids[1], 7, Ballot("plan", None), LONG_S)
    with Stopped(crew.stores[0]), pytest.raises(CoordinationTimeout, match=SILENT):
        crew.stores[1].settle(ids[1], 7, None, LONG_S)
    began = time.monotonic()
    with pytest.raises(CoordinationTimeout, match=SILENT):
        crew.stores[0].agree(ids[0], 7, Ballot("plan", None), LONG_S)
    assert time.monotonic() - began < LONG_S / 2
    crew.stores[2].agree(ids[2], 7, Ballot("plan", None), LONG_S)
    with pytest.raises(CoordinationTimeout, match=SILENT):
        crew.stores[2].settle(ids[2], 7, None, LONG_S)


def test_a_rank_that_skipped_a_step_ends_no_later_save_of_rank_0_by_the_deadline_alone(
    ranks: Make,
) -> None:
    crew = ranks(2, dead_after=1.5)
    found = crew.do(lambda store: commit(store, 11 + store.info.rank))
    assert all(isinstance(error, CommitError) for error in found)
    began = time.monotonic()
    with pytest.raises(CommitError, match="step 12"):
        commit(crew.stores[0], 12)
    assert time.monotonic() - began < LONG_S / 2


@pytest.mark.parametrize("nodes", ["aa", "baa"])
def test_a_member_that_gives_up_after_its_vote_keeps_nobody_from_publishing(
    ranks: Make, nodes: str
) -> None:
    crew = ranks(nodes=nodes)
    member, ids = len(nodes) - 1, [store.attempt_id(7) for store in crew.stores]
    crew.stores[member].agree(ids[member], 7, Ballot("plan", member), LONG_S)
    # The gate is ready when it leaves, and nobody has looked at the votes.
    channel = crew.stores[0]._session._channel(LONG_S)
    keys = crew.stores[member]._session._live[ids[member]].attempt.keys
    channel.put_first(keys.gate, Outcome().encode())
    crew.stores[member].decline(ids[member], 7, RuntimeError("it leaves"))
    no_decline_is_under_way(crew.stores[member])

    def save(store: TorchStore) -> object:
        rank = store.info.rank
        if rank == member:
            return None
        data = store.agree(ids[rank], 7, Ballot("plan", rank), LONG_S)
        store.settle(ids[rank], 7, None, LONG_S)
        return data

    began = time.monotonic()
    assert crew.do(save)[:-1] == ([(0, 1)] if nodes == "aa" else [(0,), (1, 2)])
    assert time.monotonic() - began < LONG_S / 2


def test_rank_0_that_finds_a_decision_writes_the_verdict_that_its_author_could_not(
    ranks: Make,
) -> None:
    crew = ranks(2)
    ids = [store.attempt_id(7) for store in crew.stores]
    crew.stores[1].agree(ids[1], 7, Ballot("plan", None), LONG_S)
    keys = crew.stores[1]._session._live[ids[1]].attempt.keys
    channel = crew.stores[1]._session._channel(LONG_S)
    no = Outcome({0: Cause.lost("it was held for dead")}).encode()
    channel.put_first(keys.decision, no)
    began = time.monotonic()
    with pytest.raises(CoordinationTimeout, match="it was held for dead"):
        crew.stores[0].agree(ids[0], 7, Ballot("plan", None), LONG_S)
    with pytest.raises(CoordinationTimeout, match="it was held for dead"):
        crew.stores[1].settle(ids[1], 7, None, LONG_S)
    assert time.monotonic() - began < LONG_S / 2


@pytest.mark.parametrize("why", ["a decision stands", "it has closed"])
def test_a_vote_that_was_counted_and_never_comes_is_not_awaited_by_the_deadline_alone(
    ranks: Make, why: str
) -> None:
    crew = ranks(2, dead_after=1.5)
    attempt = crew.stores[0].attempt_id(7)
    channel = crew.stores[1]._session._channel(LONG_S)
    keys = Keys(crew.stores[0]._session._crew, attempt)
    channel.count(keys.count)
    if why == "it has closed":
        crew.stores[1].close()
    else:
        channel.put_first(keys.decision, Outcome({1: Cause.lost(why)}).encode())
    began = time.monotonic()
    with pytest.raises(CoordinationTimeout, match=f"rank 1: {why}"):
        crew.stores[0].agree(attempt, 7, Ballot("plan", None), LONG_S)
    assert time.monotonic() - began < LONG_S / 2


def test_rank_0_closing_ends_what_the_others_wait_for(ranks: Make) -> None:
    crew = ranks(3, dead_after=5.0)
    crew.stores[0].close()
    found = crew.do(lambda store: None if store.info.rank == 0 else commit(store))
    for error in found[1:]:
        assert isinstance(error, CoordinationTimeout)
        assert "rank 0: it has closed its TorchStore" in str(error)


def test_closing_ends_the_attempts_of_its_own_threads(ranks: Make) -> None:
    crew = ranks(2, dead_after=5.0)
    entered = threading.Event()

    def save(store: TorchStore) -> None:
        if store.info.rank == 0:
            entered.set()
            commit(store)
        else:
            assert entered.wait(LONG_S)
            crew.stores[0].close()

    error = crew.do(save)[0]
    assert isinstance(error, CkptError)


def test_gather_gives_everybody_everything_in_rank_order(ranks: Make) -> None:
    crew = ranks(4)
    for turn in range(3):
        found = crew.do(
            lambda store, turn=turn: store.gather("steps", [store.info.rank, turn], LONG_S)
        )
        assert found == [tuple([rank, turn] for rank in range(4))] * 4
    assert crew.do(lambda store: store.gather("other", None, LONG_S)) == [(None,) * 4] * 4


def test_what_one_rank_tells_is_there_for_all_and_the_first_word_stands(ranks: Make) -> None:
    made = ranks(2)
    assert made.do(lambda store: store.told("news", 60.0)) == [None, None]
    assert made.stores[1].tell_once("news", {"step": 3}, 60.0) == {"step": 3}
    assert made.stores[0].tell_once("news", {"step": 4}, 60.0) == {"step": 3}
    assert made.do(lambda store: store.told("news", 60.0)) == [{"step": 3}, {"step": 3}]


def test_gather_names_the_rank_that_does_not_come(ranks: Make) -> None:
    crew = ranks(3)
    found = crew.do(lambda store: store.info.rank == 1 or store.gather("steps", 1, 2.0))
    for error in (found[0], found[2]):
        assert isinstance(error, CoordinationTimeout)
        assert error.rank == 1
    with pytest.raises(CoordinationTimeout, match="rank 1: it has not called"):
        crew.stores[1].gather("steps", 1, LONG_S)


def test_a_rank_with_an_earlier_deadline_than_rank_0_names_the_rank_that_does_not_come(
    ranks: Make,
) -> None:
    crew = ranks(4)
    limits = [6.0, None, 3.0, 3.0]

    def come(store: TorchStore) -> object:
        limit = limits[store.info.rank]
        return limit and store.gather("steps", 1, limit)

    found = crew.do(come)
    for error in (found[0], found[2], found[3]):
        assert isinstance(error, CoordinationTimeout)
        assert error.rank == 1 and "rank 1: it has not called" in str(error)


def test_a_rank_that_has_waited_in_vain_lets_nobody_else_go_on(ranks: Make) -> None:
    crew = ranks(3)
    waited = threading.Event()

    def come(store: TorchStore) -> object:
        if store.info.rank == 0:
            assert waited.wait(LONG_S)
        try:
            return store.gather("steps", 1, 1.0 if store.info.rank == 1 else LONG_S)
        finally:
            if store.info.rank == 1:
                waited.set()

    for error in crew.do(come):
        assert isinstance(error, CoordinationTimeout) and error.rank == 0


def test_where_rank_0_has_given_a_rank_up_and_says_no_more_that_rank_is_named(
    ranks: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = ranks(3)
    give_up, given_up = Gathering._give_up, threading.Event()

    def stop_then(*arguments: Any) -> None:
        give_up(*arguments)
        if arguments[2] == 2:
            given_up.set()
            raise KeyboardInterrupt

    monkeypatch.setattr(Gathering, "_give_up", stop_then)
    found = crew.do(lambda store: store.info.rank == 1 or store.gather("steps", 1, 3.0))
    assert given_up.is_set() and isinstance(found[0], KeyboardInterrupt)
    assert isinstance(found[2], CoordinationTimeout) and found[2].rank == 1


def test_rank_0_does_not_wait_for_a_value_where_another_rank_has_ended_the_exchange(
    ranks: Make,
) -> None:
    crew = ranks(3, dead_after=1.5)
    with Stopped(crew.stores[0]), pytest.raises(CoordinationTimeout, match=SILENT):
        crew.stores[1].gather("steps", 1, LONG_S)
    began = time.monotonic()
    for rank in (0, 2):
        with pytest.raises(CoordinationTimeout, match=SILENT):
            crew.stores[rank].gather("steps", 1, LONG_S)
    assert time.monotonic() - began < LONG_S / 2


def test_five_hundred_attempts_leave_nothing_in_the_store(ranks: Make) -> None:
    crew = ranks(nodes="ab")
    crew.do(lambda store: store.gather("steps", 1, LONG_S))
    before = crew.keys()

    def save_many(store: TorchStore) -> None:
        for step in range(500):
            attempt = store.attempt_id(step)
            if step % 5 == 4 and store.info.rank == 1:
                store.decline(attempt, step, RuntimeError("not this one"))
                continue
            try:
                store.agree(attempt, step, Ballot("plan", None), LONG_S)
                store.settle(attempt, step, None, LONG_S)
            except CommitError:
                assert step % 5 == 4
        no_decline_is_under_way(store)

    assert crew.do(save_many) == [None, None]
    assert crew.keys() == before


def test_what_a_dead_rank_never_acknowledges_is_deleted_in_time(ranks: Make) -> None:
    crew = ranks(2)
    before = crew.keys()

    def save_many(store: TorchStore) -> None:
        for step in range(150):
            attempt = store.attempt_id(step)
            if store.info.rank == 0:
                store.decline(attempt, step, RuntimeError("the other rank never hears of it"))
        no_decline_is_under_way(store)

    crew.do(save_many)
    assert crew.keys() - before <= 64 * 5


def test_many_ranks_agree(ranks: Make) -> None:
    crew = ranks(nodes="abcd" * 6)
    assert len(crew.stores[0].info.members) == 6
    for step in range(3):
        found = crew.do(lambda store, step=step: commit(store, step))
        assert sorted(rank for data in found for rank in data) == list(range(24))


def test_attempt_ids_are_equal_on_all_ranks_without_a_word(ranks: Make) -> None:
    crew = ranks(3)
    steps = (5, 6, 5, 5, 6)
    found = crew.do(lambda store: [store.attempt_id(step) for step in steps])
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == len(steps)
    again = ranks(3)
    assert again.stores[0].attempt_id(5) != found[0][0], "another run, other ids"


class Sum:
    """What the leaders say aside: a number each; all leaders hear the sum."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.heard: list[int] = []

    def say(self) -> int:
        return self.number

    def conclude(self, said: Any) -> int:
        return sum(one for one in said if one is not None)

    def hear(self, concluded: int) -> None:
        self.heard.append(concluded)


def test_what_leaders_say_aside_is_concluded_by_rank_0_and_heard_by_all_leaders(
    ranks: Make,
) -> None:
    crew = ranks(nodes="aabc")
    asides = [Sum(1), None, Sum(10), Sum(100)]
    crew.do(lambda store: commit(store, aside=asides[store.info.rank]))
    assert [one.heard for one in asides if one is not None] == [[111]] * 3


def test_nothing_said_aside_is_heard_of_an_attempt_that_is_not_published(ranks: Make) -> None:
    crew = ranks(nodes="ab")
    asides = [Sum(1), Sum(10)]

    def differ(store: TorchStore) -> None:
        rank = store.info.rank
        with pytest.raises(CommitError):
            commit(store, plan=f"plan of rank {rank}", aside=asides[rank])

    crew.do(differ)
    assert [one.heard for one in asides] == [[], []]
