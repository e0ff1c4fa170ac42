"""Uploads that were cut off, at S3 and Google: what is there is not sent again, nothing wrong is believed."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from ckpt_core.errors import CorruptCheckpoint
from ckpt_core.levels import Away, Copy, open_far
from ckpt_core.levels.agent.copying import How, Sent, send
from ckpt_core.levels.agent.pace import Pace
from ckpt_core.levels.agent.source import OpenSave
from ckpt_core.levels.far import leftovers
from ckpt_core.levels.far.clients import s3_settings
from ckpt_core.levels.far.objects import ObjectFar
from ckpt_core.levels.signing import signed, sum_of
from ckpt_core.store import step_path
from ckpt_core.system.files import Files
from tests.levels.agents import Agents, plan_of
from tests.levels.making import make_store, save
from tests.levels.servers.faulty import FaultServer, Request, always, at, in_environment, never
from tests.levels.servers.like_google import GoogleServer
from tests.levels.servers.moto import MotoServer, needs_store
from tests.levels.stores import level_of, look_at, opened
from tests.levels.test_peer_parts import blocks_of

pytestmark = needs_store

MIB = 1 << 20
PART = 8 * MIB
COPY = Copy(7, "000000000007-0123abcd")
NAME = "shard-00000-0.safetensors"
KEY = f"run/{COPY.target}/{COPY.folder}/{NAME}"
DATA = os.urandom(4 * PART + 77)

BOTH_S = 10.0
"""For a request of somebody who fails, and is then to succeed: five tries end long before."""


@pytest.fixture(params=[FaultServer, GoogleServer])
def server(request: pytest.FixtureRequest) -> Iterator[FaultServer]:
    with request.param() as server, in_environment(server.environ()):
        yield server


@pytest.fixture
def far(server: FaultServer) -> Iterator[ObjectFar]:
    with ObjectFar(server.url()) as far:
        yield far


def parts_of(data: bytes) -> dict[int, bytes]:
    return {1 + begin // PART: data[begin : begin + PART] for begin in range(0, len(data), PART)}


def cut_off(
    server: FaultServer,
    there: Sequence[int],
    *,
    key: str = KEY,
    data: bytes = DATA,
    name: str = "u",
) -> dict[int, bytes]:
    """What a sender that was killed has left; its parts may be changed."""
    parts = parts_of(data)
    server.uploads[name] = (key, {number: parts[number] for number in there})
    server.began_s[name] = datetime.now(UTC).timestamp()
    return server.uploads[name][1]


KEPT = ("foreign", "no copy's")


def is_ours(file: str) -> bool:
    return file == f"{COPY.target}/{COPY.folder}/{NAME}"


def sent_parts(server: FaultServer, act: Callable[[], object]) -> list[int]:
    """Numbers of the parts that are sent meanwhile."""
    found: list[int] = []
    before = server.fault

    def noted(request: Request) -> str | None:
        if "partNumber" in request.query:
            found.append(int(request.query["partNumber"]))
        return before(request)

    server.fault = noted
    try:
        act()
    finally:
        server.fault = before
    return sorted(found)


def put(far: ObjectFar) -> None:
    far.put(COPY, NAME, blocks_of(DATA, 3 * MIB), len(DATA))


@pytest.mark.parametrize(
    ("there", "front", "sent"),
    [
        ((1, 2), 2 * PART, [3, 4, 5]),
        ((1, 2, 3, 4, 5), len(DATA), []),
        ((2, 5), 0, [1, 3, 4]),
        ((), 0, [1, 2, 3, 4, 5]),
    ],
)
@pytest.mark.parametrize("page", [1, 1000])
def test_only_the_parts_that_are_missing_are_sent(
    server: FaultServer,
    far: ObjectFar,
    there: tuple[int, ...],
    front: int,
    sent: list[int],
    page: int,
) -> None:
    server.page = page
    cut_off(server, there)
    far.take_up(is_ours)
    assert far.begun(COPY, NAME, len(DATA)) == front
    assert sent_parts(server, partial(put, far)) == sent
    assert server.objects[KEY].data == DATA
    assert not server.uploads
    assert far.files(COPY) == {NAME: len(DATA)}


@pytest.mark.parametrize("wrong", ["bytes", "length", "tags", "one too many"])
def test_a_part_that_is_not_what_is_here_is_sent_again(
    server: FaultServer, far: ObjectFar, wrong: str
) -> None:
    parts = cut_off(server, (1, 2, 3, 4))
    if wrong == "bytes":
        parts[2] = bytes(PART)
    elif wrong == "length":
        parts[2] = parts[2][:-1]
    elif wrong == "one too many":
        parts[6] = b"of another length"
    server.encrypts = wrong == "tags"
    far.take_up(is_ours)
    far.begun(COPY, NAME, len(DATA))
    if wrong in ("one too many", "tags"):
        # S3 would leave out what is not named; this server refuses: all of it is sent then.
        # And where not even one tag is an MD5, nothing there is believed.
        assert sent_parts(server, partial(refused, far)) == ([5] if wrong != "tags" else [])
        far.begun(COPY, NAME, len(DATA))
    again = sent_parts(server, partial(put, far))
    assert again == {"bytes": [2, 5], "length": [2, 5]}.get(wrong, [1, 2, 3, 4, 5])
    assert server.objects[KEY].data == DATA
    assert not server.uploads


def refused(far: ObjectFar) -> None:
    with pytest.raises(Away, match="all of it is sent again") as caught:
        put(far)
    assert not caught.value.hopeless


@pytest.mark.parametrize("word", ["503", "reset", "torn", "lost"])
def test_one_fault_at_any_request_is_overcome(
    server: FaultServer, far: ObjectFar, word: str
) -> None:
    for number in range(1, 9):
        cut_off(server, (1, 3))
        server.objects.pop(KEY, None)
        server.fault = at(number, word)
        far.take_up(is_ours)
        assert far.begun(COPY, NAME, len(DATA)) == PART, number
        assert sent_parts(server, partial(put, far)) in (
            [2, 4, 5],
            [2, 2, 4, 5],
            [2, 4, 4, 5],
            [2, 4, 5, 5],
        )
        server.fault = never
        assert server.objects[KEY].data == DATA, number
        assert not server.uploads


def test_a_store_that_is_away_meanwhile_is_gone_on_with_and_at_last_begun_anew(
    server: FaultServer,
) -> None:
    cut_off(server, (1, 2))
    with ObjectFar(server.url(), request_s=BOTH_S) as far:
        far.take_up(is_ours)
        for left in (2, 1, 0):
            assert far.begun(COPY, NAME, len(DATA)) == 2 * PART
            server.fault = always("503", like="PUT")
            with pytest.raises(Away, match="out of order" if left else "sent again"):
                put(far)
            assert KEY not in server.objects
            server.fault = never
        assert not server.uploads, "given up after three times"
        assert far.begun(COPY, NAME, len(DATA)) == 0
        assert sent_parts(server, partial(put, far)) == [1, 2, 3, 4, 5]
        assert server.objects[KEY].data == DATA


def test_what_is_there_is_kept_while_nobody_can_tell_of_it(
    server: FaultServer, far: ObjectFar
) -> None:
    cut_off(server, (1, 2))
    far.take_up(is_ours)
    server.fault = always("503", like="uploadId")
    with pytest.raises(Away, match="out of order") as caught:
        far.begun(COPY, NAME, len(DATA))
    assert not caught.value.hopeless
    server.fault = never
    assert far.begun(COPY, NAME, len(DATA)) == 2 * PART
    far.give_up()
    assert not server.uploads


@pytest.mark.parametrize("raises", [True, False])
def test_credentials_that_are_away_for_now_lose_nothing_and_hold_nobody_up(
    server: FaultServer, far: ObjectFar, monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    def asking(url: str) -> None:
        if raises:
            raise FileNotFoundError("the file of the account")

    for tries in (1, 3):
        cut_off(server, (1, 2), name=f"u{tries}")
        far.take_up(is_ours)
        with monkeypatch.context() as away:
            away.setattr(leftovers, "asking", asking)
            for _ in range(tries):
                if tries == 3 and _ == 2:
                    assert far.begun(COPY, NAME, len(DATA)) == 0
                else:
                    with pytest.raises(Away):
                        far.begun(COPY, NAME, len(DATA))
        assert far.begun(COPY, NAME, len(DATA)) == (2 * PART if tries == 1 else 0)
        put(far)
        assert server.objects.pop(KEY).data == DATA


def test_a_name_with_braces_is_told_as_it_is(server: FaultServer) -> None:
    with ObjectFar(server.url("a{b}"), request_s=0.2) as far:
        server.fault = always("503")
        with pytest.raises(Away, match=r"a\{b\}.*x\{\}\.txt"):
            far.put(COPY, "x{}.txt", blocks_of(b"1", 1), 1)


@pytest.mark.parametrize("word", ["401", "408", "429"])
def test_a_refusal_of_the_moment_loses_nothing(server: FaultServer, word: str) -> None:
    cut_off(server, (1, 2))
    with ObjectFar(server.url(), request_s=BOTH_S) as far:
        far.take_up(is_ours)
        assert far.begun(COPY, NAME, len(DATA)) == 2 * PART
        server.fault = always(word, like="PUT")
        with pytest.raises(Away) as caught:
            put(far)
        assert not caught.value.hopeless and server.uploads
        server.fault = never
        assert far.begun(COPY, NAME, len(DATA)) == 2 * PART
        put(far)
        assert server.objects[KEY].data == DATA


@pytest.mark.parametrize("what", ["parts", "sending"])
def test_where_it_may_not_be_gone_on_with_the_client_sends_all_of_it(
    server: FaultServer, far: ObjectFar, what: str
) -> None:
    cut_off(server, (1, 2))
    far.take_up(is_ours)
    if what == "parts":
        server.fault = lambda request: (
            "403" if request.method == "GET" and "uploadId" in request.query else None
        )
        assert far.begun(COPY, NAME, len(DATA)) == 0
    else:
        far.begun(COPY, NAME, len(DATA))
        server.fault = always("403", like="PUT")
        refused(far)
        server.fault = never
    assert not server.uploads
    assert sent_parts(server, partial(put, far)) == [1, 2, 3, 4, 5]
    assert server.objects[KEY].data == DATA


def test_sources_that_are_damaged_in_turns_with_a_store_that_fails_end_it_at_last(
    server: FaultServer,
) -> None:
    cut_off(server, (1,))
    with ObjectFar(server.url(), request_s=BOTH_S) as far:
        far.take_up(is_ours)
        for number in range(4):
            far.begun(COPY, NAME, len(DATA))
            server.fault = always("503", like="PUT") if number % 2 else never
            with pytest.raises(Away if number % 2 else CorruptCheckpoint):
                far.put(COPY, NAME, damaged() if number % 2 == 0 else whole(), len(DATA))
            server.fault = never
        assert not server.uploads
        put(far)
        assert server.objects[KEY].data == DATA


def damaged() -> Iterator[memoryview]:
    yield memoryview(DATA)[: 2 * PART]
    raise CorruptCheckpoint("a shard", path=Path("shard"))


def whole() -> Iterator[memoryview]:
    return blocks_of(DATA, PART)


def test_an_upload_may_have_any_name(server: FaultServer, far: ObjectFar) -> None:
    cut_off(server, (1, 2), name="a+b/c==&d %2F")
    far.take_up(is_ours)
    assert far.begun(COPY, NAME, len(DATA)) == 2 * PART
    assert sent_parts(server, partial(put, far)) == [3, 4, 5]
    assert server.objects[KEY].data == DATA and not server.uploads
    cut_off(server, (), name="a+b/c==&d")
    far.take_up(is_ours)
    far.give_up()
    assert not server.uploads


def test_what_others_may_be_at_is_never_aborted(server: FaultServer) -> None:
    with ObjectFar(server.url(), request_s=BOTH_S) as far:
        server.fault = always("503", like="PUT")
        with pytest.raises(Away):
            put(far)
        server.fault = never
        server.uploads.clear()
        cut_off(server, (), name="another's")
        assert far.begun(COPY, NAME, len(DATA)) == 0
        far.give_up()
        assert {*server.uploads} == {"another's"}
        put(far)
        assert {*server.uploads} == {"another's"}


def test_an_upload_that_has_gone_meanwhile_is_begun_anew(
    server: FaultServer, far: ObjectFar
) -> None:
    for looked in (True, False):
        cut_off(server, (1, 2))
        far.take_up(is_ours)
        if looked:
            server.uploads.clear()
            assert far.begun(COPY, NAME, len(DATA)) == 0
        else:
            assert far.begun(COPY, NAME, len(DATA)) == 2 * PART
            server.uploads.clear()
            refused(far)
            assert far.begun(COPY, NAME, len(DATA)) == 0
        put(far)
        assert server.objects.pop(KEY).data == DATA


def test_what_the_client_has_left_when_it_failed_is_gone_on_with(server: FaultServer) -> None:
    with ObjectFar(server.url(), request_s=BOTH_S) as far:
        server.fault = lambda request: "503" if request.query.get("partNumber") == "5" else None
        with pytest.raises(Away):
            put(far)
        server.fault = never
        left = [parts for key, parts in server.uploads.values() if key == KEY]
        front = far.begun(COPY, NAME, len(DATA))
        assert front == (4 * PART if left else 0)
        assert sent_parts(server, partial(put, far)) == ([5] if left else [1, 2, 3, 4, 5])
        assert server.objects[KEY].data == DATA


def test_of_several_the_youngest_is_kept_and_others_files_are_let_be(
    server: FaultServer, far: ObjectFar
) -> None:
    for name, age_s in (("old", 60), ("young", 1), ("older", 90)):
        cut_off(server, (1,), name=name)
        server.began_s[name] -= age_s
    foreign = f"run/{COPY.target}/{COPY.folder}/shard-00001-0.safetensors"
    cut_off(server, (1,), key=foreign, name="foreign")
    cut_off(server, (1,), key="run/exports/v2/model.bin", name="no copy's")
    server.fault = at(1, "403", like="DELETE")
    far.take_up(lambda file: is_ours(file) or file.startswith("exports"))
    assert {*server.uploads} in ({"young", "old", *KEPT}, {"young", "older", *KEPT}), (
        "one was refused"
    )
    far.give_up()
    assert len(server.uploads) == 3 and {*KEPT} < {*server.uploads}
    assert far.begun(COPY, NAME, len(DATA)) == 0


@pytest.mark.parametrize("server", [FaultServer], indirect=True)
@pytest.mark.parametrize(
    "named",
    [
        {"AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"},
        {"all_proxy": "http://127.0.0.1:9", "no_proxy": "*"},
    ],
)
def test_where_requests_of_our_own_may_not_come_there_they_are_aborted(
    server: FaultServer, named: dict[str, str]
) -> None:
    cut_off(server, (1, 2))
    with in_environment(named), ObjectFar(server.url()) as far:
        far.take_up(is_ours)
        assert far.begun(COPY, NAME, len(DATA)) == 0
    assert not server.uploads


def test_a_source_that_is_damaged_meanwhile_leaves_nothing_to_be_seen(
    server: FaultServer, far: ObjectFar
) -> None:
    cut_off(server, (1,))
    far.take_up(is_ours)
    far.begun(COPY, NAME, len(DATA))
    with pytest.raises(CorruptCheckpoint):
        far.put(COPY, NAME, damaged(), len(DATA))
    assert KEY not in server.objects
    far.give_up()
    assert not server.uploads


class _Noted(Pace):
    """Lets all through, and adds up what."""

    def __init__(self) -> None:
        super().__init__(None)
        self.nbytes = 0

    def let_through(self, nbytes: int) -> None:
        self.nbytes += nbytes


def test_what_is_there_already_counts_neither_for_the_rate_nor_as_sent(
    server: FaultServer, tmp_path: Path
) -> None:
    store = make_store(tmp_path / "root")
    save(store, 7, nbytes=3 * PART + 5, sums=False)
    store.close()
    with (
        OpenSave(step_path(tmp_path / "root", 7), files=Files()) as opened,
        open_far(server.url()) as far,
    ):
        (entry,) = opened.entries
        data = (step_path(tmp_path / "root", 7) / entry.name).read_bytes()
        key = f"run/{opened.copy.target}/{opened.copy.folder}/{entry.name}"
        cut_off(server, (1, 2), key=key, data=data)
        pace, travelled, done = _Noted(), list[int](), list[int]()
        far.take_up(lambda file: True)
        how = How(pace, travelled=travelled.append, progress=done.append)
        assert send(opened, far, how) is Sent.REACHED
        small = sum(map(len, opened.ranks.values()))
        assert pace.nbytes == PART + 5
        assert sum(travelled) == PART + 5 + small
        assert done[-1] == opened.nbytes
        assert server.objects[key].data == data


@pytest.mark.parametrize("is_wanted", [True, False])
def test_an_agent_that_was_killed_in_a_file_goes_on_with_it_or_has_its_parts_deleted(
    server: FaultServer, tmp_path: Path, agents: Agents, is_wanted: bool
) -> None:
    agents.environ = server.environ()
    _save(tmp_path / "root", 1)
    process = agents.start(tmp_path / "root", plan_of(level_of(server, backlog=1)))
    server.victim = process.pid
    server.fault = lambda request: "kill-after" if request.query.get("partNumber") == "4" else None
    assert process.wait(60) == -signal.SIGKILL
    server.wait_for_the_dead()
    server.fault = never
    ((_, parts),) = server.uploads.values()
    left = {*parts}
    assert 4 in left
    if not is_wanted:
        _save(tmp_path / "root", 2)
    again = sent_parts(server, partial(agents.run, tmp_path / "root"))
    assert not server.uploads
    with opened(server) as far:
        assert look_at(far) == ({1: 0} if is_wanted else {2: 0})
    assert again == [n for n in range(1, 6) if not is_wanted or n not in left]


def _save(root: Path, step: int) -> None:
    store = make_store(root)
    save(store, step, nbytes=4 * PART + 5)
    store.close()


def test_another_server_goes_on_in_the_same_way(moto: MotoServer) -> None:
    with in_environment(moto.environ()), open_far(moto.url("resumed")) as far:
        key = f"resumed/{COPY.target}/{COPY.folder}/{NAME}"
        place = f"http://127.0.0.1:{moto.port}/bucket/{key}"
        text = _asked("POST", f"{place}?uploads=")
        name = text.partition("<UploadId>")[2].partition("<")[0]
        for number in (1, 2):
            _asked("PUT", f"{place}?partNumber={number}&uploadId={name}", parts_of(DATA)[number])
        far.take_up(is_ours)
        assert far.begun(COPY, NAME, len(DATA)) == 2 * PART
        far.put(COPY, NAME, blocks_of(DATA, PART), len(DATA))
        assert b"".join(bytes(one) for one in far.read_blocks(COPY, NAME, 0, len(DATA))) == DATA
        assert "<UploadId>" not in _asked(
            "GET", f"http://127.0.0.1:{moto.port}/bucket?prefix=resumed&uploads="
        )


def _asked(method: str, url: str, body: bytes = b"") -> str:
    content = sum_of([memoryview(body)])
    headers = signed(method, url, s3_settings(), when=datetime.now(UTC), content=content)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers["content-type"] = "application/octet-stream"
    request = urllib.request.Request(url, body or None, headers, method=method)
    with direct.open(request, timeout=60) as answer:
        return str(answer.read().decode())
