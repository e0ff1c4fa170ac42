"""A level in an object store that fails: every call ends, says what was wrong, and no secret with it."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt_core.errors import ConfigError
from ckpt_core.levels import Away, Far, open_far
from tests.levels.making import make_store, save
from tests.levels.object_copies import (
    MIB,
    RANK,
    SHARD,
    A,
    B,
    at_server,
    manifest_of,
    put,
    send,
    step,
)
from tests.levels.sending import sent_to
from tests.levels.servers.faulty import (
    SECRET,
    FaultServer,
    Request,
    Thing,
    always,
    at,
    in_environment,
)
from tests.levels.servers.moto import needs_store

pytestmark = needs_store


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with FaultServer() as server, in_environment(server.environ()):
        yield server


TRANSIENT = ("503", "reset", "torn", "lost", "slow")


@pytest.mark.parametrize("word", TRANSIENT)
def test_one_fault_at_any_request_is_overcome_or_said_and_the_next_try_succeeds(
    server: FaultServer, tmp_path: Path, word: str
) -> None:
    store = make_store(tmp_path / "root")
    save(store, 100)
    store.close()
    large = memoryview(bytes(9 * MIB))

    def send_all(far: Far) -> None:
        far.put(step(50), SHARD, iter([large]), large.nbytes)
        assert sent_to(far, tmp_path / "root", 100)
        assert set(far.steps()) == {100}

    send_all(at_server(server))
    requests = len(server.requests)
    for number in range(1, requests + 1):
        server.objects.clear()
        server.fault = at(number, word)
        with at_server(server) as far:
            try:
                send_all(far)
            except Away as exc:
                problem = exc
                send_all(far)
                assert not problem.hopeless and server.url() in str(problem)
    assert requests > 8


@pytest.mark.parametrize("word", ["403", "503", "hang", "torn"])
def test_every_call_ends_and_says_what_was_wrong(server: FaultServer, word: str) -> None:
    with at_server(server) as patient, at_server(server, request_s=0.3) as far:
        send(patient, A)
        calls: list[Callable[[], object]] = [
            lambda: far.put(A, SHARD, iter([memoryview(bytes(8 * MIB))] * 3), 24 * MIB),
            *(far.steps, far.directories, far.pins, far.pointers, far.check),
            *(lambda: put(far, B), lambda: far.files(A), lambda: far.publish(A, b"")),
            *(lambda: far.retire([A.target]), lambda: far.manifest(A.target)),
            *(lambda: far.read_word("x"), lambda: far.write_word("x", b"", over=None)),
            lambda: far.read_into(A, SHARD, memoryview(bytearray(10)), 0),
            *(lambda: far.pin(1, True), lambda: far.pin(1, False), lambda: far.sweep([])),
        ]
        server.fault = always(word)
        for call in calls:
            began = time.monotonic()
            with pytest.raises((Away, ConfigError)) as caught:
                call()
            assert time.monotonic() - began < 60
            assert server.url() in str(caught.value)
            if isinstance(caught.value, Away):
                assert caught.value.hopeless is (word == "403")
        server.fault = always("never")
        assert patient.steps() == {100: A.attempt} and patient.files(A) == {SHARD: 10, RANK: 10}


def test_a_full_bucket_is_said_and_what_was_sent_before_is_not_sent_again(
    server: FaultServer,
) -> None:
    with at_server(server) as far:
        put(far, A)
        server.room_bytes = 5
        with pytest.raises(Away, match=r"it is full.*make room") as caught:
            put(far, A, RANK)
        assert not caught.value.hopeless
        assert far.files(A) == {SHARD: 10}


@pytest.mark.parametrize("missing", [0, 1])
def test_an_upload_that_is_refused_because_another_sender_was_first_is_taken_for_done(
    server: FaultServer, missing: int
) -> None:
    data = bytes(range(256)) * (17 * MIB // 256)

    def first(request: Request) -> str | None:
        if not (request.method == "POST" and "uploadId" in request.query):
            return None
        key = request.key.partition("/")[2]
        server.objects[key] = Thing(data[missing:], '"other"', time.time())
        return "400"

    with at_server(server) as far:
        server.fault = first
        if missing:
            with pytest.raises(Away, match="answered 400"):
                put(far, A, data=data)
            return
        put(far, A, data=data)
        assert far.files(A) == {SHARD: len(data)}


WRONG = {
    "no bucket": ({}, "s3://no-such-bucket/run", "no such bucket.*create s3://no-such-bucket"),
    "no permission": ({}, "403", "not permitted.*let these credentials"),
    "refused": (
        {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"},
        "",
        r"cannot be reached.*endpoint \(http://127",
    ),
    "no name": ({"AWS_ENDPOINT_URL": "http://no-such-host.invalid"}, "", "cannot be reached"),
    "hangs": ({}, "hang", "no answer came in time"),
    "no account": ({}, "az://container/run", "AZURE_STORAGE_ACCOUNT_NAME"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_within_seconds_with_its_remedy(
    server: FaultServer, case: str
) -> None:
    environ, what, text = WRONG[case]
    if "://" not in what and what:
        server.fault = always(what)
    url = what if "://" in what else server.url()
    began = time.monotonic()
    with in_environment(environ), pytest.raises((ConfigError, Away), match=text) as caught:
        open_far(url).check()
    assert time.monotonic() - began < 60
    assert url in str(caught.value)


def test_no_text_holds_a_credential_or_what_a_server_said(
    server: FaultServer, caplog: pytest.LogCaptureFixture
) -> None:
    texts = []
    caplog.set_level(logging.DEBUG)
    words = ("400", "403", "404", "409", "412", "416", "503", "reset", "torn")
    with at_server(server) as patient:
        send(patient, A)
    with at_server(server, request_s=0.2) as far:
        for word in words:
            server.fault = always(word)
            calls: list[Callable[[], object]] = [
                *(far.steps, far.check, far.pins, lambda: put(far, B)),
                *(lambda: far.publish(B, manifest_of(B)), lambda: far.retire([A.target])),
                lambda: far.write_word("x", b"", over=None),
                lambda: far.put(A, SHARD, iter([memoryview(bytes(8 * MIB))] * 2), 16 * MIB),
            ]
            for call in calls:
                try:
                    call()
                except Exception as exc:
                    texts.append("".join(traceback.format_exception(exc)))
    server.fault = always("never")
    for key in ("sig=", "AccountKey"):
        environ = {
            "AZURE_STORAGE_ACCOUNT_NAME": "account",
            "AZURE_STORAGE_SAS_TOKEN": f"sv=1&sig={SECRET}",
            "AZURE_STORAGE_ENDPOINT": f"http://user:{SECRET}@127.0.0.1:{server.port}",
        }
        with in_environment(environ), pytest.raises((ConfigError, Away)) as caught:
            open_far("az://container/run").check()
        texts.append("".join(traceback.format_exception(caught.value)) + key)
    assert len(texts) > 40
    for text in [*texts, caplog.text, *map(str, server.keys())]:
        assert SECRET not in text and "AKIDTEST" not in text and "<Message>" not in text
        assert "Signature" not in text.replace("SignatureDoesNotMatch", "")
