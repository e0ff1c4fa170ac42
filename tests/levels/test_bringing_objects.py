"""Steps come back from an object store: by a process of its own, each byte once for a node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_core.errors import RestoreError
from ckpt_core.restore import RestoreWarning, verify
from ckpt_core.store import committed_steps, step_path
from tests.crash.promises import quietly
from tests.levels.restoring import (
    Nodes,
    brings_back,
    fill,
    gather_roots,
    opened,
    restored_state,
)
from tests.levels.servers.azurite import AzuriteServer, needs_azurite
from tests.levels.servers.faulty import FaultServer, Request, always, at, in_environment
from tests.levels.servers.like_google import GoogleServer
from tests.levels.servers.moto import MotoServer
from tests.levels.servers.peer import PeerServer
from tests.restore.harness import assert_same, small_state
from tests.restore.ranks import write_ranks
from tests.restore.test_together import job, live

__all__ = ["quietly"]

pytest.importorskip("obstore")

WORDS = ("503", "reset", "torn", "lost", "slow")


@pytest.fixture
def server() -> Iterator[FaultServer]:
    with FaultServer() as found, in_environment(found.environ()):
        yield found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def sent(tmp_path: Path, server: FaultServer) -> Path:
    """A root whose steps are in the store."""
    fill(tmp_path / "sent", 10, 20)
    for step in (10, 20):
        put_step(server, tmp_path / "sent", step)
    return tmp_path / "sent"


def put_step(server: FaultServer, root: Path, step: int) -> None:
    """Lay a step out as an object store has it."""
    for file in step_path(root, step).iterdir():
        folder = "" if file.name == "manifest.json" else "0123abcd/"
        key = f"run/{step_path(root, step).name}/{folder}{file.name}"
        server._keep(key, file.read_bytes())


def shard_reads(server: FaultServer) -> list[str]:
    return [text for text in server.requests if text.startswith("GET") and "/shard-" in text]


def test_a_fresh_root_goes_on_from_the_store(root: Path, sent: Path, server: FaultServer) -> None:
    step, state = restored_state(root, [server.url()])
    assert step == 20
    assert_same(state, small_state(20))
    assert verify(root).ok
    for file in step_path(sent, 20).iterdir():
        assert (step_path(root, 20) / file.name).read_bytes() == file.read_bytes()


def test_the_client_of_the_store_is_never_in_the_process_that_trains(
    root: Path, sent: Path, server: FaultServer
) -> None:
    before = {name for name in sys.modules if name.startswith("obstore")}
    restored_state(root, [server.url()])
    assert {name for name in sys.modules if name.startswith("obstore")} == before


def test_ranks_that_share_a_root_fetch_each_byte_once(tmp_path: Path, server: FaultServer) -> None:
    write_ranks(tmp_path / "sent", 20, job(20, 2))
    put_step(server, tmp_path / "sent", 20)
    lives = live(2)
    nodes = Nodes([tmp_path / "root"] * 2, None, [server.url()])
    assert nodes.restore(lives).steps() == [20, 20]
    assert len(shard_reads(server)) == 2  # a file each, of less than a range


def test_nodes_fetch_the_files_of_their_ranks_alone(tmp_path: Path, server: FaultServer) -> None:
    before = [tmp_path / "a", tmp_path / "b"]
    for rank, one in enumerate(before):
        write_ranks(one, 20, job(20, 2), members=[rank])
    gather_roots(tmp_path / "sent", before, 20, job(20, 2))
    put_step(server, tmp_path / "sent", 20)
    fresh = [tmp_path / "c", tmp_path / "d"]
    lives = live(2)
    assert Nodes(fresh, [[0], [1]], [server.url()]).restore(lives).steps() == [20, 20]
    assert len(shard_reads(server)) == 2
    for rank, one in enumerate(fresh):
        names = {path.name for path in step_path(one, 20).iterdir()}
        assert names == {
            f"shard-0000{rank}-0.safetensors",
            f"rank-0000{rank}.json",
            "manifest.json",
        }


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("like", ["manifest.json", "rank-", "shard-", "list-type"])
def test_a_request_that_fails_once_is_made_again(
    word: str, like: str, root: Path, sent: Path, server: FaultServer
) -> None:
    server.fault = at(1, word, like=like)
    assert restored_state(root, [server.url()])[0] == 20
    assert verify(root).ok


def test_a_store_that_hides_a_file_from_its_lists_is_read_all_the_same(
    root: Path, sent: Path, server: FaultServer
) -> None:
    keys = {key: thing for key, thing in server.objects.items() if "shard" in key}
    for key in keys:
        del server.objects[key]
    server.lag(True)
    server.objects.update(keys)
    assert restored_state(root, [server.url()])[0] == 20


def test_a_file_that_is_missing_in_the_store_is_damage(
    root: Path, sent: Path, server: FaultServer
) -> None:
    for key in server.keys("run/step-000000000020/0123abcd/shard"):
        del server.objects[key]
    with pytest.warns(RestoreWarning, match=r"shard-00000-0.safetensors of step 20 at s3://bucket"):
        assert restored_state(root, [server.url()])[0] == 10


def test_wrong_bytes_in_the_store_are_damage(root: Path, sent: Path, server: FaultServer) -> None:
    (key,) = server.keys("run/step-000000000020/0123abcd/shard")
    data = bytearray(server.objects[key].data)
    data[9000] ^= 1
    server._keep(key, bytes(data))
    with pytest.warns(RestoreWarning, match=r"expected xxh3 .* in bytes 8192 to 12288, got xxh3"):
        assert restored_state(root, [server.url()])[0] == 10


def test_a_store_that_refuses_is_said_and_what_is_here_is_restored(
    root: Path, sent: Path, server: FaultServer
) -> None:
    fill(root, 10)
    server.fault = always("403")
    with pytest.warns(RestoreWarning, match="s3://bucket/run") as caught:
        assert restored_state(root, [server.url()])[0] == 10
    assert "seCret" not in str(caught[0].message)


def test_a_store_that_is_gone_does_not_let_a_run_begin_anew(root: Path) -> None:
    with FaultServer() as gone:
        environ, url = gone.environ(), gone.url()
    with (
        in_environment(environ),
        pytest.warns(RestoreWarning, match="cannot be asked"),
        pytest.raises(RestoreError, match="not every further level could be asked"),
    ):
        restored_state(root, [url])


def test_a_step_that_vanishes_from_the_store_meanwhile_is_passed_over(
    root: Path, sent: Path, server: FaultServer
) -> None:
    def fault(request: Request) -> str | None:
        if request.method == "GET" and "/shard-" in request.key and "0020" in request.key:
            for key in server.keys("run/step-000000000020"):
                server.objects.pop(key, None)
        return None

    server.fault = fault
    with pytest.warns(RestoreWarning, match=r"step 20 was not restored.*retired or replaced there"):
        assert restored_state(root, [server.url()])[0] == 10


def test_an_errand_that_is_killed_leaves_nothing_and_may_be_tried_again(
    root: Path, sent: Path, server: FaultServer
) -> None:
    fill(root, 10)

    def fault(request: Request) -> str | None:
        if "/shard-" in request.key:
            _kill_children()
        return None

    with opened(root) as store:
        further = brings_back(store, [server.url()])
        (attempt,) = further.steps()[20]
        server.fault = fault
        with pytest.raises(RestoreError, match="the process for 'bring' died"):
            further.bring(20, attempt)
        assert not list((root / ".inflight").iterdir())
        assert committed_steps(root) == (10,)
        server.fault = lambda request: None
        further.bring(20, attempt)
    assert verify(root).ok


def test_a_trainer_that_is_killed_while_its_errand_fetches_is_in_nobodys_way(
    root: Path, sent: Path, server: FaultServer
) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def fault(request: Request) -> str | None:
        if "/shard-" in request.key and not asked.is_set():
            asked.set()
            go_on.wait(60)
        return None

    server.fault = fault
    program = (
        "import sys; from pathlib import Path; from tests.levels.restoring import restored_state; "
        f"restored_state(Path({str(root)!r}), [{server.url()!r}])"
    )
    trainer = subprocess.Popen([sys.executable, "-c", program])
    try:
        assert asked.wait(60)
        (errand,) = _errands_of(trainer.pid)
    finally:
        trainer.kill()
        trainer.wait()
    assert restored_state(root, [server.url()])[0] == 20
    go_on.set()
    deadline = time.monotonic() + 30
    while _lives(errand):
        assert time.monotonic() < deadline, "the errand outlives its trainer"
        time.sleep(0.02)
    assert verify(root).ok
    assert [path.name for path in root.glob("step-*")] == [step_path(root, 20).name]


def _lives(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _errands_of(pid: int) -> list[int]:
    """The processes that a process has do its errands."""
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    children = [int(text) for one in lists for text in one.split()]
    return [one for one in children if b"errand" in Path(f"/proc/{one}/cmdline").read_bytes()]


def _kill_children() -> None:
    for pid in _errands_of(os.getpid()):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "kind", ["moto", pytest.param("azurite", marks=needs_azurite), "google", "peer"]
)
def test_a_step_comes_back_from_servers_of_each_kind(
    kind: str, request: pytest.FixtureRequest, root: Path, tmp_path: Path
) -> None:
    from ckpt_core.levels import Copy
    from ckpt_core.levels.far.opening import open_far

    fill(tmp_path / "sent", 20)
    copy, path = Copy(20, "000000000020-0123abcd"), step_path(tmp_path / "sent", 20)
    server: MotoServer | AzuriteServer | GoogleServer | PeerServer = request.getfixturevalue(kind)
    url = server.url("brought")
    with in_environment(server.environ()):
        with open_far(url) as far:
            for file in sorted(path.iterdir()):
                if file.name != "manifest.json":
                    data = file.read_bytes()
                    far.put(copy, file.name, [memoryview(data)], len(data))
            assert far.publish(copy, (path / "manifest.json").read_bytes())
        assert restored_state(root, [url])[0] == 20
    assert verify(root).ok
