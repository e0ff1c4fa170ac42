"""Whoever sends too much, too slowly, or what nobody understands is cut off, and others are served."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_core.errors import ConfigError
from ckpt_core.levels import Address, PeerServer, parse_address
from ckpt_core.levels.serving import wire
from tests.levels.agents import until
from tests.levels.serving.asking import KEYS, ask, files_below, headers_of, put, send, served


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
    headers = headers_of("GET", "/steps/run/x")
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    one = f"GET /steps/run/x HTTP/1.1\r\n{lines}\r\n".encode()
    heard = said(server, one * 3 + b"GET / HTTP/1.1\r\n\r\n")
    assert heard.count(b" 200 OK") == 3 and heard.count(b"\r\n\r\nbytes") == 3
    assert heard.count(b" 403 ") == 1


def test_no_more_than_so_many_are_served_at_once(tmp_path: Path) -> None:
    with served(tmp_path / "kept", most_connections=2) as server:
        place = ("127.0.0.1", server.address.port)
        with socket.create_connection(place), socket.create_connection(place):
            until(lambda: len(server._open) == 2)
            assert said(server, b"GET / HTTP/1.1\r\n\r\n") == b""
        until(lambda: not server._open)
        assert put(server, "run/x", b"bytes").status == 200


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


@pytest.mark.parametrize("text", ["0.0.0.0:7070", "[::]:7070", "*:7070"])
def test_every_network_is_meant_only_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"every network.*all:7070"):
        parse_address(text)
    assert parse_address("all:7070") == Address("all", 7070)


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
