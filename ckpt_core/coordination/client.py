"""Connections to a TCPStore that may block, hang or break without harm to the threads that use them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from ckpt_core.coordination.address import Address
from ckpt_core.coordination.line import cut, open_sockets, opened_since
from ckpt_core.errors import PersistError
from ckpt_core.system.interrupts import putting_back
from ckpt_core.system.threads import Monitor, OwnFuture, Worker, at_exit, join_all, own_lock

Store = Any
"""A `torch.distributed.TCPStore`: torch does not export the type, and is not loaded before it is needed."""

_Result = TypeVar("_Result")

_PROBE_S = 5.0
_OPENING_S = 60.0
_NEW_S = 10.0
"""Opening includes looking up names, which takes its time where a name server does not answer. The first
value is for connecting, the second for a request that finds no connection free."""

_OPENING = own_lock()
"""Held while a store is made or destroyed: in some versions torch does both without Python's lock, and two at
once end the process (pytorch issue 143593). For the same reason connections are opened ahead, and not while
training runs."""

_LAST_S = 20.0
"""How long the end of the process waits for connections that are being opened: name servers answer, or not,
by then."""

_BRIEF_S = 1.0
_IDLE_S = 60.0
"""Firewalls forget idle connections without a word, so one that has idled longer is not used again."""


class StoreGone(Exception):
    """The store has not answered, or its host has closed the connection."""


def open_store(host: str, port: int, timeout_s: float, **settings: bool) -> Store:
    """A TCPStore: a client, or with `is_master=True` one that keeps the store in this process. Waits for
    no other process.

    Raises:
        RuntimeError: torch's, when it cannot.
    """
    import torch.distributed

    store: Any = torch.distributed.TCPStore  # type: ignore[attr-defined]
    timeout = timedelta(seconds=timeout_s)
    with _OPENING:
        return store(host, port, wait_for_workers=False, timeout=timeout, **settings)


def serve(host: str, port: int) -> Store:
    """Keep a store in this process for as long as the result lives; port 0 takes a free one.

    Raises:
        StoreGone: the port is taken, or `host` does not lead to this machine.
    """
    try:
        return open_store(host, port, _OPENING_S, is_master=True)
    except RuntimeError as exc:
        raise StoreGone(f"no store could be opened at {host}:{port}: {_first_line(exc)}") from exc


class Connection:
    """One client of the store and the thread that alone uses it.

    The C++ client waits for an answer without a deadline of its own. So it blocks this thread, and
    whoever asked waits for a future, with a deadline.
    """

    def __init__(self, address: Address, timeout_s: float, opening_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self.opening_s = min(opening_s, timeout_s)
        self._jobs: queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]] | None]
        self._jobs = queue.SimpleQueue()
        self.idle_since = time.monotonic()
        self.client: Store | None = None
        self._current: Future[Any] | None = None
        self.line: socket.socket | None = None
        self.worker = Worker(self._run, name="ckpt-store")
        self.worker.start()

    def start(self, action: Callable[[Store], _Result]) -> Future[_Result]:
        """Run `action` on the connection's thread."""
        future = OwnFuture[_Result]()
        self._jobs.put((action, future))
        return future

    def end(self) -> None:
        """Close the connection once what is under way on it has ended. Does not wait."""
        self._jobs.put(None)

    def abandon(self, error: BaseException) -> None:
        """As `end`, and whoever waits for an answer gets `error` instead, now."""
        self.end()
        future = self._current
        if future is not None:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            action, self._current = job
            self._carry_out(action, self._current)
            del job, action
        with _OPENING:
            self.client = None
        if self.line is not None:
            self.line.close()

    def _carry_out(self, action: Callable[[Store], _Result], future: Future[_Result]) -> None:
        # An abandoned future is done already; then nobody wants the answer.
        with contextlib.suppress(InvalidStateError):
            try:
                self.client = self.client or self._connect()
                future.set_result(action(self.client))
            except BaseException as exc:  # raised in the thread that waits for the future
                future.set_exception(exc)

    def _connect(self) -> Store:
        host, port = self._address.host, self._address.port
        # TCPStore retries a refused connection until its timeout; a store that is gone is told at once.
        socket.create_connection((host, port), timeout=_PROBE_S).close()
        with _OPENING:
            before = open_sockets()
            store = open_store(host, port, self.opening_s)
            self.line = opened_since(before, port)
        store.set_timeout(timedelta(seconds=self._timeout_s))
        return store


class Clients:
    """The connections of one rank: one for each thread that is waiting, kept for the next one.

    Args:
        address: where the store listens.
        patience_s: a store that leaves a request unanswered for so long counts as gone.

    Attributes:
        kept: stores that this process keeps alive until `close`.
    """

    def __init__(self, address: Address, *, patience_s: float) -> None:
        self.address = address
        self.patience_s = patience_s
        self._changed = Monitor()
        self._calling: set[object] = set()
        self._idle: deque[Connection] = deque()
        self._opening: deque[Connection] = deque()
        self._all: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._closed = False
        self.kept: list[object] = []
        self._pid = os.getpid()
        # Last of ours: what ends before still uses the connections.
        end = partial(self.close, _LAST_S)
        self._at_exit = at_exit(end, end, priority=0)
        _POOLS.add(self)

    def call(self, action: Callable[[Store], _Result], limit_s: float | None = None) -> _Result:
        """What `action` returns; it is a short request, not a wait.

        Raises:
            StoreGone: no answer within `limit_s` (at most `patience_s`), or the connection broke.
        """
        limit_s = self.patience_s if limit_s is None else min(limit_s, self.patience_s)
        caller = object()

        def answer() -> _Result:
            connection = self._take_for_call(limit_s, caller)
            least_s = _NEW_S if connection.client is None else 0.0
            result = self._answer(connection, connection.start(action), max(limit_s, least_s))
            self._give_back(connection)
            return result

        def end() -> None:
            with self._changed.lock:
                self._calling.discard(caller)
                self._changed.notify_all()

        return putting_back(answer, end)

    def wait(
        self,
        action: Callable[[Store, timedelta], _Result],
        *,
        deadline: float,
        every_s: float,
        watch: Callable[[], None],
    ) -> _Result | None:
        """What `action` returns; None when `deadline` passes first.

        Args:
            action: a wait for as long as it is told, with short requests before and behind it; it has a
                connection for itself.
            deadline: in seconds of `time.monotonic`.
            every_s: how often to call `watch`.
            watch: called meanwhile, in the caller's thread; may raise, which ends the wait.

        Raises:
            StoreGone: the connection broke.
        """
        left_s = max(deadline - time.monotonic(), 0.001)
        # Not in slices: each wait that ends without its key makes torch print two lines of warning.
        timeout = timedelta(seconds=left_s + 1.0)
        connection = self._take_for_wait()
        future = connection.start(lambda client: action(client, timeout))
        try:
            while not future.done() and (left_s := deadline - time.monotonic()) > 0:
                with contextlib.suppress(TimeoutError):
                    future.exception(min(left_s, every_s))
                if not future.done():
                    watch()
        except BaseException:
            connection.end()
            raise
        if not future.done():
            connection.end()
            return None
        result = self._answer(connection, future, 0.0)
        self._give_back(connection)
        return result

    def warm(self, count: int, deadline: float) -> Callable[[], None]:
        """Open connections ahead, so that the first requests are not slower than the later ones.

        Args:
            deadline: in seconds of `time.monotonic`; a store that refuses is not tried for longer.

        Returns:
            When one is open: what waits for the others, of which requests take the one or the other before.
            One that cannot be opened is nobody's error: nobody may need it.

        Raises:
            StoreGone: see `call`; but one that merely takes long to open is waited for.
        """
        limit_s = min(_OPENING_S, max(deadline - time.monotonic(), _BRIEF_S))
        until = time.monotonic() + limit_s
        with self._changed.lock:
            first, *others = [self._new(limit_s) for _ in range(count)]
            self._opening.extend(others)
        opening = first.start(lambda client: None)
        rest = [(connection, connection.start(lambda client: None)) for connection in others]
        for connection, future in rest:
            future.add_done_callback(partial(self._opened, connection))
        self._answer(first, opening, limit_s)
        self._give_back(first)

        def await_others() -> None:
            wait([future for _, future in rest], max(until - time.monotonic(), 0.0))

        return await_others

    def close(self, timeout_s: float = _BRIEF_S) -> None:
        """Close every connection; one that hangs in a request is cut. Interrupted, it can be called again.

        One that still has not ended `timeout_s` later is left to its thread. The end of the process waits for
        that again, within limits: a daemon thread that comes back from torch when Python is gone takes the
        process down with it.
        """
        with self._changed.lock:
            self._closed = True
            self._changed.notify_all()
            connections = list(self._all)
            self._idle.clear()
            self._opening.clear()
        for connection in connections:
            connection.abandon(StoreGone("this rank has closed its connections"))
        workers = [connection.worker for connection in connections]
        if not join_all(workers, timeout_s=_BRIEF_S):
            for connection in connections:
                cut(connection.line)
        self.kept.clear()
        if join_all(workers, timeout_s=timeout_s):
            self._at_exit.cancel()

    def pin(self) -> None:
        """In a forked child: never destroy the parent's clients, whose threads do not exist here."""
        clients = [connection.client for connection in list(self._all)]
        for item in [*clients, *self.kept]:
            if item is not None:
                # One reference that nobody gives back: destroying a store joins threads.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))

    def _take_for_call(self, limit_s: float, caller: object) -> Connection:
        """One that is free, or soon will be: other calls are short."""
        taken: list[Connection] = []

        def take() -> bool:
            connection = self._oldest_idle()
            if connection is None and self._calling:
                return False
            taken.append(connection or self._new())
            self._calling.add(caller)
            return True

        if not self._changed.wait_for(take, deadline=time.monotonic() + limit_s):
            raise StoreGone(f"the store at {self.address} has not answered {limit_s:.3g} s")
        return taken[0]

    def _take_for_wait(self) -> Connection:
        """One that is free or being opened; but the last one stays for calls, which waits may depend on."""
        with self._changed.lock:
            spare = len(self._idle) + len(self._calling) > 1
            found = self._oldest_idle() if spare else None
            if found is None and self._opening:
                found = self._opening.popleft()
            return found or self._new()

    def _oldest_idle(self) -> Connection | None:
        """The one that has idled longest: so the beats keep all of them in use."""
        self._check_usable()
        while self._idle:
            connection = self._idle.popleft()
            if time.monotonic() - connection.idle_since < _IDLE_S:
                return connection
            connection.end()
        return None

    def _new(self, opening_s: float = _OPENING_S) -> Connection:
        self._check_usable()
        try:
            connection = Connection(self.address, self.patience_s, opening_s)
        except PersistError as exc:  # no more threads, at this moment
            raise StoreGone(f"the store at {self.address} cannot be asked: {exc}") from exc
        self._all.add(connection)
        return connection

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise StoreGone("this process was forked from the one that is connected")
        if self._closed:
            raise StoreGone("this rank has closed its connections")

    def _give_back(self, connection: Connection) -> None:
        with self._changed.lock:
            if self._closed:
                connection.end()
                return
            connection.idle_since = time.monotonic()
            self._idle.append(connection)
            self._changed.notify_all()

    def _opened(self, connection: Connection, future: Future[Any]) -> None:
        """On its thread: one of `warm` is free, unless a wait has taken it, or it could not be opened."""
        with self._changed.lock:
            if connection not in self._opening:
                return
            self._opening.remove(connection)
        if future.exception() is None:
            self._give_back(connection)

    def _answer(self, connection: Connection, future: Future[_Result], limit_s: float) -> _Result:
        try:
            return future.result(limit_s)
        except TimeoutError as exc:
            connection.end()
            raise StoreGone(
                f"the store at {self.address} has not answered for {limit_s:.3g} s"
            ) from exc
        except (RuntimeError, OSError) as exc:
            connection.end()
            text = f"the store at {self.address} is gone ({_first_line(exc)})"
            raise StoreGone(text) from exc
        except BaseException:
            connection.end()
            raise


def _first_line(exc: BaseException) -> str:
    return (str(exc) or type(exc).__name__).splitlines()[0][:200]


_POOLS: weakref.WeakSet[Clients] = weakref.WeakSet()


def _after_fork() -> None:
    for pool in list(_POOLS):
        pool.pin()


os.register_at_fork(after_in_child=_after_fork)
