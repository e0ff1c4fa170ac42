"""kill -9 of a peer at any file operation of a link: what was there stays, and the next try goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from ckpt_core.levels import Away, Far
from ckpt_core.levels.agent.copying import How, Sent, send
from ckpt_core.levels.agent.sent_before import SentBefore
from ckpt_core.levels.agent.source import OpenSave
from ckpt_core.store import step_path
from ckpt_core.system.files import Files
from tests import places
from tests.engine.test_unchanged import Job
from tests.levels.sending import sent_to
from tests.levels.servers.faulty import in_environment
from tests.levels.servers.moto import needs_store
from tests.levels.servers.peer import PeerServer
from tests.levels.serving.test_kill_peer import PROGRAM, at_last, far_of
from tests.levels.test_sent_before import STILL

NEVER = 1_000_000
MOST = 3


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
        PeerServer(home, program) as server,
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
    with PeerServer(prepared) as server, in_environment(server.environ()), far_of(server) as far:
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
