"""The store's verbs as the protocol uses them: text under keys, with a deadline on every request."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

from ckpt_core.coordination.client import Clients, Store

_Result = TypeVar("_Result")

_LEAST_S = 2.0
"""A request made at the deadline, to say that it has passed, still gets so much time."""
_MARGIN_S = 2.0


def _nothing() -> None:
    pass


class Channel:
    """One thread's talk with the store, until a deadline. Values are text.

    Every method raises StoreGone when the store does not answer.

    Args:
        clients: the rank's connections.
        deadline: in seconds of `time.monotonic`.
        beat_s: how often a wait looks after its fellow ranks.
    """

    def __init__(self, clients: Clients, deadline: float, beat_s: float) -> None:
        self._clients = clients
        self._beat_s = beat_s
        self._last = deadline
        self.deadline = deadline

    def put(self, key: str, value: str) -> None:
        """Set a key."""
        self.put_all({key: value})

    def put_all(self, values: Mapping[str, str]) -> None:
        """Set keys, one after the other."""
        self._clients.call(lambda client: _set_all(client, values), self._limit_s())

    def put_first(self, key: str, value: str) -> str:
        """Set a key that is not set; the value that it then has: the first one wins."""
        return self._clients.call(lambda client: _set_first(client, key, value), self._limit_s())

    def count(self, key: str, by: int = 1) -> int:
        """Add to a counter; the sum."""
        return int(self._clients.call(lambda client: client.add(key, by), self._limit_s()))

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all of `keys` are set."""
        names = list(keys)
        return bool(self._clients.call(lambda client: client.check(names), self._limit_s()))

    def read(self, key: str) -> str | None:
        """The value of a key; None if it is not set."""
        found = self.read_all([key])
        return None if found is None else found[0]

    def read_all(self, keys: Sequence[str]) -> list[str] | None:
        """The values of all keys; None if one of them is not set."""
        names = list(keys)
        return self._clients.call(lambda client: _values(client, names), self._limit_s())

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Those of `keys` that are not set; few requests if they are few."""
        if not keys or self.has(keys):
            return []
        if len(keys) == 1:
            return list(keys)
        half = len(keys) // 2
        return self.missing(keys[:half]) + self.missing(keys[half:])

    def delete(self, keys: Sequence[str]) -> None:
        """Unset keys, set or not."""

        def delete_all(client: Store) -> None:
            for key in keys:
                client.delete_key(key)

        if keys:
            self._clients.call(delete_all, self._limit_s())

    def wait(self, keys: Sequence[str], watch: Callable[[], None] = _nothing) -> bool:
        """Block until all `keys` are set; False when the deadline passes first.

        `watch` is called every `beat_s` meanwhile; it may set the keys itself, or raise.
        """
        names = list(keys)

        def wait(client: Store, limit: timedelta) -> bool:
            client.wait(names, limit)
            return True

        return self._wait(wait, watch) or self.has(names)

    def await_values(
        self,
        keys: Sequence[str],
        watch: Callable[[], None] = _nothing,
        *,
        put: Mapping[str, str] | None = None,
        put_first: Mapping[str, str] | None = None,
    ) -> list[str] | None:
        """`put` and `put_first`, then `wait`, then the values of all `keys`.

        All of it in one turn of another thread, where each request by itself takes one.

        Returns:
            None when the deadline passes first; nothing in it where a key was set and is gone again.
        """
        names = list(keys)

        def exchange(client: Store, limit: timedelta) -> list[str]:
            _set_all(client, put or {})
            for key, value in (put_first or {}).items():
                _set_first(client, key, value)
            client.wait(names, limit)
            return _values(client, names) or []

        found = self._wait(exchange, watch)
        return self.read_all(names) if found is None else found

    def _wait(
        self, action: Callable[[Store, timedelta], _Result], watch: Callable[[], None]
    ) -> _Result | None:
        return self._clients.wait(action, deadline=self.deadline, every_s=self._beat_s, watch=watch)

    def until(self, deadline: float) -> Channel:
        """The same, with an earlier deadline for waits; other requests still have until the first one."""
        earlier = Channel(self._clients, self._last, self._beat_s)
        earlier.deadline = min(deadline, self.deadline)
        return earlier

    def early(self) -> Channel:
        """The same, with a deadline a little earlier: who misses it still has time to say so."""
        left_s = max(self.deadline - time.monotonic(), 0.0)
        return self.until(self.deadline - min(_MARGIN_S, left_s / 10))

    def _limit_s(self) -> float:
        return max(self._last - time.monotonic(), _LEAST_S)


def _set_all(client: Store, values: Mapping[str, str]) -> None:
    for key, value in values.items():
        client.set(key, value)


def _values(client: Store, keys: list[str]) -> list[str] | None:
    # A `get` of a missing key would block.
    if not client.check(keys):
        return None
    return [bytes(value).decode() for value in client.multi_get(keys)]


def _set_first(client: Store, key: str, value: str) -> str:
    won = bytes(client.compare_set(key, "", value)).decode()
    if won == value:
        # Danger: torch's older store, which USE_LIBUV=0 asks for, leaves those asleep who wait for this key;
        # `set` wakes them. It changes nothing: whoever comes later finds the first value.
        client.set(key, value)
    return won
