"""A file of a step that is here gets one more key: only if all is what was saved, and at once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import pytest

from ckpt_core.levels import Away, Far, PeerServer
from ckpt_core.levels.agent.copying import How, Sent, send
from ckpt_core.levels.agent.sent_before import SentBefore
from ckpt_core.levels.agent.source import OpenSave
from ckpt_core.store import step_path
from ckpt_core.system.files import Files
from tests import places
from tests.engine.test_unchanged import Job
from tests.levels.making import make_store, save
from tests.levels.sending import sent_to
from tests.levels.servers.faulty import in_environment
from tests.levels.servers.moto import needs_store
from tests.levels.servers.peer import PeerServer as PeerProcess
from tests.levels.serving.asking import Heard, ask, files_below, put, served
from tests.levels.serving.test_kill_peer import PROGRAM, at_last, far_of
from tests.levels.test_sent_before import STILL
from tests.restore.harness import flip

NEVER = 1_000_000
MOST = 3
FILE = "shard-00000-0.safetensors"


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A directory that has a step as a peer keeps it."""
    store = make_store(tmp_path / "root")
    save(store, 1)
    store.close()
    folder = tmp_path / "kept" / "run" / "step-000000000001"
    attempt = folder / "0123abcd"
    attempt.mkdir(parents=True)
    for path in step_path(tmp_path / "root", 1).iterdir():
        (folder if path.name == "manifest.json" else attempt).joinpath(path.name).write_bytes(
            path.read_bytes()
        )
    return tmp_path / "kept"


STEP, NEXT = "run/step-000000000001/0123abcd", "run/step-000000000002/89abcdef"


def link(server: PeerServer, source: str, key: str, **more: str) -> Heard:
    told = {"x-amz-copy-source": f"/steps/{quote(source)}", **more}
    return ask(server, "PUT", f"/steps/{key}", more=told)


def test_a_file_of_a_step_is_linked_and_outlives_the_step(kept: Path) -> None:
    with served(kept) as server:
        answer = link(server, f"{STEP}/{FILE}", f"{NEXT}/other.bin")
        assert answer.status == 200 and b"<CopyObjectResult><ETag>" in answer.body
        made, known = kept / NEXT / "other.bin", kept / STEP / FILE
        assert os.path.samefile(made, known)
        data = known.read_bytes()
        for _ in range(2):  # asked once more, since the answer was lost
            assert link(server, f"{STEP}/{FILE}", f"{NEXT}/other.bin").status == 200
        assert made.stat().st_nlink == 2 and not list((kept / ".incoming").iterdir())
        assert ask(server, "DELETE", f"/steps/{STEP}/{FILE}").status == 204
        assert made.read_bytes() == data
        assert link(server, f"{STEP}/{FILE}", f"{NEXT}/x").status == 404


def test_a_link_is_made_only_where_the_condition_of_the_request_holds(kept: Path) -> None:
    with served(kept) as server:
        assert put(server, f"{NEXT}/x", b"older").status == 200
        refused = link(server, f"{STEP}/{FILE}", f"{NEXT}/x", **{"if-none-match": "*"})
        assert refused.status == 412 and (kept / NEXT / "x").read_bytes() == b"older"
        assert link(server, f"{STEP}/{FILE}", f"{NEXT}/x").status == 200
        assert os.path.samefile(kept / NEXT / "x", kept / STEP / FILE)


def test_what_is_not_what_was_saved_is_not_linked(kept: Path) -> None:
    folder = kept / "run" / "step-000000000001"
    whole = files_below(kept)
    for path, harm in (
        (kept / STEP / FILE, lambda path: flip(path, path.stat().st_size // 2)),
        (kept / STEP / FILE, lambda path: os.truncate(path, 100)),
        (kept / STEP / FILE, lambda path: path.write_bytes(path.read_bytes() + b"more")),
        (kept / STEP / "rank-00000.json", lambda path: flip(path, 30)),
        (kept / STEP / "rank-00000.json", Path.unlink),
        (folder / "manifest.json", lambda path: path.write_bytes(b'{"retired": ["0123abcd"]}')),
        (folder / "manifest.json", Path.unlink),
    ):
        harm(path)
        before = files_below(kept)
        with served(kept) as server:
            assert link(server, f"{STEP}/{FILE}", f"{NEXT}/x").status == 412
        assert files_below(kept) == before
        path.write_bytes(whole[str(path.relative_to(kept))])
    with served(kept) as server:
        assert link(server, f"{STEP}/{FILE}", f"{NEXT}/x").status == 200


def test_nothing_but_files_of_steps_is_linked_and_nothing_of_elsewhere(
    kept: Path, tmp_path: Path
) -> None:
    with served(kept) as server:
        assert put(server, "run/word", b"bytes").status == 200
        server.show("run/shown", tmp_path / "root")
        before = files_below(kept)
        for source, status in (
            ("run/word", 412),
            (f"{STEP}/rank-00000.json", 412),
            (f"{STEP}/../{FILE}", 400),
            ("../root/step-000000000001/" + FILE, 400),
            (f"run/shown/step-000000000001/{FILE}", 412),
        ):
            assert link(server, source, f"{NEXT}/x").status == status, source
        assert link(server, f"{STEP}/{FILE}", "run/shown/x").status == 403
        assert link(server, f"{STEP}/{FILE}", "run//x").status == 400
        headers = {"x-amz-copy-source": f"/other/{STEP}/{FILE}"}
        assert ask(server, "PUT", f"/steps/{NEXT}/x", more=headers).status == 404
        assert files_below(kept) == before


@pytest.fixture(scope="module")
def still_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps that have a file in common."""
    root = tmp_path_factory.mktemp("still") / "root"
    with Job(root, frozen=["base"]) as job:
        job.save_all(range(1, 3))
    return root


def second(far: Far, root: Path) -> bool:
    """Send the second step, as an agent that has sent the first one."""
    how = How(before=SentBefore())
    for step in (1, 2):
        with OpenSave(step_path(root, step), files=Files()) as opened:
            if step == 1:
                how.before.note(opened)
                continue
            return send(opened, far, how) is Sent.REACHED
    raise AssertionError


def life(prepared: Path, home: Path, act: Callable[[Far], object], n: int = NEVER) -> int:
    """What becomes of a peer that is killed at a file operation; how many there were."""
    shutil.copytree(prepared, home)
    program = (PROGRAM, str(n), str(home / "count"))
    with (
        PeerProcess(home, program) as server,
        in_environment(server.environ()),
        suppress(Away),
        far_of(server, request_s=1.0) as far,
    ):
        act(far)
    return int((home / "count").read_text())


@needs_store
def test_a_kill_of_a_peer_between_a_link_and_its_step_leaves_what_was_there(
    still_root: Path, tmp_path: Path
) -> None:
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    with PeerProcess(prepared) as server, in_environment(server.environ()), far_of(server) as far:
        assert sent_to(far, still_root, 1)
    shutil.rmtree(prepared / "kept" / ".incoming", ignore_errors=True)
    begun = life(prepared, tmp_path / "begun", lambda far: None)
    count = life(prepared, tmp_path / "whole", lambda far: second(far, still_root))
    assert count > begun + 10
    for n in places.some(range(begun, count), MOST, of="peer-link"):
        home = tmp_path / f"killed-{n}"
        life(prepared, home, lambda far: second(far, still_root), n)
        with at_last(home) as server, in_environment(server.environ()), far_of(server) as far:
            assert not list((home / "kept" / ".incoming").iterdir()), f"{n}: swept"
            assert {*far.steps()} in ({1}, {1, 2}), n
            assert second(far, still_root)
            for step in (1, 2):
                (path,) = step_path(home / "kept" / "run", step).glob(f"*/{STILL}")
                assert path.read_bytes() == (step_path(still_root, step) / STILL).read_bytes(), n
                assert path.stat().st_nlink == 2, n
        shutil.rmtree(home)
