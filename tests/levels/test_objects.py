"""A level in an object store, against moto's server, Azurite, and one of our own that can be told to fail."""

from __future__ import annotations

import io
import itertools
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.errors import ConfigError
from ckpt_core.levels import Away, Conflict, Copy, Far, open_far
from tests.levels.object_copies import (
    MIB,
    RANK,
    SHARD,
    A,
    B,
    C,
    at_server,
    manifest_of,
    put,
    send,
    step,
)
from tests.levels.servers.azurite import AzuriteServer, needs_azurite
from tests.levels.servers.faulty import (
    SECRET,
    FaultServer,
    Thing,
    always,
    in_environment,
)
from tests.levels.servers.like_google import GoogleServer
from tests.levels.servers.moto import MotoServer, needs_store
from tests.levels.servers.peer import PeerServer

pytestmark = needs_store


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with FaultServer() as server, in_environment(server.environ()):
        yield server


class InThisProcess:
    """Every bucket is one store, which is no server: nobody else can be asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
        from ckpt_core.levels.far import bucket, probing

        for module in (bucket, probing):
            monkeypatch.setattr(module, "open_store", lambda *_, **__: store, raising=False)

    def url(self, prefix: str) -> str:
        return f"s3://bucket/{prefix}"

    def environ(self) -> dict[str, str]:
        return {"AWS_SKIP_SIGNATURE": "true"}


_prefixes = itertools.count()
SERVERS = [
    "moto",
    pytest.param("azurite", marks=needs_azurite),
    "google",
    "server",
    "peer",
    "memory",
]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> InThisProcess:
    """The client's own store in memory instead of one for S3."""
    from obstore.store import MemoryStore

    return InThisProcess(monkeypatch, MemoryStore())


@pytest.fixture(params=SERVERS)
def far(request: pytest.FixtureRequest) -> Iterator[Far]:
    """A level where nothing is yet, at each server."""
    there: MotoServer | AzuriteServer | FaultServer | PeerServer | InThisProcess
    there = request.getfixturevalue(request.param)
    prefix = f"team/run {next(_prefixes)}"
    with in_environment(there.environ()), open_far(there.url(prefix)) as far:
        yield far


# -- what a level is ------------------------------------------------------------------------------


def test_a_step_is_there_when_its_manifest_is(far: Far) -> None:
    put(far, A)
    put(far, A, RANK)
    assert far.steps() == {} and far.manifest(A.target) is None
    assert far.files(A) == {SHARD: 10, RANK: 10}
    assert far.publish(A, manifest_of(A))
    assert far.steps() == {100: A.attempt} == far.steps()
    assert far.manifest(A.target) == manifest_of(A)
    assert far.directories() == {}


@pytest.mark.parametrize("nbytes", [0, 1, 8 * MIB, 8 * MIB + 1, 21 * MIB + 4096])
def test_a_file_of_any_length_is_read_back_as_it_was_written(far: Far, nbytes: int) -> None:
    data = os.urandom(nbytes)
    buffer = memoryview(bytearray(8 * MIB))

    def blocks() -> Iterator[memoryview]:
        stream = io.BytesIO(data)
        while count := stream.readinto(buffer):
            yield buffer[:count]  # overwritten by the next

    far.put(A, SHARD, blocks(), nbytes)
    assert far.files(A) == {SHARD: nbytes}
    found = bytearray(nbytes)
    far.read_into(A, SHARD, memoryview(found), 0)
    assert found == data
    if nbytes > 5000:
        part = memoryview(bytearray(5000))
        far.read_into(A, SHARD, part, nbytes - 5000)
        assert part == data[-5000:]
        with pytest.raises(Away, match="ends before"):
            far.read_into(A, SHARD, part, nbytes - 4999)
    with pytest.raises(Away):
        far.read_into(A, "rank-00001.json", memoryview(bytearray(1)), 0)


def test_blocks_that_fail_leave_no_file_and_their_own_error_comes_out(server: FaultServer) -> None:
    class Damaged(Exception):
        pass

    def blocks(count: int) -> Iterator[memoryview]:
        for _ in range(count):
            yield memoryview(bytes(8 * MIB))
        raise Damaged

    with at_server(server) as far:
        for count, nbytes in ((0, 100), (3, 32 * MIB)):
            with pytest.raises(Damaged):
                far.put(A, SHARD, blocks(count), nbytes)
        with pytest.raises(AssertionError, match="bytes were given"):
            far.put(A, SHARD, iter([memoryview(bytes(8 * MIB))] * 2), 17 * MIB)
        assert far.files(A) == {}
    assert server.uploads == {} and server.keys() == []


def test_a_file_that_is_discarded_is_gone_and_may_come_again(far: Far) -> None:
    put(far, A)
    for _ in range(2):
        far.discard(A, SHARD)
        assert far.files(A) == {}
    put(far, A)
    assert far.files(A) == {SHARD: 10}


def test_names_that_a_directory_of_files_may_have_come_back_as_they_were(far: Far) -> None:
    copy = Copy(7, "000000000007-0123abcd", "global step#7 é%2F")
    names = ["zero pp/mp_rank_00 model.pt", "a+b&c=d?.pt", "%41~'\"<>.pt", "ü/日本.pt", "a\\b"]
    for name in names:
        put(far, copy, name, name.encode())
    assert far.files(copy) == {name: len(name.encode()) for name in names}
    assert far.publish(copy, manifest_of(copy))
    assert far.directories() == {copy.directory: copy} and far.steps() == {}
    far.point("latest", copy.target)
    assert far.pointers() == {"latest": copy.target}
    for name in names:
        buffer = memoryview(bytearray(len(name.encode())))
        far.read_into(copy, name, buffer, 0)
        assert bytes(buffer) == name.encode()
    far.retire([copy.target])
    assert far.directories() == {} and far.files(copy) == {}


def test_the_first_who_publishes_has_the_place_unless_it_is_to_be_replaced(far: Far) -> None:
    assert send(far, A) and send(far, A)
    assert not send(far, B)
    assert not far.publish(B, manifest_of(B), replaces=C.attempt)
    assert far.steps() == {100: A.attempt}
    assert far.publish(B, manifest_of(B), replaces=A.attempt)
    assert far.steps() == {100: B.attempt}
    assert not send(far, A)


def test_a_manifest_that_cannot_be_understood_is_left_out_and_never_replaced(
    far: Far, caplog: pytest.LogCaptureFixture
) -> None:
    send(far, A)
    newer = Copy(200, A.attempt)  # another step's manifest
    assert far.publish(newer, manifest_of(A))
    with caplog.at_level(logging.WARNING):
        assert far.steps() == {100: A.attempt} == far.steps()
    assert caplog.text.count("left out") == 1 and "step-000000000200" in caplog.text
    assert not far.publish(step(200), manifest_of(step(200)))


def test_words_are_written_over_what_was_seen(far: Far) -> None:
    another = '{"e_tag": "\\"x\\"", "version": "1"}'
    assert far.read_word("run.json") is None
    with pytest.raises(Conflict):
        far.write_word("run.json", b"0", over=another)
    tag = far.write_word("run.json", b"1", over=None)
    found = far.read_word("run.json")
    assert found is not None and (found.data, found.tag) == (b"1", tag)
    for over in (None, another):
        with pytest.raises(Conflict):
            far.write_word("run.json", b"2", over=over)
    newer = far.write_word("run.json", b"2", over=tag)
    with pytest.raises(Conflict):
        far.write_word("run.json", b"3", over=tag)
    assert newer != tag and far.pointers() == {} == far.steps()


def test_what_has_a_name_that_no_pointer_has_is_none(memory: InThisProcess) -> None:
    with in_environment(memory.environ()), open_far(memory.url("run")) as far:
        for name in ("latest", ".lock", "step-000000000007"):
            far.point(name, "global_step7")
        assert far.pointers() == {"latest": "global_step7"}


def test_pins_are_set_and_taken(far: Far) -> None:
    for number in (100, 7):
        far.pin(number, True)
    far.pin(7, False)
    far.pin(8, False)
    assert far.pins() == {100}


# -- retiring and sweeping --------------------------------------------------------------------------


def test_a_retired_step_is_gone_with_its_files_and_comes_back_by_no_late_agent(far: Far) -> None:
    send(far, A)
    send(far, step(200))
    put(far, C)  # on its way
    far.retire([A.target])
    assert far.steps() == {200: step(200).attempt}
    assert far.files(A) == {} and far.files(C) == {SHARD: 10} and far.manifest(A.target) is None
    assert not far.publish(A, manifest_of(A)), "its files are gone"
    assert far.publish(C, manifest_of(C)), "another save of that step may come"
    assert far.steps() == {100: C.attempt, 200: step(200).attempt}
    far.retire([A.target, "step-000000000300"])
    assert far.files(C) == {}


def test_nothing_of_a_step_goes_before_its_manifest_has(server: FaultServer) -> None:
    with at_server(server) as far:
        send(far, A)
        server.fault = always("reset", like="PUT")
        with pytest.raises(Away):
            far.retire([A.target])
        assert far.files(A) == {SHARD: 10, RANK: 10} and far.steps() == {100: A.attempt}
        server.fault = always("503", like="delete")
        with pytest.raises(Away):
            far.retire([A.target])
        assert far.steps() == {}
        server.fault = always("never")
    with at_server(server) as after:
        after.retire([A.target])
        assert after.files(A) == {}


def grow_old(server: FaultServer, hours: float = 2.0) -> None:
    for thing in server.objects.values():
        thing.changed_s -= hours * 3600


def test_what_nobody_will_publish_is_swept_when_it_is_old(server: FaultServer) -> None:
    with at_server(server) as far:
        send(far, A)
        put(far, B)  # another save of it
        for number in (
            50,
            60,
            300,
        ):  # 50: killed on the way; 60: mine, on its way; 300: newer than all
            put(far, step(number))
        send(far, step(200))
        server.objects["run/notes/deadbeef/mine.txt"] = Thing(b"x", '"x"', 0.0)
        everything = server.keys()
        far.sweep([])
        assert server.keys() == everything, "all of it is young"
        grow_old(server)
        far.sweep([step(60)])
        assert far.files(B) == {} == far.files(step(50))
        assert len(far.files(step(60))) == len(far.files(step(300))) == 1
        assert set(far.steps()) == {100, 200} and len(far.files(A)) == 2
        assert server.keys("run/notes")
        assert not far.publish(step(50), manifest_of(step(50))), "its files are gone"


@pytest.mark.parametrize("skew_s", [-86400.0, 86400.0])
def test_what_is_old_is_told_by_the_servers_own_clock(server: FaultServer, skew_s: float) -> None:
    server.skew_s = skew_s
    with at_server(server) as far:
        put(far, step(50))
        send(far, step(200))
        far.sweep([])
        assert far.files(step(50))
        grow_old(server)
        far.sweep([])
        assert not far.files(step(50))


def test_marks_of_what_was_taken_away_go_when_they_are_old(server: FaultServer) -> None:
    with at_server(server) as far:
        send(far, A)
        send(far, step(200))
        far.retire([A.target])
        far.sweep([])
        assert server.keys("run/" + A.target) == [f"run/{A.target}/manifest.json"]
        grow_old(server)
        far.sweep([])
        assert server.keys("run/" + A.target) == [] and set(far.steps()) == {200}


def test_of_a_step_that_others_have_retired_nothing_is_kept(server: FaultServer) -> None:
    with at_server(server) as far, at_server(server) as others:
        ours: Any = far
        send(ours, A)
        send(ours, step(200))
        others.retire([A.target])
        for _ in range(2):
            ours._places.keep(())  # what it knows of the mark holds for a minute
            assert ours.steps() == {200: step(200).attempt}
        assert ours._published == {step(200).target}
        assert {target for target, _ in ours._put} == {step(200).target}


# -- lists that lag behind ----------------------------------------------------------------------------


def test_who_has_written_something_sees_it_though_lists_do_not_show_it(server: FaultServer) -> None:
    server.lag(True)
    with at_server(server) as far:
        assert send(far, A)
        assert far.files(A) == {SHARD: 10, RANK: 10} and far.steps() == {100: A.attempt}
        far.pin(100, True)
        assert far.pins() == {100}
    with at_server(server) as other:
        assert other.publish(A, manifest_of(A)), "it is there"
        assert not other.publish(B, manifest_of(B))
        assert other.steps() == {100: A.attempt}


def test_a_list_that_still_shows_what_is_gone_makes_no_step(server: FaultServer) -> None:
    with at_server(server) as far, at_server(server) as other:
        send(far, A)
        send(far, step(200))
        assert set(other.steps()) == {100, 200}
        server.lag(True)
        far.retire([A.target])
        assert set(far.steps()) == set(other.steps()) == {200}
        assert far.manifest(A.target) is None


# -- the check --------------------------------------------------------------------------------------------


def test_a_check_of_a_store_that_can_hold_a_level_leaves_nothing_behind(far: Far) -> None:
    before = far.pointers()
    far.check()
    assert far.pointers() == before == {} == far.files(A)


@pytest.mark.parametrize("kind", [FaultServer, GoogleServer])
def test_a_server_that_ignores_conditions_is_refused(kind: type[FaultServer]) -> None:
    with kind() as server, in_environment(server.environ()), at_server(server) as far:
        server.conditions = False
        with pytest.raises(ConfigError, match=r"ignores them.*use a server"):
            far.check()
        assert server.keys() == []


@pytest.mark.parametrize("kind", [FaultServer, GoogleServer])
def test_a_server_that_knows_no_conditions_is_refused(kind: type[FaultServer]) -> None:
    with kind() as server, in_environment(server.environ()), at_server(server) as far:
        server.fault = lambda request: (
            "501"
            if {"if-none-match", "x-goog-if-generation-match"} & request.headers.keys()
            else None
        )
        with pytest.raises(ConfigError, match="use a store that writes on conditions"):
            far.check()
        assert server.keys() == []


def test_the_clients_own_store_of_files_can_hold_no_level(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from obstore.store import LocalStore

    place = InThisProcess(monkeypatch, LocalStore(tmp_path))
    with in_environment(place.environ()), open_far(place.url("run")) as far:
        put(far, A)
        assert far.files(A) == {SHARD: 10}
        with pytest.raises(ConfigError, match="use a store that writes on conditions"):
            far.check()
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {SHARD}


def test_without_credentials_it_is_said_where_they_belong(
    server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    # Where machines of a cloud are told their role; here nobody answers.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises((ConfigError, Away)) as caught:
        open_far("s3://bucket/run").check()
    assert re.search("no credentials.*AWS_ACCESS_KEY_ID", str(caught.value)), caught.value


def test_a_profile_in_the_files_of_the_stores_tools_is_taken(
    server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    file = tmp_path / "credentials"
    file.write_text(f"[team]\naws_access_key_id = A\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "team")
    with at_server(server) as far:
        assert send(far, A)
