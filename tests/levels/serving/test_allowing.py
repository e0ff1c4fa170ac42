"""A stranger gets nothing and changes nothing; whoever has the token gets what was signed, for a while."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ckpt_core.levels import PeerServer
from ckpt_core.levels.signing import BodyMac
from ckpt_core.levels.tokens import Keys
from tests.levels.serving.asking import KEYS, ask, files_below, headers_of, put, send, served

needs_mac = pytest.mark.skipif(not BodyMac.is_there(), reason="missing: cryptography")
THERE = {"run/there": b"bytes"}
OTHERS = [
    ("GET", "/steps/run/there", b""),
    ("HEAD", "/steps/run/there", b""),
    ("GET", "/steps?list-type=2&prefix=run%2F", b""),
    ("GET", "/steps?uploads=", b""),
    ("PUT", "/steps/run/there", b"other"),
    ("PUT", "/steps/run/new", b"other"),
    ("DELETE", "/steps/run/there", b""),
    ("POST", "/steps?delete=", b"<Delete><Object><Key>run/there</Key></Object></Delete>"),
    ("POST", "/steps/run/new?uploads=", b""),
    ("PUT", "/steps/run/new?partNumber=1&uploadId=x", b"other"),
    ("POST", "/steps/run/new?uploadId=x", b""),
    ("DELETE", "/steps/run/new?uploadId=x", b""),
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PeerServer]:
    with served(tmp_path / "kept") as server:
        assert put(server, "run/there", b"bytes").status == 200
        yield server


@pytest.mark.parametrize(("method", "target", "body"), OTHERS)
@pytest.mark.parametrize(
    "who", ["nobody", "another key", "another token", "too late", "too early", "presigned"]
)
def test_a_stranger_gets_403_and_changes_nothing(
    server: PeerServer, tmp_path: Path, who: str, method: str, target: str, body: bytes
) -> None:
    now = datetime.now(UTC)
    headers = {
        "nobody": {"host": "peer"},
        "presigned": {"host": "peer"},
        "another key": headers_of(method, target, body, keys=Keys("OTHER", "seCret")),
        "another token": headers_of(method, target, body, keys=Keys("ACCESS", "other")),
        "too late": headers_of(method, target, body, when=now - timedelta(minutes=16)),
        "too early": headers_of(method, target, body, when=now + timedelta(minutes=16)),
    }[who]
    if who == "presigned":
        target += ("&" if "?" in target else "?") + "X-Amz-Signature=" + "0" * 64
    answer = send(server, method, target, body, headers)
    assert answer.status == 403
    assert b"bytes" not in answer.body and "etag" not in answer.headers
    assert files_below(tmp_path / "kept") == THERE


def test_a_key_beyond_ascii_is_another_key(
    server: PeerServer, caplog: pytest.LogCaptureFixture
) -> None:
    headers = headers_of("GET", "/steps/run/there", keys=Keys("\xe9bc", "seCret"))
    answer = send(server, "GET", "/steps/run/there", b"", headers)
    assert (answer.status, answer.code) == (403, "InvalidAccessKeyId")
    assert [record.getMessage() for record in caplog.records] == [
        "127.0.0.1 was refused: InvalidAccessKeyId"
    ]


def test_a_signature_is_worth_nothing_for_another_request(
    server: PeerServer, tmp_path: Path
) -> None:
    headers = headers_of("GET", "/steps/run/there")
    assert send(server, "GET", "/steps/run/there", b"", headers).status == 200
    for method, target in (
        ("DELETE", "/steps/run/there"),
        ("HEAD", "/steps/run/there"),
        ("GET", "/steps/run/other"),
        ("GET", "/steps/run/there?uploads="),
        ("PUT", "/steps/run/there"),
    ):
        assert send(server, method, target, b"", headers).status == 403
    assert files_below(tmp_path / "kept") == THERE


@pytest.mark.parametrize(
    "header",
    [
        {"if-match": '"x"'},
        {"if-none-match": "*"},
        {"range": "bytes=0-1"},
        {"x-amz-copy-source": "/steps/run/there"},
    ],
)
def test_what_is_acted_on_has_to_be_signed(server: PeerServer, header: dict[str, str]) -> None:
    for method, body in (("GET", b""), ("PUT", b"other")):
        headers = headers_of(method, "/steps/run/there", body, unsigned=header)
        assert send(server, method, "/steps/run/there", body, headers).status == 403


def test_a_header_that_comes_twice_is_refused(server: PeerServer) -> None:
    headers = headers_of("GET", "/steps/run/there") | {"X-Amz-Date": "20200101T000000Z"}
    assert send(server, "GET", "/steps/run/there", b"", headers).status == 400


@pytest.mark.parametrize("body", [b"other", b"bytes and more"])
def test_a_body_that_is_not_what_was_signed_is_refused_and_nothing_is_written(
    server: PeerServer, tmp_path: Path, body: bytes
) -> None:
    for target in ("/steps/run/there", "/steps/run/new"):
        answer = send(server, "PUT", target, body, headers_of("PUT", target, b"signed"))
        assert (answer.status, answer.code) == (400, "XAmzContentSHA256Mismatch")
    assert files_below(tmp_path / "kept") == THERE


def test_a_body_without_a_signed_sum_is_refused(server: PeerServer, tmp_path: Path) -> None:
    for text, status in (("UNSIGNED-PAYLOAD", 403), ("STREAMING-AWS4-HMAC-SHA256-PAYLOAD", 501)):
        headers = headers_of("PUT", "/steps/run/new", more={"x-amz-content-sha256": text})
        assert send(server, "PUT", "/steps/run/new", b"other", headers).status == status
    assert files_below(tmp_path / "kept") == THERE


@needs_mac
def test_a_body_that_is_not_the_one_of_its_mac_is_refused_and_nothing_is_written(
    server: PeerServer, tmp_path: Path
) -> None:
    body = b"bytes" * 1000
    right = content_of(body)
    _, nonce, tag = right.split("-")
    target = "/steps/run/new"
    for text in (
        content_of(body + b"."),
        content_of(body, secret="another"),
        f"GMAC-{nonce[::-1]}-{tag}",
        f"GMAC-{nonce}-{'0' * 32}",
    ):
        headers = headers_of("PUT", target, more={"x-amz-content-sha256": text})
        answer = send(server, "PUT", target, body, headers)
        assert (answer.status, answer.code) == (400, "XAmzContentSHA256Mismatch")
    for text in (right.upper(), right[:-1], "GMAC", right + "0"):
        headers = headers_of("PUT", target, more={"x-amz-content-sha256": text})
        assert send(server, "PUT", target, body, headers).status == 403
    # Only a body that is put: of texts that are acted on it is a hash.
    for method, place in (("POST", "/steps?delete="), ("GET", "/steps/run/there")):
        headers = headers_of(method, place, more={"x-amz-content-sha256": content_of(b"")})
        assert send(server, method, place, b"", headers).status == 403
    stranger = Keys(KEYS.access_key_id, "guessed")
    headers = headers_of("PUT", target, keys=stranger, more={"x-amz-content-sha256": right})
    assert send(server, "PUT", target, body, headers).status == 403
    assert files_below(tmp_path / "kept") == THERE
    headers = headers_of("PUT", target, more={"x-amz-content-sha256": right})
    assert send(server, "PUT", target, body, headers).status == 200
    assert files_below(tmp_path / "kept") == THERE | {"run/new": body}


@needs_mac
def test_two_macs_of_the_same_bytes_have_nothing_in_common() -> None:
    assert len({content_of(b"same").split("-")[n] for _ in range(3) for n in (1, 2)}) == 6


def test_a_server_that_knows_no_macs_says_so(
    server: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BodyMac, "is_there", staticmethod(lambda: False))
    more = {"x-amz-content-sha256": f"GMAC-{'0' * 32}-{'0' * 32}"}
    headers = headers_of("PUT", "/steps/run/new", more=more)
    assert send(server, "PUT", "/steps/run/new", b"x", headers).status == 501


def content_of(body: bytes, *, secret: str = KEYS.secret_access_key) -> str:
    mac = BodyMac.begin(secret)
    mac.update(memoryview(body))
    return mac.content()


def test_a_strangers_long_body_is_not_read(server: PeerServer) -> None:
    with socket.create_connection(("127.0.0.1", server.address.port), timeout=30) as stranger:
        stranger.sendall(
            b"PUT /steps/run/new HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n"
        )
        assert stranger.recv(100) == b"", "the connection is closed at once"


def test_the_stores_own_tools_sign_likewise(server: PeerServer) -> None:
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    target = "/steps?list-type=2&prefix=run%2F&delimiter=%2F"
    request = AWSRequest("GET", f"http://127.0.0.1:{server.address.port}{target}")
    request.context["payload_signing_enabled"] = True
    credentials = Credentials(KEYS.access_key_id, KEYS.secret_access_key)
    S3SigV4Auth(credentials, "s3", "us-east-1").add_auth(request)
    headers = {name.lower(): value for name, value in request.headers.items()}
    host = f"127.0.0.1:{server.address.port}"
    answer = send(server, "GET", target, b"", {"host": host, **headers})
    assert answer.status == 200 and b"<Key>run/there</Key>" in answer.body


def test_who_was_refused_is_said_once_and_never_what_was_asked_with(
    server: PeerServer, caplog: pytest.LogCaptureFixture
) -> None:
    for key in ("one", "other"):
        for keys in (Keys("OTHER", "seCret"), Keys("ACCESS", "other")):
            ask(server, "GET", f"/steps/run/{key}", keys=keys)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "127.0.0.1 was refused: InvalidAccessKeyId",
        "127.0.0.1 was refused: SignatureDoesNotMatch",
    ]


def test_no_answer_says_what_was_asked_with(server: PeerServer) -> None:
    answers = [ask(server, "GET", f"/steps/run/{name}") for name in ("no", "..", "%00")]
    answers.append(send(server, "GET", "/steps/run/there", b"", {"authorization": "seCret"}))
    for answer in answers:
        assert answer.status in (400, 403, 404)
        assert b"ACCESS" not in answer.body and b"seCret" not in answer.body
