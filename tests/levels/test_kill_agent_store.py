"""kill -9 of the agent at any request to a store: nothing half is visible, and the next one goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import places
from tests.levels.agents import Agents, plan_of
from tests.levels.making import CHUNK_BYTES, make_store, save
from tests.levels.servers.azurite import needs_azurite
from tests.levels.servers.before_azurite import BeforeAzurite
from tests.levels.servers.before_peer import BeforePeer
from tests.levels.servers.faulty import FaultServer, Request, never
from tests.levels.servers.like_google import GoogleServer
from tests.levels.servers.moto import needs_store
from tests.levels.stores import level_of, look_at, opened

pytestmark = needs_store

MOST = 2
_NEVER = 1_000_000


@pytest.fixture(params=["s3", "gs", pytest.param("az", marks=needs_azurite), "peer"])
def made(request: pytest.FixtureRequest) -> Callable[[str], FaultServer]:
    """A store where nothing is yet; its name."""
    if request.param == "az":
        azurite = request.getfixturevalue("azurite")
        return lambda name: BeforeAzurite(azurite, name)
    if request.param == "peer":
        peer = request.getfixturevalue("peer")
        return lambda name: BeforePeer(peer, name)
    return lambda _: FaultServer() if request.param == "s3" else GoogleServer()


def test_a_kill_of_the_agent_at_any_request_shows_nothing_half_and_loses_nothing(
    made: Callable[[str], FaultServer], tmp_path: Path, agents: Agents
) -> None:
    def life(place: Path, number: int, word: str) -> tuple[int, FaultServer]:
        """An agent that is killed at a request; how many there were."""
        server = made(place.name)
        agents.environ = server.environ()
        store = make_store(place)
        save(store, 1, nbytes=2 * CHUNK_BYTES)
        store.close()
        plan = plan_of(level_of(server, keep_last=1, backlog=1))
        agents.run(place, plan)
        for step in (2, 3):
            store = make_store(place)
            save(store, step, nbytes=2 * CHUNK_BYTES)
            store.close()
        first = len(server.requests)
        process = agents.start(place)
        server.victim = process.pid

        def fault(request: Request) -> str | None:
            return word if len(server.requests) - first == number else None

        server.fault = fault
        process.wait(60)
        server.fault = never
        return len(server.requests) - first, server

    count, server = life(tmp_path / "whole", _NEVER, "kill")
    server.close()
    assert count > 8
    for number in places.some(range(1, count), MOST, of="agent of a store"):
        word = "kill" if number % 2 else "kill-after"
        place = tmp_path / f"killed-{number}"
        _, server = life(place, number, word)
        with server, opened(server) as far:
            assert set(look_at(far)) & {1, 3}, "what was there is there, or what is newer"
            agents.run(place)
            assert look_at(far) == {3: 0}, f"{word} at {number}"
