"""A discrete-event simulation of many clients and one store that serves their requests one by one.

No sockets and no threads: time is a number. A client is a generator that yields `Request`s and gets the
answers; the store keeps keys, counters and those who wait for a key, as TCPStore does.

Times come from `Costs`, which are measured on a real store (`ckpt_core.bench.ranks.messages`).
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from enum import StrEnum


class Verb(StrEnum):
    """What a client may ask."""

    SET = "set"
    SET_FIRST = "compare_set"
    ADD = "add"
    CHECK = "check"
    GET = "get"
    DELETE = "delete"
    WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Request:
    """One message to the store. `SET` is not answered; `WAIT` is answered once all keys are set."""

    verb: Verb
    keys: tuple[str, ...]


_NOBODY = -1

Answer = int
"""The sum for `ADD`, else 1, or 0 for a `CHECK` of a key that is not set."""

Client = Generator[Request, Answer, None]


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that things take.

    Attributes:
        message_s: the store is busy for one message.
        key_s: and this much longer for each key beyond the first.
        latency_s: one way through the network.
        client_s: a client is busy for one message.
        shared: all clients share one processor (as threads of one interpreter do), not one each.
    """

    message_s: float
    key_s: float
    latency_s: float
    client_s: float
    shared: bool = False


@dataclass(slots=True)
class _Waiter:
    client: int
    missing: int


@dataclass(slots=True)
class Simulation:
    """One run. Add clients, then `run`.

    Attributes:
        ended_s: when each client was through, by its number.
        messages: how many messages the store has served.
        busy_s: how long the store was busy.
    """

    costs: Costs
    now: float = 0.0
    ended_s: dict[int, float] = field(default_factory=dict)
    messages: int = 0
    busy_s: float = 0.0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _clients: list[Client] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)
    _waiters: dict[str, list[_Waiter]] = field(default_factory=dict)
    _queue: deque[tuple[int, Request]] = field(default_factory=deque)
    _serving: bool = False
    _processor_free: float = 0.0

    def add(self, client: Client, *, at: float = 0.0) -> int:
        """A client that begins at that time; its number."""
        self._clients.append(client)
        number = len(self._clients) - 1
        self._at(at, lambda: self._go_on(number, None))
        return number

    def repeat(self, request: Request, *, first: float, every: float) -> None:
        """A message that nobody waits for, such as a heartbeat, again and again while clients are there."""

        def arrive() -> None:
            self._arrive(_NOBODY, request)
            self._at(self.now + every, arrive)

        self._at(first, arrive)

    def run(self) -> None:
        """Until every client is through; messages that come later are not served."""
        while self._events and len(self.ended_s) < len(self._clients):
            self.now, _, act = heapq.heappop(self._events)
            act()

    # -- clients ---------------------------------------------------------------------------------

    def _go_on(self, number: int, answer: Answer | None) -> None:
        """A client has its answer, and works on its next message."""
        client = self._clients[number]
        try:
            request = next(client) if answer is None else client.send(answer)
        except StopIteration:
            self.ended_s[number] = self.now
            return
        begin = max(self.now, self._processor_free) if self.costs.shared else self.now
        sent = begin + self.costs.client_s
        if self.costs.shared:
            self._processor_free = sent
        self._at(sent + self.costs.latency_s, lambda: self._arrive(number, request))
        if request.verb is Verb.SET:
            self._at(sent, lambda: self._go_on(number, 1))

    # -- the store -------------------------------------------------------------------------------

    def _arrive(self, number: int, request: Request) -> None:
        self._queue.append((number, request))
        if not self._serving:
            self._serve_next()

    def _serve_next(self) -> None:
        self._serving = bool(self._queue)
        if self._queue:
            number, request = self._queue.popleft()
            cost = self.costs.message_s + self.costs.key_s * (len(request.keys) - 1)
            self._busy(cost, lambda: self._serve(number, request))

    def _busy(self, seconds: float, then: Callable[[], None]) -> None:
        self.busy_s += seconds
        self._at(self.now + seconds, then)

    def _serve(self, number: int, request: Request) -> None:
        self.messages += 1
        woken: list[int] = []
        answer: Answer | None = 1
        match request.verb:
            case Verb.SET:
                answer = None
                woken = self._set(request.keys[0], 1)
            case Verb.SET_FIRST:
                if request.keys[0] not in self._numbers:
                    woken = self._set(request.keys[0], 1)
            case Verb.ADD:
                answer = self._numbers.get(request.keys[0], 0) + 1
                woken = self._set(request.keys[0], answer)
            case Verb.CHECK:
                answer = int(all(key in self._numbers for key in request.keys))
            case Verb.DELETE:
                self._numbers.pop(request.keys[0], None)
            case Verb.WAIT:
                answer = self._wait(number, request.keys)
            case Verb.GET:
                assert all(key in self._numbers for key in request.keys), "get comes after wait"
        if answer is not None and number != _NOBODY:
            self._answer(number, answer)
        self._wake(woken)

    def _wake(self, woken: list[int]) -> None:
        """Each of those who waited gets a message of its own, one after the other."""
        for place, number in enumerate(woken, 1):
            self._at(
                self.now + place * self.costs.message_s + self.costs.latency_s,
                lambda number=number: self._go_on(number, 1),  # type: ignore[misc]
            )
        self._busy(len(woken) * self.costs.message_s, self._serve_next)

    def _answer(self, number: int, answer: Answer) -> None:
        self._at(self.now + self.costs.latency_s, lambda: self._go_on(number, answer))

    def _set(self, key: str, value: int) -> list[int]:
        self._numbers[key] = value
        woken = []
        for waiter in self._waiters.pop(key, []):
            waiter.missing -= 1
            if waiter.missing == 0:
                woken.append(waiter.client)
        return woken

    def _wait(self, number: int, keys: tuple[str, ...]) -> Answer | None:
        missing = [key for key in keys if key not in self._numbers]
        if not missing:
            return 1
        waiter = _Waiter(number, len(missing))
        for key in missing:
            self._waiters.setdefault(key, []).append(waiter)
        return None

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), act))
