"""How the ranks come together, seen from those who are in a hurry."""

from __future__ import annotations

import queue
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ckpt_core.coordination import StoreOptions, TorchStore, client
from ckpt_core.coordination.bootstrap import nth
from ckpt_core.errors import ConfigError, CoordinationTimeout

LONG_S = 50.0


class SlowToHear:
    """A store whose client learns late that all ranks have come."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        action = getattr(self._real, name)

        def late(*given: Any) -> Any:
            if name != "set" and "/open" in str(given):
                time.sleep(0.5)
            return action(*given)

        return late if callable(action) else action


def test_a_master_port_that_is_none_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "70000"}
    for name, value in there.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"MASTER_PORT=70000 is no TCP port: give 1 to 65535"):
        TorchStore.from_env()


@pytest.mark.parametrize(
    "wrong", [{"port": "80"}, {"port": 2.5}, {"rank": "0"}, {"world_size": 1.5}, {"rank": -1}]
)
def test_a_number_that_is_none_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}="):
        TorchStore(**{"host": "127.0.0.1", "port": 0, "rank": 0, "world_size": 1, **wrong})


def test_rank_0_may_close_as_soon_as_it_has_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    real = client.open_store
    monkeypatch.setattr(
        client, "open_store", lambda *given, **more: SlowToHear(real(*given, **more))
    )
    told: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def exchange(text: str | None) -> str:
        if text is not None:
            told.put(text)
        return text or str(told.get(timeout=LONG_S))

    def join_and_close(rank: int) -> None:
        options = StoreOptions(address="127.0.0.1")
        TorchStore.from_exchange(exchange, rank=rank, world_size=2, options=options).close()

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(join_and_close, range(2))) == [None, None]


def test_ranks_of_which_some_have_made_a_store_before_are_told_of_a_name_and_meet_by_one() -> None:
    server = client.serve("127.0.0.1", 0)
    # As if the process of rank 0 had made one here, and that of rank 1 were new.
    nth("run", "127.0.0.1", server.port, "", 0)

    def meet(rank: int, options: StoreOptions) -> str:
        try:
            TorchStore("127.0.0.1", server.port, rank=rank, world_size=2, options=options).close()
        except CoordinationTimeout as exc:
            return str(exc)
        return "met"

    with ThreadPoolExecutor(2) as ranks:
        early = StoreOptions(timeout=2, hosted=False)
        for text in ranks.map(meet, range(2), [early] * 2):
            assert "StoreOptions(name=)" in text
        named = StoreOptions(timeout=LONG_S, hosted=False, name="second")
        assert list(ranks.map(meet, range(2), [named] * 2)) == ["met", "met"]
