"""Objects in parts: in any order, at once, cut off, repeated; one object of the very bytes, or none."""

from __future__ import annotations

import itertools
import os
import random
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt_core.levels import PeerServer
from ckpt_core.levels.serving import uploads
from tests.levels.agents import until
from tests.levels.serving.asking import Heard, ask, files_below, headers_of, served
from tests.store.harness import QuickFiles

MIB = 1 << 20
KEY = "run/step/shard"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PeerServer]:
    monkeypatch.setattr(uploads, "UNIT_BYTES", 8 * 1024)
    monkeypatch.setattr(uploads, "_QUIET_S", 0.2)
    with served(tmp_path / "kept", files=QuickFiles()) as server:
        yield server


def begun(server: PeerServer, key: str = KEY) -> str:
    found = re.search(
        b"<UploadId>(.*?)</UploadId>", ask(server, "POST", f"/steps/{key}?uploads=").body
    )
    assert found is not None
    return found[1].decode()


def part(server: PeerServer, upload: str, number: int, data: bytes) -> Heard:
    return ask(server, "PUT", f"/steps/{KEY}?partNumber={number}&uploadId={upload}", data)


def end(server: PeerServer, upload: str, tags: dict[int, str], **more: str) -> Heard:
    rows = (
        f"<Part><ETag>{tag}</ETag><PartNumber>{number}</PartNumber></Part>"
        for number, tag in sorted(tags.items())
    )
    text = f"<CompleteMultipartUpload>{''.join(rows)}</CompleteMultipartUpload>".encode()
    named = {name.replace("_", "-"): value for name, value in more.items()}
    return ask(server, "POST", f"/steps/{KEY}?uploadId={upload}", text, more=named)


def cut(data: bytes, size: int) -> dict[int, bytes]:
    return {number: data[at : at + size] for number, at in enumerate(range(0, len(data), size), 1)}


@pytest.mark.parametrize("size", [8 * 1024, 16 * 1024, 5000])
@pytest.mark.parametrize("rest", [0, 1, 4999])
def test_parts_in_any_order_make_the_object(
    server: PeerServer, tmp_path: Path, size: int, rest: int
) -> None:
    data = os.urandom(3 * size + rest)
    parts = cut(data, size)
    orders = list(itertools.permutations(parts))
    for order in random.Random(f"{size} {rest}").sample(orders, 6):
        upload = begun(server)
        tags = {
            number: part(server, upload, number, parts[number]).headers["etag"] for number in order
        }
        assert end(server, upload, tags).status == 200
        assert files_below(tmp_path / "kept") == {KEY: data}


def test_many_parts_at_once_make_the_object(server: PeerServer, tmp_path: Path) -> None:
    data = os.urandom(40 * 8192 + 77)
    parts = cut(data, 8192)
    upload = begun(server)
    with ThreadPoolExecutor(8) as threads:
        answers = threads.map(lambda one: (one[0], part(server, upload, *one)), parts.items())
        tags = {number: answer.headers["etag"] for number, answer in answers}
    assert end(server, upload, tags).status == 200
    assert files_below(tmp_path / "kept") == {KEY: data}


def test_nothing_is_there_before_the_end_and_the_end_may_be_asked_for_again(
    server: PeerServer, tmp_path: Path
) -> None:
    upload = begun(server)
    tags = {1: part(server, upload, 1, b"x" * 8192).headers["etag"]}
    assert ask(server, "GET", f"/steps/{KEY}").status == 404
    assert b"<Key>" not in ask(server, "GET", "/steps?list-type=2").body
    first, again = (end(server, upload, tags) for _ in range(2))
    assert (first.status, first.body) == (200, again.body)
    assert part(server, upload, 2, b"late").status == 404
    assert files_below(tmp_path / "kept") == {KEY: b"x" * 8192}


def test_a_part_that_is_sent_again_takes_the_place_of_the_first(
    server: PeerServer, tmp_path: Path
) -> None:
    upload = begun(server)
    part(server, upload, 1, b"1" * 8192)
    part(server, upload, 2, b"2" * 100)
    tags = {1: part(server, upload, 1, b"3" * 8192).headers["etag"]}
    tags[2] = part(server, upload, 2, b"4" * 100).headers["etag"]
    assert end(server, upload, tags).status == 200
    assert files_below(tmp_path / "kept") == {KEY: b"3" * 8192 + b"4" * 100}


def test_a_part_that_was_cut_off_is_sent_again(server: PeerServer, tmp_path: Path) -> None:
    upload = begun(server)
    target = f"/steps/{KEY}?partNumber=1&uploadId={upload}"
    data = os.urandom(8192)
    headers = headers_of("PUT", target, data) | {"content-length": "8192"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    with socket.create_connection(("127.0.0.1", server.address.port), timeout=30) as half:
        half.sendall(f"PUT {target} HTTP/1.1\r\n{lines}\r\n".encode() + b"?" * 4000)
    tags = {1: part(server, upload, 1, data).headers["etag"]}
    tags[2] = part(server, upload, 2, b"end").headers["etag"]
    # Until the server has seen that the first one left, it says that it is to be asked again.
    until(lambda: end(server, upload, tags).status == 200)
    assert files_below(tmp_path / "kept") == {KEY: data + b"end"}


def test_while_a_part_still_comes_nothing_ends(server: PeerServer, tmp_path: Path) -> None:
    upload = begun(server)
    tags = {1: part(server, upload, 1, b"1" * 8192).headers["etag"]}
    target = f"/steps/{KEY}?partNumber=2&uploadId={upload}"
    headers = headers_of("PUT", target, b"2" * 8192) | {"content-length": "8192"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    with socket.create_connection(("127.0.0.1", server.address.port), timeout=30) as slow:
        slow.sendall(f"PUT {target} HTTP/1.1\r\n{lines}\r\n".encode() + b"2" * 100)
        # Of parts that are not there no object is made: else this could end it before the part begins.
        until(lambda: end(server, upload, tags | {2: "none"}).status == 503)
        assert end(server, upload, tags).status == 503
        slow.sendall(b"2" * 8092)
        assert b"200 OK" in slow.recv(1000)
    assert end(server, upload, tags).status == 400, "one of them is not named"
    assert ask(server, "GET", f"/steps/{KEY}").status == 404


@pytest.mark.parametrize("kind", ["missing", "another tag", "a gap", "a short one", "none"])
def test_what_is_not_all_of_its_parts_is_no_object(
    server: PeerServer, tmp_path: Path, kind: str
) -> None:
    upload = begun(server)
    sizes = {1: 8192, 2: 5000 if kind == "a short one" else 8192, 4 if kind == "a gap" else 3: 10}
    tags = {
        number: part(server, upload, number, b"x" * size).headers["etag"]
        for number, size in sizes.items()
    }
    if kind == "missing":
        del tags[2]
    if kind == "another tag":
        tags[1] = tags[3]
    if kind == "none":
        tags = {}
    answer = end(server, upload, tags)
    assert (answer.status, answer.code) == (400, "InvalidPart")
    assert ask(server, "GET", f"/steps/{KEY}").status == 404
    assert ask(server, "DELETE", f"/steps/{KEY}?uploadId={upload}").status == 204
    assert files_below(tmp_path / "kept") == {}


def test_an_end_with_a_condition_is_refused_where_something_is(
    server: PeerServer, tmp_path: Path
) -> None:
    for body, status in ((b"1", 200), (b"2", 412)):
        upload = begun(server)
        tags = {1: part(server, upload, 1, body).headers["etag"]}
        assert end(server, upload, tags, if_none_match="*").status == status
    assert ask(server, "GET", f"/steps/{KEY}").body == b"1"


def test_uploads_are_listed_and_given_up(server: PeerServer, tmp_path: Path) -> None:
    one, other = begun(server), begun(server, "other/x")
    part(server, one, 1, b"x" * 8192)
    part(server, one, 2, b"x" * 5)
    part(server, one, 2, b"y" * 5)
    text = ask(server, "GET", "/steps?prefix=run%2F&uploads=").body.decode()
    assert one in text and other not in text and f"<Key>{KEY}</Key>" in text
    for status in (204, 404):
        assert ask(server, "DELETE", f"/steps/{KEY}?uploadId={one}").status == status
        assert part(server, one, 3, b"x").status == 404
    assert ask(server, "DELETE", f"/steps/other/x?uploadId={other}").status == 204
    assert files_below(tmp_path / "kept") == {}


def test_another_key_or_number_or_name_is_no_part_of_it(server: PeerServer) -> None:
    upload = begun(server)
    assert ask(server, "PUT", f"/steps/other?partNumber=1&uploadId={upload}", b"x").status == 404
    assert part(server, "0" * 32, 1, b"x").status == 404
    for number in (0, 10_001):
        assert part(server, upload, number, b"x").status == 400
    assert ask(server, "PUT", f"/steps/{KEY}?uploadId={upload}", b"x").status == 400


def test_what_nobody_goes_on_with_for_a_day_is_given_up(
    server: PeerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = begun(server)
    part(server, upload, 1, b"x" * 8192)
    monkeypatch.setattr(uploads, "FORGOTTEN_S", -1.0)
    begun(server, "other")
    assert part(server, upload, 2, b"x").status == 404
    assert list(files_below(tmp_path / "kept").values()) == [b""]
