"""Whoever waits for a key is woken by whatever sets it, in both of torch's stores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ckpt_core.coordination import client
from ckpt_core.coordination.address import Address
from ckpt_core.coordination.channel import Channel
from ckpt_core.coordination.client import Clients

SETTERS: dict[str, Callable[[Channel], object]] = {
    "put": lambda channel: channel.put("key", "value"),
    "put_first": lambda channel: channel.put_first("key", "value"),
    "count": lambda channel: channel.count("key"),
}


@pytest.mark.parametrize("setter", SETTERS)
@pytest.mark.parametrize("libuv", [True, False], ids=["libuv", "older"])
def test_a_wait_ends_when_the_key_is_set(setter: str, libuv: bool) -> None:
    limit = timedelta(seconds=60)
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit, use_libuv=libuv
    )
    clients = Clients(Address("127.0.0.1", store.port, "this test"), patience_s=60)
    channel = Channel(clients, time.monotonic() + 60, beat_s=0.1)
    try:
        clients.warm(3, channel.deadline)
        beats: list[None] = []
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(channel.wait, ["key"], lambda: beats.append(None))
            while len(beats) < 3:  # the store has the request by then
                time.sleep(0.01)
            SETTERS[setter](channel)
            assert waiting.result(60)
            # Had it slept to its deadline, the key would be found then.
            assert time.monotonic() < channel.deadline
    finally:
        clients.close()


@pytest.fixture
def channel() -> Iterator[Channel]:
    """To a store of its own, for a minute."""
    limit = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    clients = Clients(Address("127.0.0.1", store.port, "this test"), patience_s=60)
    await_others = clients.warm(3, time.monotonic() + 60)
    try:
        yield Channel(clients, time.monotonic() + 60, beat_s=0.1)
    finally:
        await_others()
        clients.close()


def test_what_is_told_comes_before_the_wait_and_values_behind_it(channel: Channel) -> None:
    def answer() -> None:
        assert channel.await_values(["question", "first"]) == ["is it?", "mine"]
        channel.put("answer", "it is")

    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(answer)
        told, first = {"question": "is it?"}, {"first": "mine"}
        assert channel.await_values(["answer"], put=told, put_first=first) == ["it is"]
        answering.result(60)
    again = channel.await_values(["first"], put_first={"first": "another"})
    assert again == ["mine"], "the first value stays"


def test_a_wait_for_values_ends_at_its_deadline_and_has_told_what_it_should(
    channel: Channel,
) -> None:
    brief = channel.until(time.monotonic() + 0.2)
    assert brief.await_values(["never"], put={"told": "yes"}) is None
    assert channel.await_values(["told"]) == ["yes"]


def test_requests_wait_for_connections_that_are_being_opened(channel: Channel) -> None:
    with ThreadPoolExecutor(8) as pool:
        waits = [pool.submit(channel.await_values, [f"key {n}"]) for n in range(8)]
        channel.put_all({f"key {n}": str(n) for n in range(8)})
        assert [one.result(60) for one in waits] == [[str(n)] for n in range(8)]


def test_a_connection_ahead_that_cannot_be_opened_is_nobodys_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = client.serve("127.0.0.1", 0)
    made: list[client.Connection] = []

    class Refused(client.Connection):
        def __init__(self, address: Address, timeout_s: float, opening_s: float) -> None:
            super().__init__(address, timeout_s, opening_s)
            made.append(self)

        def _connect(self) -> Any:
            if self is not made[0]:
                raise RuntimeError("Connection refused")
            return super()._connect()

    monkeypatch.setattr(client, "Connection", Refused)
    clients = Clients(Address("127.0.0.1", server.port, "this test"), patience_s=60)
    try:
        clients.warm(3, time.monotonic() + 7)()
        assert len(made) == 3 and max(one.opening_s for one in made) <= 7
        channel = Channel(clients, time.monotonic() + 60, beat_s=0.1)
        channel.put("key", "value")
        assert channel.read("key") == "value"
    finally:
        clients.close()
