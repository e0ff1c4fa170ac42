"""Whoever waits for a key is woken by whatever sets it, in both of torch's stores."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from ckpt_core.coordination.channel import Channel
from ckpt_core.coordination.client import Address, Clients

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
        clients.warm(3)
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
