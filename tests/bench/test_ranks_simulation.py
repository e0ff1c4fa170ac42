"""The simulation of commits: its store obeys TCPStore's rules, and its ranks send what real ones send."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch.distributed as dist

from ckpt_core.bench.ranks.commit_messages import BEAT_S, commit, simulate
from ckpt_core.bench.ranks.planning import planned, small, transformer
from ckpt_core.bench.ranks.simulation import Client, Costs, Request, Simulation, Verb
from ckpt_core.coordination import Ballot, StoreOptions, TorchStore

COSTS = Costs(message_s=1.0, key_s=0.25, latency_s=10.0, client_s=100.0)
CHEAP = Costs(message_s=1e-5, key_s=1e-7, latency_s=1e-4, client_s=1e-4)
ports = itertools.count()


def one(*requests: Request) -> Client:
    return (request for request in requests)


def ask(verb: Verb, *keys: str) -> Request:
    return Request(verb, keys)


def test_an_answer_costs_client_network_store_and_network_again() -> None:
    simulation = Simulation(COSTS)
    simulation.add(one(ask(Verb.ADD, "a"), ask(Verb.CHECK, "a", "b", "c")))
    simulation.run()
    assert simulation.ended_s[0] == (100 + 10 + 1 + 10) + (100 + 10 + 1.5 + 10)
    assert (simulation.messages, simulation.busy_s) == (2, 2.5)


def test_nobody_waits_for_a_set_to_arrive() -> None:
    simulation = Simulation(COSTS)
    simulation.add(one(ask(Verb.SET, "a")))
    simulation.run()
    assert simulation.ended_s[0] == 100


def test_the_store_serves_one_message_after_the_other() -> None:
    simulation = Simulation(COSTS)
    for _ in range(3):
        simulation.add(one(ask(Verb.ADD, "a")))
    simulation.run()
    assert sorted(simulation.ended_s.values()) == [121, 122, 123]


def test_clients_that_share_a_processor_go_one_after_the_other() -> None:
    simulation = Simulation(Costs(1.0, 0.25, 10.0, 100.0, shared=True))
    for _ in range(3):
        simulation.add(one(ask(Verb.ADD, "a")))
    simulation.run()
    assert sorted(simulation.ended_s.values()) == [121, 221, 321]


def test_a_wait_ends_when_the_last_of_its_keys_is_set() -> None:
    simulation = Simulation(COSTS)
    waiting = simulation.add(one(ask(Verb.WAIT, "a", "b")))
    simulation.add(one(ask(Verb.SET_FIRST, "a")), at=500)
    simulation.add(one(ask(Verb.SET_FIRST, "b")), at=1000)
    simulation.run()
    assert simulation.ended_s[waiting] == 1000 + 100 + 10 + 1 + 1 + 10  # set, then told


def test_a_heartbeat_delays_others_and_keeps_nobody() -> None:
    simulation = Simulation(COSTS)
    simulation.repeat(ask(Verb.SET, "beat"), first=110, every=1000)
    simulation.add(one(ask(Verb.ADD, "a")))
    simulation.run()
    assert simulation.ended_s[0] == 122


class Counting(dist.TCPStore):
    """A TCPStore that counts what its clients ask, as messages."""

    counts: ClassVar[Counter[str]] = Counter()
    counting = threading.Event()
    lock = threading.Lock()

    def _note(self, *verbs: Verb) -> None:
        if self.counting.is_set():
            with self.lock:
                self.counts.update(verbs)

    def set(self, *args: Any) -> Any:
        self._note(Verb.SET)
        return super().set(*args)

    def compare_set(self, *args: Any) -> Any:
        self._note(Verb.SET_FIRST)
        return super().compare_set(*args)

    def add(self, *args: Any) -> Any:
        self._note(Verb.ADD)
        return super().add(*args)

    def check(self, *args: Any) -> Any:
        self._note(Verb.CHECK)
        return super().check(*args)

    def get(self, *args: Any) -> Any:
        self._note(Verb.WAIT, Verb.GET)
        return super().get(*args)

    def multi_get(self, *args: Any) -> Any:
        self._note(Verb.WAIT, Verb.GET)
        return super().multi_get(*args)

    def delete_key(self, *args: Any) -> Any:
        self._note(Verb.DELETE)
        return super().delete_key(*args)

    def wait(self, *args: Any) -> Any:
        self._note(Verb.WAIT)
        return super().wait(*args)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Counting]]:
    monkeypatch.setattr(dist, "TCPStore", Counting)
    Counting.counts.clear()
    yield Counting
    Counting.counting.clear()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_simulated_ranks_send_exactly_what_real_ranks_send(
    ranks: int, counting: type[Counting]
) -> None:
    server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    # No beat comes in between, since the first one is due after a fifth of this.
    options = StoreOptions(dead_after=600, name=str(next(ports)))

    def join(rank: int) -> TorchStore:
        return TorchStore("127.0.0.1", server.port, rank=rank, world_size=ranks, options=options)

    def take_part(store: TorchStore) -> None:
        attempt = store.attempt_id(1)
        store.agree(attempt, 1, Ballot("plan", store.info.rank), 30)
        store.settle(attempt, 1, None, 30)

    with ThreadPoolExecutor(ranks) as pool:
        stores = list(pool.map(join, range(ranks)))
        try:
            counting.counting.set()
            list(pool.map(take_part, stores))
            counting.counting.clear()
        finally:
            for store in reversed(stores):
                store.close()
    assert counting.counts == expected_verbs(ranks)
    assert counting.counts.total() == simulate(ranks, CHEAP, beat_s=None).messages


def expected_verbs(ranks: int) -> Counter[str]:
    verbs: Counter[str] = Counter()

    def noted(client: Client) -> Client:
        answer = None
        while True:
            try:
                request = next(client) if answer is None else client.send(answer)
            except StopIteration:
                return
            verbs[request.verb] += 1
            answer = yield request

    simulation = Simulation(CHEAP)
    for rank in range(ranks):
        simulation.add(noted(commit(rank, ranks, lambda: None)))
    simulation.run()
    return verbs


def test_every_rank_learns_the_verdict_and_the_last_one_tidies_up() -> None:
    found = simulate(300, CHEAP, beat_s=None)
    assert 0 < found.verdict_s < found.settled_s
    assert found.store_busy_s <= found.settled_s
    alone = simulate(1, CHEAP, beat_s=None)
    assert found.messages == alone.messages + 299 * 8


def test_votes_that_come_one_by_one_leave_less_to_do_after_the_last() -> None:
    at_once = simulate(300, CHEAP)
    spread = simulate(300, CHEAP, spread_s=1.0)
    assert spread.verdict_s < at_once.verdict_s
    assert spread.messages >= at_once.messages  # heartbeats of a second more


def test_more_latency_and_more_ranks_take_longer() -> None:
    far = Costs(1e-5, 1e-7, 1e-3, 1e-4)
    assert simulate(10, CHEAP).verdict_s < simulate(10, far).verdict_s
    assert simulate(10, CHEAP).verdict_s < simulate(1000, CHEAP).verdict_s


def test_the_beats_of_the_simulation_are_those_of_the_defaults() -> None:
    assert StoreOptions().beat_s == BEAT_S


@pytest.mark.parametrize("make", [transformer, small])
def test_plans_of_all_ranks_make_up_the_state(make: Any) -> None:
    rows = make(200)
    found = planned("any", rows, 8, range(8))
    assert found.made == 8
    assert found.state_bytes == sum(4 * _count(shape) for _, _, shape, _ in rows)
    assert found.largest_share <= 1 + 8 * 0.01


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
