"""The store's verbs as the protocol uses them: text under keys, with a deadline on every request."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ckpt_core.coordination.client import Clients, Store

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
        self._clients.call(lambda client: client.set(key, value), self._limit_s())

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
        # A `get` of a missing key would block.
        if not self.has([key]):
            return None
        return bytes(self._clients.call(lambda client: client.get(key), self._limit_s())).decode()

    def read_all(self, keys: Sequence[str]) -> list[str] | None:
        """The values of all keys; None if one of them is not set."""
        names = list(keys)
        if not self.has(names):
            return None
        values = self._clients.call(lambda client: client.multi_get(names), self._limit_s())
        return [bytes(value).decode() for value in values]

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
        found = self._clients.wait(names, deadline=self.deadline, every_s=self._beat_s, watch=watch)
        return found or self.has(names)

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


def _set_first(client: Store, key: str, value: str) -> str:
    won = bytes(client.compare_set(key, "", value)).decode()
    if won == value:
        # Danger: torch's older store, which USE_LIBUV=0 asks for, leaves those asleep who wait for this key;
        # `set` wakes them. It changes nothing: whoever comes later finds the first value.
        client.set(key, value)
    return won
