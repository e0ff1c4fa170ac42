"""Whoever sends too much, too slowly, or what nobody understands is cut off, and others are served."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from ckpt_core.errors import ConfigError
from ckpt_core.levels import Address, PeerServer, parse_address
from ckpt_core.levels.serving import wire
from tests.levels.agents import until
from tests.levels.serving.asking import KEYS, ask, files_below, headers_of, put, send, served
from tests.store.harness import QuickFiles


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PeerServer]:
    with served(tmp_path / "kept") as server:
        yield server


def said(server: PeerServer, data: bytes) -> bytes:
    """What the server answers to these bytes, until it closes."""
    with socket.create_connection(("127.0.0.1", server.address.port), timeout=60) as sock:
        heard = b""
        try:
            sock.sendall(data)
            while piece := sock.recv(65536):
                heard += piece
        except ConnectionError:
            pass
        return heard


def connected(server: PeerServer) -> socket.socket:
    """Somebody who has shown nothing yet."""
    return socket.create_connection(("127.0.0.1", server.address.port), timeout=60)


def signed(method: str, target: str) -> bytes:
    """A request without a body of somebody who has the token."""
    rows = "".join(f"{name}: {value}\r\n" for name, value in headers_of(method, target).items())
    return f"{method} {target} HTTP/1.1\r\n{rows}\r\n".encode()


def is_cut_off(sock: socket.socket) -> bool:
    """Whether it is, without an answer, once anything is heard."""
    try:
        return sock.recv(1000) == b""
    except ConnectionError:
        return True


@contextmanager
def holder(server: PeerServer) -> Iterator[socket.socket]:
    """A connection on which the token has been shown, and which goes on."""
    with connected(server) as sock:
        sock.sendall(signed("HEAD", "/steps/run/none"))
        assert b" 404 " in sock.recv(1000)
        yield sock


@pytest.mark.parametrize(
    "data",
    [
        *(b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n", b"GET nothing HTTP/1.1\r\n\r\n"),
        *(b"GET / HTTP/1.1\r\nno header\r\n\r\n", b"PUT / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"),
    ],
)
def test_what_is_no_request_is_refused(server: PeerServer, data: bytes) -> None:
    assert b" 400 " in said(server, data)


def test_a_header_that_is_too_long_is_cut_off(server: PeerServer) -> None:
    assert said(server, b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000) == b""


def test_a_body_longer_than_any_is_refused(server: PeerServer) -> None:
    text = said(server, b"PUT /x HTTP/1.1\r\nContent-Length: 9999999999999\r\n\r\n")
    assert b" 413 " in text


def test_who_says_nothing_or_too_little_is_cut_off(
    server: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "STRANGER_S", 0.1)
    assert said(server, b"") == b""
    assert said(server, b"GET / HTTP/1.1\r\nHost:") == b""


def test_a_stranger_gains_no_time_by_sending_on(
    server: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "STRANGER_S", 0.2)
    head = b"PUT /steps/x HTTP/1.1\r\nContent-Length: 60\r\n\r\n"
    for begin in (head, b"GET / HTTP/1.1\r\nX: "):
        with socket.create_connection(("127.0.0.1", server.address.port), timeout=60) as sock:
            sock.sendall(begin)
            with suppress(ConnectionError):
                for _ in range(60):  # each of them in time, and all of them not
                    sock.sendall(b"x")
                    time.sleep(0.05)
            assert is_cut_off(sock)


def test_a_request_that_is_not_signed_has_no_time_of_those_before_it(
    server: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holder(server) as sock:
        monkeypatch.setattr(wire, "STRANGER_S", 0.2)
        sock.sendall(b"PUT /steps/x HTTP/1.1\r\nContent-Length: 1\r\n\r\n")
        assert is_cut_off(sock), "its body does not come"


def test_what_is_not_known_is_501(server: PeerServer, tmp_path: Path) -> None:
    for method, target in (
        ("PUT", "/steps"),
        ("GET", "/steps"),
        ("GET", "/steps?acl="),
        ("PUT", "/steps/x?tagging="),
        ("PATCH", "/steps/x"),
        ("POST", "/steps/x"),
        ("GET", "/steps?list-type=2&prefix=ru"),
        ("GET", "/steps?list-type=2&delimiter=-"),
    ):
        answer = ask(server, method, target)
        assert (answer.status, answer.code) == (501, "NotImplemented"), (method, target)
    copy = {"x-amz-copy-source": "/steps/y"}
    for method, target, body in (
        ("PUT", "/steps/x", b"bytes"),
        ("PUT", "/steps/x?partNumber=1&uploadId=x", b""),
        ("GET", "/steps/x", b""),
        ("PUT", "/steps", b""),
    ):
        assert ask(server, method, target, body, more=copy).status == 501
    assert ask(server, "GET", "/other/x").code == "NoSuchBucket"
    headers = headers_of("PUT", "/steps/x", b"", more={"transfer-encoding": "chunked"})
    assert send(server, "PUT", "/steps/x", b"", headers).status == 501
    assert files_below(tmp_path / "kept") == {}


def test_a_client_that_waits_to_be_asked_is_asked(server: PeerServer) -> None:
    target = "/steps/run/x"
    headers = headers_of("PUT", target, b"body", more={"expect": "100-continue"})
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    with socket.create_connection(("127.0.0.1", server.address.port), timeout=60) as sock:
        sock.sendall(f"PUT {target} HTTP/1.1\r\n{lines}content-length: 4\r\n\r\n".encode())
        assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"body")
        assert b" 200 OK" in sock.recv(1000)


def test_several_requests_come_on_one_connection(server: PeerServer) -> None:
    put(server, "run/x", b"bytes")
    heard = said(server, signed("GET", "/steps/run/x") * 3 + b"GET / HTTP/1.1\r\n\r\n")
    assert heard.count(b" 200 OK") == 3 and heard.count(b"\r\n\r\nbytes") == 3
    assert heard.count(b" 403 ") == 1


class Mistaken(QuickFiles):
    """A mistake in the server, at each look at a file."""

    def open_read(self, path: Path) -> int:
        raise KeyError(f"seCret {path}")


def test_a_mistake_of_the_server_costs_one_request_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with served(tmp_path / "kept", files=Mistaken()) as server:
        asked = signed("GET", "/steps/x") * 2 + signed("GET", "/steps?list-type=2")
        heard = said(server, asked + b"GET / HTTP/1.1\r\n\r\n")
        assert heard.count(b" 500 ") == 2 and heard.count(b" 200 OK") == 1
    told, stranger = [record.getMessage() for record in caplog.records]
    assert "127.0.0.1 was refused: unexpected KeyError in test_wire.py:" in told
    assert stranger == "127.0.0.1 was refused: AccessDenied"
    assert "seCret" not in caplog.text


def test_a_list_of_no_rows_is_one(server: PeerServer) -> None:
    put(server, "run/x", b"bytes")
    answer = ask(server, "GET", "/steps?list-type=2&max-keys=0")
    assert answer.status == 200 and b"<IsTruncated>false</IsTruncated>" in answer.body
    assert b"<Key>" not in answer.body


def test_no_more_than_so_many_are_served_at_once(tmp_path: Path) -> None:
    with served(tmp_path / "kept", most_connections=2) as server:
        with holder(server), holder(server):
            assert said(server, b"GET / HTTP/1.1\r\n\r\n") == b""
        until(lambda: not server._open)
        assert put(server, "run/x", b"bytes").status == 200


def test_strangers_who_have_taken_all_places_make_room_for_a_newcomer(tmp_path: Path) -> None:
    with served(tmp_path / "kept", most_connections=3) as server, ExitStack() as stack:
        slow = b"PUT /steps/x HTTP/1.1\r\nContent-Length: 60000\r\n\r\nx"
        strangers = [stack.enter_context(connected(server)) for _ in range(3)]
        for sock in strangers:
            sock.sendall(slow)
        until(lambda: len(server._open) == 3)
        assert put(server, "run/x", b"bytes").status == 200
        assert is_cut_off(strangers[0]), "the one that has been there for longest"
        strangers[1].setblocking(False)
        with pytest.raises(BlockingIOError):
            strangers[1].recv(1000)


def test_strangers_who_come_again_and_again_do_not_close_the_connection_of_a_holder(
    tmp_path: Path,
) -> None:
    with served(tmp_path / "kept", most_connections=3) as server, holder(server) as sock:
        with ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(connected(server))
            assert put(server, "run/x", b"bytes").status == 200
            assert len(server._open) <= 3
        sock.sendall(signed("GET", "/steps/run/x"))
        heard = b""
        while not heard.endswith(b"bytes") and (piece := sock.recv(1000)):
            heard += piece
        assert b" 200 OK" in heard and heard.endswith(b"bytes")


def test_an_end_waits_for_what_is_being_answered(tmp_path: Path) -> None:
    target, body = "/steps/run/x", bytes(1000)
    headers = headers_of("PUT", target, body)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    with served(tmp_path / "kept") as server:
        idle = socket.create_connection(("127.0.0.1", server.address.port), timeout=60)
        with idle, socket.create_connection(("127.0.0.1", server.address.port), timeout=60) as busy:
            busy.sendall(f"PUT {target} HTTP/1.1\r\n{lines}content-length: 1000\r\n\r\n".encode())
            until(lambda: server._busy)
            closing = threading.Thread(target=server.close)
            closing.start()
            until(lambda: server._ends)
            busy.sendall(body)
            assert b" 200 OK" in busy.recv(1000)
            closing.join(60)
            assert not closing.is_alive() and idle.recv(1) == b""
    assert files_below(tmp_path / "kept") == {"run/x": body}


# -- where it listens ------------------------------------------------------------------------------


EVERYWHERE = [
    *("0.0.0.0", "0", "0x0", "0.0", "0.0.0", "000.0.0.0", "0x0.0.0x0.00"),
    *("::", "0::0", "::0.0.0.0", "::ffff:0.0.0.0", "::ffff:0:0", "::%1"),
]
"""Names of every address of a machine that do not say so."""


@pytest.mark.parametrize("text", [*(str(Address(host, 7070)) for host in EVERYWHERE), "*:7070"])
def test_every_network_is_meant_only_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--bind .* listens on every network.*all:7070") as found:
        parse_address(text)
    assert text in str(found.value)
    assert parse_address("all:7070") == Address("all", 7070)


@pytest.mark.parametrize("host", EVERYWHERE)
def test_what_turns_out_to_be_every_network_is_not_listened_at(host: str, tmp_path: Path) -> None:
    # As it is with a name that stands for such a number: only the system knows.
    said = "every network" if ":" not in host else "every network|cannot listen"  # IPv6 may be off
    with pytest.raises(ConfigError, match=said):
        PeerServer(tmp_path / "kept", KEYS, Address(host, 0))
    assert not (tmp_path / "kept").exists()


def test_all_of_them_are_listened_at_when_that_is_said(tmp_path: Path) -> None:
    with PeerServer(tmp_path / "kept", KEYS, parse_address("all:0")) as server:
        assert server._listening.getsockname()[0] == "0.0.0.0"
        assert server.address.host == "all" and put(server, "run/x", b"bytes").status == 200


@pytest.mark.parametrize(
    "host", ["0.example.invalid", "10.0.0.1", "127.1", "::1", "fe80::1%1", "ib0"]
)
def test_other_addresses_and_names_are_taken_as_they_are(host: str) -> None:
    assert parse_address(str(Address(host, 7070))) == Address(host, 7070)


@pytest.mark.parametrize(
    "text", ["", "10.0.0.5", ":7070", "10.0.0.5:port", "::1:7070", "h:70700", "a/b:1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is no address: write it like 10\.0\.0\.5:7070"):
        parse_address(text)


def test_an_address_of_another_machine_or_a_taken_port_is_refused(
    server: PeerServer, tmp_path: Path
) -> None:
    taken = Address("127.0.0.1", server.address.port)
    for address in (taken, Address("192.0.2.1", 0), Address("no-such-host.invalid", 0)):
        with pytest.raises(ConfigError, match=f"cannot listen at {address.host}"):
            PeerServer(tmp_path / "other", KEYS, address)
    assert not (tmp_path / "other").exists()


def test_it_listens_nowhere_else(server: PeerServer) -> None:
    assert server._listening.getsockname() == ("127.0.0.1", server.address.port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.address.port), timeout=60)
