"""Large files on their way to a peer: whole and right or not there, and nobody waits for long."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from ckpt_core.levels import Away, Copy
from ckpt_core.levels.far.objects import ObjectFar
from ckpt_core.levels.signing import BodyMac
from tests.levels.servers.before_peer import BeforePeer
from tests.levels.servers.faulty import Request, at, in_environment
from tests.levels.servers.moto import needs_store
from tests.levels.servers.peer import PeerServer

needs_mac = pytest.mark.skipif(not BodyMac.is_there(), reason="missing: cryptography")
pytestmark = [needs_store, needs_mac]

MIB = 1 << 20
COPY = Copy(7, "000000000007-0123abcd")


@pytest.fixture
def server(peer: PeerServer, tmp_path: Path) -> Iterator[BeforePeer]:
    with BeforePeer(peer, tmp_path.name) as server, in_environment(server.environ()):
        yield server


@pytest.fixture
def far(server: BeforePeer) -> Iterator[ObjectFar]:
    with ObjectFar(server.url(), request_s=60.0) as far:
        yield far


def kept(server: BeforePeer, tmp_path: Path, name: str = "shard") -> Path:
    return server.peer.kept / tmp_path.name / "run" / COPY.target / COPY.folder / name


@pytest.fixture
def nothing(server: BeforePeer, tmp_path: Path) -> Callable[[], bool]:
    """Whether nothing is there, and nothing on its way that was not before."""
    incoming = server.peer.kept / ".incoming"
    before = {*incoming.iterdir()}
    return lambda: not kept(server, tmp_path).exists() and {*incoming.iterdir()} <= before


def heard(server: BeforePeer) -> list[Request]:
    found: list[Request] = []

    def fault(request: Request) -> None:
        found.append(request)

    server.fault = fault
    return found


def blocks_of(data: bytes, size: int, *, again: bool = False) -> Iterator[memoryview]:
    """Blocks of a file; `again`: in memory that is used again for the next one."""
    buffer = memoryview(bytearray(size))
    for begin in range(0, len(data), size):
        block = memoryview(data)[begin : begin + size]
        if again:
            buffer[: len(block)] = block
            block = buffer[: len(block)]
        yield block


@pytest.mark.parametrize("nbytes", [8 * MIB + 1, 16 * MIB, 19 * MIB + 77])
def test_every_byte_comes_and_each_part_is_vouched_for(
    server: BeforePeer, far: ObjectFar, tmp_path: Path, nbytes: int
) -> None:
    came, data = heard(server), os.urandom(nbytes)
    for name, size, again in (
        ("shard", 8 * MIB, False),
        ("layers/a b#ü=1", 3 * MIB, False),
        ("used again", 100_000, True),
    ):
        far.put(COPY, name, blocks_of(data, size, again=again), nbytes)
        assert kept(server, tmp_path, name).read_bytes() == data
        assert far.files(COPY)[name] == nbytes
    parts = [one for one in came if "partNumber" in one.target]
    assert len(parts) == 3 * -(-nbytes // (8 * MIB))
    contents = {one.headers["x-amz-content-sha256"] for one in parts}
    assert len(contents) == len(parts) and all(BodyMac.named(one) for one in contents)


WORDS = ("503", "reset", "torn", "lost")


@pytest.mark.parametrize("word", WORDS)
def test_one_fault_at_any_request_is_overcome(
    server: BeforePeer, far: ObjectFar, tmp_path: Path, word: str
) -> None:
    data = os.urandom(17 * MIB)
    for number in range(1, 6):
        server.fault = at(number, word)
        far.put(COPY, "shard", blocks_of(data, 8 * MIB), len(data))
        assert kept(server, tmp_path).read_bytes() == data, number
        kept(server, tmp_path).unlink()


def test_a_peer_that_goes_on_failing_is_away_and_nothing_is_there(
    server: BeforePeer, far: ObjectFar, nothing: Callable[[], bool]
) -> None:
    data = bytes(9 * MIB)
    for word, said in (("503", "asks for less haste"), ("507", "it is full"), ("reset", "was cut")):
        server.fault = partial(on_parts, word)
        with pytest.raises(Away, match=said) as caught:
            far.put(COPY, "shard", blocks_of(data, 8 * MIB), len(data))
        assert not caught.value.hopeless and nothing()


def on_parts(word: str, request: Request) -> str | None:
    return word if "partNumber" in request.target else None


class Stopped(Exception):
    """Whoever sends is told to end."""


def test_what_blocks_raise_comes_out_at_once_though_the_peer_is_silent(
    server: BeforePeer, nothing: Callable[[], bool], far: ObjectFar, tmp_path: Path
) -> None:
    asked = threading.Event()

    def fault(request: Request) -> str | None:
        word = on_parts("hang", request)
        if word:
            asked.set()
        return word

    def blocks() -> Iterator[memoryview]:
        yield memoryview(bytes(8 * MIB))
        assert asked.wait(60)
        raise Stopped

    server.fault = fault
    with ObjectFar(server.url(), request_s=300.0) as far:
        began = time.monotonic()
        with pytest.raises(Stopped):
            far.put(COPY, "shard", blocks(), 17 * MIB)
        assert time.monotonic() - began < 100
    assert nothing()


def test_a_file_that_is_not_as_long_as_it_was_said_to_be_is_not_there(
    server: BeforePeer, nothing: Callable[[], bool], far: ObjectFar, tmp_path: Path
) -> None:
    for nbytes in (17 * MIB - 1, 17 * MIB + 1):
        with pytest.raises(AssertionError):
            far.put(COPY, "shard", blocks_of(bytes(17 * MIB), MIB), nbytes)
        assert nothing()


@pytest.mark.parametrize("word", ["403", "501"])
def test_a_peer_that_knows_no_such_parts_is_sent_others_from_then_on(
    server: BeforePeer, nothing: Callable[[], bool], far: ObjectFar, tmp_path: Path, word: str
) -> None:
    data = os.urandom(9 * MIB)
    server.fault = lambda request: word if "GMAC" in str(request.headers) else None
    with pytest.raises(Away, match="sent another way from now on") as caught:
        far.put(COPY, "shard", blocks_of(data, MIB), len(data))
    assert not caught.value.hopeless
    assert nothing()
    far.put(COPY, "shard", blocks_of(data, MIB), len(data))
    assert kept(server, tmp_path).read_bytes() == data


def test_without_the_package_files_go_as_to_any_store(
    server: BeforePeer, far: ObjectFar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BodyMac, "is_there", staticmethod(lambda: False))
    came, data = heard(server), os.urandom(9 * MIB)
    far.put(COPY, "shard", blocks_of(data, MIB), len(data))
    assert kept(server, tmp_path).read_bytes() == data
    assert not any(BodyMac.named(one.headers["x-amz-content-sha256"]) for one in came)
