"""A sender that is killed, or put to sleep, at any request to a store: a step is whole there, or not seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from ckpt_core.layout import Manifest, RankManifest, rank_manifest_name
from ckpt_core.levels import Copy, Far, open_far
from tests import places
from tests.levels.making import bytes_of, make_store, save
from tests.levels.sending import sent_to
from tests.levels.servers.azurite import needs_azurite
from tests.levels.servers.before_azurite import BeforeAzurite
from tests.levels.servers.faulty import FaultServer, Request, at, in_environment, never
from tests.levels.servers.like_google import GoogleServer
from tests.levels.servers.moto import needs_store

pytestmark = needs_store

NBYTES = 17 << 20  # three parts
STEP = 100
PLACES = 2
MANIFEST = "/step-000000000100/manifest.json"
ENDS_WITHIN_S = 60


@pytest.fixture(params=["s3", "gs", pytest.param("az", marks=needs_azurite)])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FaultServer]:
    made: dict[str, Callable[[], FaultServer]] = {
        "s3": FaultServer,
        "gs": GoogleServer,
        "az": lambda: before(request, tmp_path.name),
    }
    with made[request.param]() as server, in_environment(server.environ()):
        yield server


def before(request: pytest.FixtureRequest, place: str) -> BeforeAzurite:
    return BeforeAzurite(request.getfixturevalue("azurite"), place)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two saves of one step, by a trainer and by the one that came after it."""
    found = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    for mark, root in enumerate(found):
        store = make_store(root)
        save(store, STEP, mark=mark, nbytes=NBYTES, sums=False)
        store.close()
    return found


def look(far: Far) -> dict[int, int]:
    """Marks of all steps that are there, after a look at every byte of them."""
    marks = {}
    for step, attempt in far.steps().items():
        copy = Copy(step, attempt)
        data = far.manifest(copy.target)
        assert data is not None
        manifest = Manifest.decode(data, path=Path("manifest.json"))
        marks[step] = int(manifest.created_unix_s)
        for row in manifest.ranks:
            text = read(far, copy, rank_manifest_name(row.rank), row.nbytes)
            assert xxhash.xxh3_64_hexdigest(text) == row.xxh3
            for entry in RankManifest.decode(text, path=Path(row.file)).files:
                there = read(far, copy, entry.name, entry.nbytes)
                assert there == bytes_of(step, marks[step], row.rank, entry.nbytes)
    return marks


def read(far: Far, copy: Copy, name: str, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    far.read_into(copy, name, memoryview(buffer), 0)
    return bytes(buffer)


def start(root: Path, url: str, *replaces: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.levels.servers.sender", str(root), str(STEP), url]
    return subprocess.Popen([*command, *replaces], stdout=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> str:
    """What it said; it is ended if it does not by itself."""
    try:
        return process.communicate(timeout=ENDS_WITHIN_S)[0].strip()
    finally:
        process.kill()
        process.wait()


def requests_of_a_send(server: FaultServer, root: Path) -> int:
    with open_far(server.url("measured")) as far:
        before = len(server.requests)
        assert sent_to(far, root, STEP)
        return len(server.requests) - before


def test_a_sender_that_is_killed_at_any_request_leaves_no_step_in_part(
    server: FaultServer, roots: tuple[Path, Path]
) -> None:
    many = requests_of_a_send(server, roots[0])
    assert many > 8
    struck = [(number, word) for number in range(1, many + 1) for word in ("kill", "kill-after")]
    for number, word in places.some(struck, PLACES, of="kill a sender"):
        url = server.url(f"run-{number}-{word}")
        server.fault = held_back = Armed(number, word)
        ours = server.connected()
        process = start(roots[0], url)
        held_back.arm(server, process.pid)
        end(process)
        server.wait_for_the_dead(but=ours)
        assert process.returncode in (0, -signal.SIGKILL)
        server.fault = never
        with open_far(url) as far:
            assert look(far) in ({}, {STEP: 0})
            whole = far.files(Copy(STEP, attempt_of(roots[0])))
            before = len(server.requests)
            far.take_up(lambda file: True)
            assert sent_to(far, roots[0], STEP), "the next one takes it up"
            assert look(far) == {STEP: 0}
            far.give_up()
            assert not server.uploads, "parts that nobody sees"
        again = [text for text in server.requests[before:] if text.startswith("PUT")]
        for name in whole:
            assert not [text for text in again if name in text], f"{name} was there"


def test_a_sender_that_sleeps_at_any_request_harms_nothing_that_came_after_it(
    server: FaultServer, roots: tuple[Path, Path]
) -> None:
    many = requests_of_a_send(server, roots[0])
    struck = [(number, word) for number in range(1, many + 1) for word in ("stop", "stop-after")]
    for number, word in places.some(struck, PLACES, of="put a sender to sleep"):
        url = server.url(f"run-{number}-{word}")
        server.fault = held_back = Armed(number, word)
        process = start(roots[0], url)
        try:
            held_back.arm(server, process.pid)
            wait_until_stopped(process)
            server.fault = never
            with open_far(url) as far:
                assert sent_to(far, roots[1], STEP, replaces=attempt_of(roots[0]))
                assert look(far) == {STEP: 1}
                os.kill(process.pid, signal.SIGCONT)
                end(process)
                assert look(far) == {STEP: 1}
        finally:
            process.kill()
            process.wait()


def test_a_manifest_that_comes_when_its_step_was_retired_does_not_bring_it_back(
    server: FaultServer, roots: tuple[Path, Path]
) -> None:
    url = server.url()
    server.fault = lambda request: "hold" if puts_manifest(str(request)) else None
    process = start(roots[0], url)
    try:
        wait_until(lambda: any(map(puts_manifest, server.requests)))
        server.fault = never
        with open_far(url) as far:
            # The agent of another node has seen the same files, and retention has let them go since.
            assert sent_to(far, roots[0], STEP)
            far.retire([Copy(STEP, attempt_of(roots[0])).target])
            server.release.set()
            assert end(process) == "False"
            assert look(far) == {}
    finally:
        process.kill()
        process.wait()


def test_two_senders_at_once_make_one_whole_step(
    server: FaultServer, roots: tuple[Path, Path]
) -> None:
    for same in (True, False):
        url = server.url(f"run-{same}")
        processes = [start(roots[0], url), start(roots[0 if same else 1], url)]
        said = sorted(end(process) for process in processes)
        assert said == (["True", "True"] if same else ["False", "True"])
        with open_far(url) as far:
            assert look(far) in ({STEP: 0}, {STEP: 1})


class Armed:
    """A fault at the n-th request, once the victim is known: until then requests wait."""

    def __init__(self, number: int, word: str, *, like: str = "") -> None:
        self._fault = at(number, word, like=like)
        self._ready = False

    def arm(self, server: FaultServer, pid: int) -> None:
        server.victim = pid
        self._ready = True

    def __call__(self, request: Request) -> str | None:
        while not self._ready:
            time.sleep(0.001)
        return self._fault(request)


def attempt_of(root: Path) -> str:
    data = (root / f"step-{STEP:012d}" / "manifest.json").read_bytes()
    return Manifest.decode(data, path=root).attempt


def puts_manifest(request: str) -> bool:
    return request.startswith("PUT") and request.endswith(MANIFEST)


def wait_until_stopped(process: subprocess.Popen[str]) -> None:
    stat = Path(f"/proc/{process.pid}/stat")
    # It may have ended: what is sampled differs from send to send, and so does the number of requests.
    wait_until(lambda: stat.read_text().rpartition(") ")[2][0] in "TZ")


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + ENDS_WITHIN_S
    while not true():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)
