"""Ranges by requests of our own: they come whole and right, or the client reads them; no secret is told."""

from __future__ import annotations

import gc
import logging
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt_core.levels import Away, Far, open_far
from tests.levels.object_copies import SHARD, A, at_server, put
from tests.levels.servers.before_peer import BeforePeer
from tests.levels.servers.faulty import SECRET, FaultServer, Reply, Request, in_environment
from tests.levels.servers.moto import needs_store
from tests.levels.servers.peer import PeerServer

pytestmark = needs_store

DATA = os.urandom(3 << 20)
RANGE = (12_345, 2_500_001)
"""Offset and length: several blocks, the last one short."""

WANTED = DATA[RANGE[0] : sum(RANGE)]

Lie = Callable[[Reply], None]


class Server(FaultServer):
    """One that does something else with requests that are not the client's.

    Attributes:
        ours: how often somebody else than the client has asked for bytes of the file.
        clients: the ranges that the client has asked for.
        word: see `FaultServer.fault`, for each of ours.
        lie: changes the replies to ours.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ours, self.clients = 0, list[str]()
        self.word: str | None = None
        self.lie: Lie | None = None
        self.fault = self._fault

    def _fault(self, request: Request) -> str | None:
        if not _is_read(request):
            return None
        if not _is_ours(request):
            self.clients.append(request.headers["range"])
            return None
        self.ours += 1
        return self.word

    def _do(self, request: Request) -> Reply:
        reply = super()._do(request)
        if self.lie is not None and _is_read(request) and _is_ours(request):
            self.lie(reply)
        return reply


def _is_read(request: Request) -> bool:
    return request.method == "GET" and request.target.partition("?")[0].endswith(SHARD)


def _is_ours(request: Request) -> bool:
    return "user-agent" not in request.headers


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server, in_environment(server.environ()):
        yield server


@pytest.fixture
def far(server: Server) -> Iterator[Far]:
    with at_server(server) as far:
        put(far, A, data=DATA)
        yield far


def by_blocks(far: Far) -> bytes:
    return b"".join(bytes(block) for block in far.read_blocks(A, SHARD, *RANGE))


def into_a_buffer(far: Far) -> bytes:
    data = bytearray(RANGE[1])
    far.read_into(A, SHARD, memoryview(data), RANGE[0])
    return bytes(data)


both_ways = pytest.mark.parametrize("read", [by_blocks, into_a_buffer])
Read = Callable[[Far], bytes]


@both_ways
def test_ranges_come_by_our_own_requests_one_after_the_other(
    server: Server, far: Far, read: Read
) -> None:
    assert read(far) == read(far) == read(far) == WANTED
    assert server.ours == 3 and not server.clients


@both_ways
@pytest.mark.parametrize("word", ["503", "404", "429", "reset", "lost", "torn", "slow"])
def test_what_does_not_come_the_client_reads_and_the_next_range_is_asked_for_again(
    server: Server, far: Far, read: Read, word: str
) -> None:
    server.word = word
    assert read(far) == WANTED
    assert server.ours == 1 and len(server.clients) == (word != "slow")
    server.word = None
    assert read(far) == WANTED
    assert server.ours == 2 and len(server.clients) == (word != "slow")


@both_ways
def test_behind_a_cut_it_goes_on_where_it_stopped(server: Server, far: Far, read: Read) -> None:
    server.word = "torn"
    assert read(far) == WANTED
    begin, end = server.clients[0].removeprefix("bytes=").split("-")
    assert RANGE[0] < int(begin) < int(end) == sum(RANGE) - 1


@both_ways
@pytest.mark.parametrize("status", ["400", "403", "501", "301"])
def test_who_refuses_our_requests_gets_no_more_of_them(
    server: Server, far: Far, read: Read, status: str
) -> None:
    server.word = status
    assert read(far) == read(far) == WANTED
    assert server.ours == (2 if status == "501" else 1) and len(server.clients) == 2


def _says_all(reply: Reply) -> None:
    reply.status, reply.body = 200, DATA
    del reply.headers["Content-Range"]


def _is_of_other_bytes(reply: Reply) -> None:
    reply.headers["Content-Range"] = f"bytes 0-{RANGE[1] - 1}/{len(DATA)}"


def _is_shorter(reply: Reply) -> None:
    reply.body = reply.body[:-1]


def _is_longer_than_it_says(reply: Reply) -> None:
    reply.body, reply.headers["Content-Length"] = reply.body + b"HTTP/1.1 206", str(RANGE[1])


def _is_packed(reply: Reply) -> None:
    reply.headers["Content-Encoding"] = "gzip"


def _comes_in_chunks(reply: Reply) -> None:
    reply.headers["Transfer-Encoding"] = "chunked"


def _talks_without_end(reply: Reply) -> None:
    reply.headers["X-Long"] = "x" * (1 << 17)


def _closes(reply: Reply) -> None:
    reply.headers["Connection"] = "close"


@both_ways
@pytest.mark.parametrize(
    "lie",
    [
        _says_all,
        _is_of_other_bytes,
        _is_shorter,
        _is_longer_than_it_says,
        _is_packed,
        _comes_in_chunks,
        _talks_without_end,
        _closes,
    ],
)
def test_an_answer_of_another_kind_is_never_taken_for_the_bytes(
    server: Server, far: Far, read: Read, lie: Lie
) -> None:
    server.lie = lie
    assert read(far) == read(far) == WANTED


def test_who_stops_in_the_middle_leaves_nothing_behind_for_the_next_range(
    server: Server, far: Far
) -> None:
    for block in far.read_blocks(A, SHARD, *RANGE):
        assert block == WANTED[: len(block)]
        break
    assert by_blocks(far) == into_a_buffer(far) == WANTED
    assert server.ours == 3 and not server.clients


def test_a_range_that_is_forgotten_in_the_middle_leaves_no_connection(server: Server) -> None:
    far = at_server(server)
    put(far, A, data=DATA)
    ring: list[object] = [blocks := far.read_blocks(A, SHARD, *RANGE)]
    ring.append(ring)
    next(blocks)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        del ring, blocks, far
        gc.collect()
    assert not told and server.ours == 1


@both_ways
def test_a_store_that_is_silent_is_away_in_time_and_no_secret_is_told(
    server: Server, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with at_server(server, request_s=0.5) as far:
        put(far, A, data=DATA)
        for word in ("503", "hang"):
            server.word = word
            if word == "503":
                read(far)
                continue
            with pytest.raises(Away, match="no answer came in time") as caught:
                read(far)
        server.word = None
        assert read(far) == WANTED
    told = caplog.text + "".join(traceback.format_exception(caught.value))
    assert "reads on behind _Otherwise" in told
    for secret in (SECRET, "AKIDTEST", "Signature", "Credential="):
        assert secret not in told


@pytest.mark.parametrize(
    "more",
    [
        {"http_proxy": "http://127.0.0.1:9"},
        {"all_proxy": "http://127.0.0.1:9"},
        {"AWS_ENDPOINT_URL": "https://127.0.0.1:9"},
    ],
)
def test_by_a_proxy_or_over_tls_the_client_reads_all(server: Server, more: dict[str, str]) -> None:
    from ckpt_core.levels.far.clients import open_store
    from ckpt_core.levels.far.receiving import receiver_of

    with in_environment(server.environ()):
        store = open_store(server.url(), request_s=1.0, retries=0)
        assert receiver_of(server.url(), store, request_s=1.0) is not None
    with in_environment({**server.environ(), **more}):
        assert receiver_of(server.url(), store, request_s=1.0) is None


@both_ways
def test_a_peer_is_read_in_the_same_way(peer: PeerServer, tmp_path: Path, read: Read) -> None:
    asked: list[bool] = []

    def fault(request: Request) -> None:
        if _is_read(request):
            asked.append(_is_ours(request))

    with (
        BeforePeer(peer, tmp_path.name) as server,
        in_environment(server.environ()),
        open_far(server.url()) as far,
    ):
        put(far, A, data=DATA)
        server.fault = fault
        assert read(far) == WANTED
    assert asked == [True]
