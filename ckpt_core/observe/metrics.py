"""Figures for Prometheus, where `Options.metrics` says: a file that is replaced, or a port that answers.

    ckpt.prom          a file, for the textfile collector of node_exporter
    127.0.0.1:9400     a port, for a scrape of http://127.0.0.1:9400/metrics

One thread writes or answers, so that no save and no commit waits for either. Checkpointers of one process
that name the same place share it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from ckpt_core.errors import ConfigError
from ckpt_core.observe.figures import Figures, told
from ckpt_core.system.threads import Worker, own_lock

logger = logging.getLogger(__name__)

FILE_SUFFIX = ".prom"
"""The collector reads no other files."""

_LEVELS_S = 15.0
"""How often a file is written though nothing has happened: how far levels are changes all the time."""
_PAUSE_S = 1.0
"""A file is not written more often, however often something happens."""
_LOOK_S = 5.0
_CLIENT_S = 5.0
_END_S = 2.0
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class NoMetrics:
    """Nothing is told."""

    def close(self) -> None:
        """Tell no more. Idempotent."""


class Metrics(NoMetrics):
    """The figures of one Checkpointer at its place."""

    def __init__(self, place: str, figures: Figures) -> None:
        self._place, self._figures = place, figures
        self._outlet = _join(place, figures)

    def close(self) -> None:
        """Say that the root was closed, and end the thread if no other figures are told there. Idempotent."""
        self._figures.close()
        _leave(self._place, self._outlet, self._figures)


def open_metrics(target: str, figures: Figures, *, rank: int, world_size: int) -> Metrics:
    """Tell `figures` where `Options.metrics` says.

    Of several ranks each has a file, or a port, of its own: the rank is put into the name, or added.

    Raises:
        ConfigError: the file cannot be written, or nobody can listen there.
        PersistError: the system gives no more threads.
    """
    return Metrics(target if world_size == 1 else _of_rank(target, rank), figures)


def _of_rank(target: str, rank: int) -> str:
    if target.endswith(FILE_SUFFIX):
        return f"{target.removesuffix(FILE_SUFFIX)}-{rank:05d}{FILE_SUFFIX}"
    host, _, port = target.rpartition(":")
    number = int(port) + rank if int(port) else 0
    if number > 65535:
        raise ConfigError(
            f"metrics={target!r}: rank {rank} would listen on port {number}; name a lower one"
        )
    return f"{host}:{number}"


class _Outlet:
    """Where figures are told; owns a thread."""

    def __init__(self) -> None:
        self.told_of: tuple[Figures, ...] = ()
        self.closed = False
        self.worker = Worker(self.run, name="ckpt-metrics")

    def changed(self) -> None:
        """Something has happened. Called in the engine's threads; never waits."""

    def run(self) -> None:
        """Until it is closed."""

    def wake(self) -> None:
        """`closed` has been set."""

    def last(self) -> None:
        """Called when the thread has ended."""


class _File(_Outlet):
    def __init__(self, path: str, figures: Figures) -> None:
        super().__init__()
        self._path = Path(path)
        # No name that the collector reads; of one name, so that a killed run leaves one at most.
        self._fresh = self._path.with_name(f".{self._path.name}.new")
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._failed = False
        self.told_of = (figures,)
        try:
            self._write()
        except OSError as exc:
            raise ConfigError(
                f"metrics={path!r} cannot be written: {exc.strerror}; name a file in a directory that is "
                f"there, or none"
            ) from exc

    def changed(self) -> None:
        # In C: an interrupt of the training thread leaves no lock taken.
        self._bell.put(None)

    def run(self) -> None:
        due_s = 0.0
        while not self.closed:
            self._heard(_LEVELS_S)
            # A save rings several times.
            while (left_s := due_s - time.monotonic()) > 0 and not self.closed:
                self._heard(left_s)
            self._write_or_warn()
            due_s = time.monotonic() + _PAUSE_S

    def wake(self) -> None:
        self.changed()

    def last(self) -> None:
        self._write_or_warn()

    def _heard(self, timeout_s: float) -> None:
        with contextlib.suppress(queue.Empty):
            self._bell.get(timeout=timeout_s)

    def _write_or_warn(self) -> None:
        try:
            self._write()
        except OSError as exc:
            if not self._failed:
                logger.warning("the metrics in %s are out of date: %s", self._path, exc)
            self._failed = True
        else:
            self._failed = False

    def _write(self) -> None:
        self._fresh.write_bytes(told(self.told_of))
        self._fresh.replace(self._path)


class _Port(_Outlet):
    def __init__(self, address: str, figures: Figures) -> None:
        super().__init__()
        self.told_of = (figures,)
        host, _, port = address.rpartition(":")
        try:
            self.server = _server(host.strip("[]"), int(port), self)
        except OSError as exc:
            raise ConfigError(
                f"metrics={address!r}: nobody can listen there: {exc.strerror or exc}; name another port, a "
                f"file, or none"
            ) from exc
        self.server.timeout = _LOOK_S
        bound = self.server.socket.getsockname()
        logger.info("metrics are at http://%s:%d/metrics", host, bound[1])

    def run(self) -> None:
        while not self.closed:
            self.server.handle_request()

    def wake(self) -> None:
        # Ends the wait for a client.
        with contextlib.suppress(OSError):
            self.server.socket.shutdown(socket.SHUT_RDWR)

    def last(self) -> None:
        self.server.server_close()


def _server(host: str, port: int, outlet: _Outlet) -> HTTPServer:
    family, _, _, _, where = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]

    class Handler(BaseHTTPRequestHandler):
        timeout = (
            _CLIENT_S  # one client at a time: one that says nothing must not keep the others out
        )

        def do_GET(self) -> None:
            if self.path.partition("?")[0] not in ("/", "/metrics"):
                self.send_error(404, "only /metrics is here")
                return
            text = told(outlet.told_of)
            self.send_response(200)
            self.send_header("Content-Type", _CONTENT_TYPE)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            logger.debug(format, *args)

    class Server(HTTPServer):
        address_family = family
        allow_reuse_port = False  # two jobs that answer at one port would each tell half

        def server_bind(self) -> None:
            # Not HTTPServer's: it asks the name service for the host's name, which may take long.
            self.allow_reuse_address = True
            super(HTTPServer, self).server_bind()

        def handle_error(self, request: object, client_address: object) -> None:
            logger.debug("a scrape failed", exc_info=True)

    return Server(where[:2], Handler)  # type: ignore[arg-type]


# -- who tells where, in this process ---------------------------------------------------------------

_outlets: dict[str, _Outlet] = {}
_mutex = own_lock()


def _join(place: str, figures: Figures) -> _Outlet:
    with _mutex:
        outlet = _outlets.get(place)
        if outlet is not None:
            outlet.told_of += (figures,)
        else:
            is_file = place.endswith(FILE_SUFFIX)
            outlet = _File(place, figures) if is_file else _Port(place, figures)
            try:
                outlet.worker.start()
            except BaseException:
                outlet.last()
                raise
            # A port that the system chooses is another one each time.
            if not place.endswith(":0"):
                _outlets[place] = outlet
    figures.changed = outlet.changed
    return outlet


def _leave(place: str, outlet: _Outlet, figures: Figures) -> None:
    with _mutex:
        others = tuple(one for one in outlet.told_of if one is not figures)
        if others:
            outlet.told_of = others
            outlet.changed()
            return
        if outlet.closed:
            return
        outlet.closed = True
        _outlets.pop(place, None)
        outlet.wake()
        if outlet.worker.join(deadline=time.monotonic() + _END_S):
            outlet.last()
        else:
            logger.warning("the metrics at %s are left to a thread that hangs", place)


def _after_fork() -> None:
    """In a child: the port stays the parent's alone, and is free when that ends."""
    global _mutex
    _mutex = own_lock()
    for outlet in _outlets.values():
        if isinstance(outlet, _Port):
            outlet.server.socket.close()
    _outlets.clear()


os.register_at_fork(after_in_child=_after_fork)
