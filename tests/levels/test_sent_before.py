"""What a level has already is not sent there again: it is linked, or copied at the server."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import verify
from ckpt_core.levels import Copy, Far, open_far
from ckpt_core.levels.agent.copying import How, Sent, send
from ckpt_core.levels.agent.sent_before import SentBefore
from ckpt_core.levels.agent.source import OpenSave
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.store import step_path
from ckpt_core.system.files import Files
from tests.crash.layers import CHANGES, hooked
from tests.engine.test_unchanged import Job, flip
from tests.levels.agents import Agents, plan_of
from tests.levels.servers.before_peer import BeforePeer
from tests.levels.servers.faulty import Request, in_environment
from tests.levels.servers.moto import MotoServer, needs_store
from tests.levels.servers.peer import PeerServer
from tests.levels.stores import level_of
from tests.store.harness import QuickFiles

STEPS = range(1, 7)
STILL, MOVES = "shard-00000-1.safetensors", "shard-00000-0.safetensors"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps, three of which have each still file."""
    root = tmp_path_factory.mktemp("still") / "root"
    with Job(root, frozen=["base"], rebase_every=3) as job:
        job.save_all(STEPS)
        assert job.generations() == [[1, 2, 3], [4, 5, 6]]
    return root


class Heard:
    """Notes what is sent to a level."""

    def __init__(self, far: Far) -> None:
        self.far, self.before, self.sent = far, SentBefore(), list[str]()
        real = far.put

        def put(copy: Copy, name: str, blocks: Iterable[memoryview], nbytes: int) -> None:
            self.sent.append(f"{copy.step} {name}")
            real(copy, name, blocks, nbytes)

        far.put = put  # type: ignore[method-assign]

    def send(self, root: Path, step: int, **how: Any) -> None:
        with OpenSave(step_path(root, step), files=Files()) as save:
            assert send(save, self.far, How(before=self.before, **how)) is Sent.REACHED

    def still(self) -> list[int]:
        """Of which steps the still file was sent."""
        return [int(name.split()[0]) for name in self.sent if name.endswith(STILL)]


def directory(place: Path, files: Files | None = None) -> DirectoryFar:
    return DirectoryFar(place / "far", files=files or QuickFiles())


def inodes(place: Path) -> list[int]:
    return [(step_path(place / "far", step) / STILL).stat().st_ino for step in STEPS]


def test_a_directory_links_what_it_has_and_renews_it_when_the_root_does(
    root: Path, tmp_path: Path
) -> None:
    heard = Heard(directory(tmp_path))
    for step in STEPS:
        heard.send(root, step)
    assert heard.still() == [1, 4]
    first, second = sorted({*inodes(tmp_path)}, key=inodes(tmp_path).index)
    assert inodes(tmp_path) == [first] * 3 + [second] * 3
    check(root, tmp_path)
    # Each step is whole by itself there too.
    heard.far.retire(["step-000000000001", "step-000000000004"])
    assert verify(tmp_path / "far").ok


def check(root: Path, place: Path) -> None:
    for step in STEPS:
        here, there = step_path(root, step), step_path(place / "far", step)
        assert {path.name for path in there.iterdir()} == {path.name for path in here.iterdir()}
        for path in here.iterdir():
            assert path.read_bytes() == (there / path.name).read_bytes()
    assert not list((place / "far" / ".inflight").glob("*"))


def test_what_is_no_more_there_is_sent(root: Path, tmp_path: Path) -> None:
    heard = Heard(directory(tmp_path))
    heard.send(root, 1)
    heard.far.retire(["step-000000000001"])
    heard.send(root, 2)
    assert heard.still() == [1, 2]


def test_what_is_damaged_there_is_sent_anew(root: Path, tmp_path: Path) -> None:
    heard = Heard(directory(tmp_path))
    heard.send(root, 1)
    flip(step_path(tmp_path / "far", 1) / STILL)
    heard.send(root, 2, sample=1.0)
    assert heard.still() == [1, 2]
    assert [report.ok for report in verify(tmp_path / "far").steps] == [False, True]


def test_another_save_in_the_place_of_the_one_that_was_sent_is_not_taken(
    root: Path, tmp_path: Path
) -> None:
    """Its file has the same name and length, and might have other bytes."""
    heard = Heard(directory(tmp_path))
    heard.send(root, 1)
    manifest = step_path(tmp_path / "far", 1) / "manifest.json"
    manifest.write_text(manifest.read_text().replace("000000000001-", "000000000001-f", 1))
    heard.send(root, 2)
    assert heard.still() == [1, 2]


class Died(BaseException):
    """The end of an agent."""


class Dying:
    """Ends an agent before, or after, one of its file operations; none while it holds a lock."""

    def __init__(self, at: int, *, after: bool) -> None:
        self.at, self.after, self.count = at, after, 0

    def __call__(self, name: str, args: tuple[Any, ...], act: Callable[[], Any]) -> Any:
        self.count += 1
        if self.count - 1 != self.at:
            return act()
        if self.after:
            with contextlib.suppress(OSError):
                act()
        raise Died


class Publishing(Exception):
    """All has been sent."""


def all_is_sent() -> None:
    raise Publishing


@pytest.mark.parametrize("after", [False, True])
def test_an_agent_that_dies_anywhere_leaves_whole_steps_and_the_next_one_goes_on(
    after: bool, root: Path, tmp_path: Path
) -> None:
    for number in itertools.count():
        place = tmp_path / str(number)
        heard = Heard(directory(place))
        heard.send(root, 1)
        files = hooked(QuickFiles, Dying(number, after=after), CHANGES)
        died = Heard(directory(place, files))
        died.before = heard.before
        try:
            died.send(root, 2, may_publish=all_is_sent)
        except Died:
            assert [report.ok for report in verify(place / "far").steps] == [True]
        except Publishing:
            break
        again = Heard(directory(place))
        for step in (2, 3):
            again.send(root, step)
        assert [report.ok for report in verify(place / "far").steps] == [True] * 3
        assert STILL not in "".join(died.sent)
    assert number > 10


@pytest.fixture
def store(moto: MotoServer) -> Iterator[Far]:
    with in_environment(moto.environ()), open_far(moto.url("still steps")) as far:
        yield far


@needs_store
def test_an_object_store_copies_what_it_has(root: Path, store: Far, tmp_path: Path) -> None:
    heard = Heard(store)
    for step in STEPS:
        heard.send(root, step)
    assert heard.still() == [1, 4]
    for step in STEPS:
        with OpenSave(step_path(root, step), files=Files()) as save:
            for entry in save.entries:
                data = (step_path(root, step) / entry.name).read_bytes()
                assert store.read(save.copy, entry.name, entry.nbytes) == data
    store.retire(["step-000000000006"])
    heard.send(root, 5)  # there already: nothing is lost by asking again
    assert heard.still() == [1, 4]


# -- at a peer -------------------------------------------------------------------------------------


@pytest.fixture
def before(peer: PeerServer, tmp_path: Path) -> Iterator[BeforePeer]:
    with BeforePeer(peer, tmp_path.name) as server, in_environment(server.environ()):
        yield server


def kept_at(server: BeforePeer, place: Path) -> Path:
    """What a peer keeps is a root."""
    return server.peer.kept / place.name / "run"


def kept_still(kept: Path, step: int) -> Path:
    (path,) = step_path(kept, step).glob(f"*/{STILL}")
    return path


def put_bytes(server: BeforePeer) -> list[int]:
    """Notes how many bytes each request brings from here on."""
    found: list[int] = []

    def fault(request: Request) -> None:
        found.append(int(request.headers.get("content-length", 0)))

    server.fault = fault
    return found


def nbytes_of(root: Path, step: int, *, linked: bool) -> int:
    """All files of a step, but for the one that is a link."""
    files = [
        path for path in step_path(root, step).iterdir() if not (linked and path.name == STILL)
    ]
    return sum(path.stat().st_size for path in files)


@needs_store
def test_a_peer_links_what_it_has_and_is_sent_none_of_its_bytes(
    root: Path, before: BeforePeer, tmp_path: Path
) -> None:
    came, told = put_bytes(before), list[int]()
    with open_far(before.url()) as far:
        heard = Heard(far)
        for step in STEPS:
            del came[:], told[:]
            heard.send(root, step, travelled=told.append)
            expected = nbytes_of(root, step, linked=step not in (1, 4))
            assert sum(came) == expected, f"step {step}"
            manifest = (step_path(root, step) / "manifest.json").stat().st_size
            assert sum(told) == expected - manifest, f"step {step}"
        assert heard.still() == [1, 4]
        kept = kept_at(before, tmp_path)
        same = [kept_still(kept, step).stat().st_ino for step in STEPS]
        assert same == [same[0]] * 3 + [same[3]] * 3 and same[0] != same[3]
        for step in STEPS:
            assert (
                kept_still(kept, step).read_bytes() == (step_path(root, step) / STILL).read_bytes()
            )
        # Each step is whole by itself there too.
        far.retire(["step-000000000001", "step-000000000004"])
    assert [report.step for report in verify(kept).steps if report.ok] == [2, 3, 5, 6]
    assert kept_still(kept, 2).stat().st_nlink == 2


@needs_store
def test_what_is_damaged_at_a_peer_is_not_linked_on(
    root: Path, before: BeforePeer, tmp_path: Path
) -> None:
    with open_far(before.url()) as far:
        heard = Heard(far)
        heard.send(root, 1)
        flip(kept_still(kept_at(before, tmp_path), 1))
        heard.send(root, 2, sample=0.0)
        assert heard.still() == [1, 2]
        heard.send(root, 3)
        assert heard.still() == [1, 2]
    assert [report.ok for report in verify(kept_at(before, tmp_path)).steps] == [False, True, True]


@needs_store
def test_what_a_peer_has_no_more_is_sent(root: Path, before: BeforePeer, tmp_path: Path) -> None:
    with open_far(before.url()) as far:
        heard = Heard(far)
        heard.send(root, 1)
        far.retire(["step-000000000001"])
        heard.send(root, 2)
        kept_still(kept_at(before, tmp_path), 2).unlink()
        heard.send(root, 3)
        assert heard.still() == [1, 2, 3]


@needs_store
def test_a_peer_that_is_asked_for_a_long_file_is_waited_for(
    root: Path, before: BeforePeer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_core.levels.far.bucket._COPIED_BYTES", 1000)
    with open_far(before.url()) as far:
        heard = Heard(far)
        for step in STEPS:
            heard.send(root, step)
    assert heard.still() == [1, 4]


@needs_store
def test_an_agent_tells_the_bytes_that_it_has_sent(
    root: Path, before: BeforePeer, tmp_path: Path, agents: Agents
) -> None:
    agents.environ = before.environ()
    status = agents.ended(agents.start(root, plan_of(level_of(before))), root)
    (level,) = status.levels
    assert [*level.steps] == [*STEPS]
    small = sum((step_path(root, step) / "manifest.json").stat().st_size for step in STEPS)
    expected = sum(nbytes_of(root, step, linked=step not in (1, 4)) for step in STEPS)
    assert level.bytes_all == expected - small
    assert len({kept_still(kept_at(before, tmp_path), step).stat().st_ino for step in STEPS}) == 2
