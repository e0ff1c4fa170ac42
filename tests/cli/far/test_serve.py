"""`serve`: a node's directory as a level of others, and what is said and refused at its start."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, Level
from ckpt_core.cli.doctor.levels import check_levels
from ckpt_core.levels import TOKEN_VARIABLE, open_far
from ckpt_core.store import committed_steps
from tests.levels.servers.moto import needs_store
from tests.levels.servers.peer import TOKEN, PeerServer
from tests.levels.trainers import agent_of, end_agent, until

Cli = Callable[..., Any]
TOP = Path(__file__).parents[3]


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text(TOKEN)
    return path


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_what_the_others_need_and_ends_cleanly(
    tmp_path: Path, token: Path, number: int
) -> None:
    kept = tmp_path / "kept"
    command = ["serve", str(kept), "--bind", "127.0.0.1:0", "--token-file", str(token)]
    serving = subprocess.Popen(
        [sys.executable, "-m", "ckpt_core", *command],
        cwd=TOP,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert serving.stdout is not None
        lines = [serving.stdout.readline() for _ in range(4)]
        found = re.search(r"serving (.*) at http://127\.0\.0\.1:(\d+)", lines[0])
        assert found is not None and found[1] == str(kept)
        assert f"export {TOKEN_VARIABLE}={token}" in lines[2]
        assert f'Level("peer://127.0.0.1:{found[2]}/run")' in lines[3]
        serving.send_signal(number)
        out, err = serving.communicate(timeout=60)
    finally:
        serving.kill()
        serving.wait()
    assert serving.returncode == 0 and "is not served any more" in out and not err
    assert TOKEN not in "".join(lines) + out + err
    assert not (kept / ".incoming").exists()


WRONG = {
    "no address": ({"--bind": None}, "say where to listen"),
    "no token": ({"--token-file": None}, "say which file has the token"),
    "every network": ({"--bind": "0.0.0.0:0"}, "every network"),
    "a store": ({"DIR": "s3://bucket/run"}, "takes a directory"),
    "no such token": ({"--token-file": "nowhere"}, r"cannot be read.*head -c 32 /dev/urandom"),
    "a directory": ({"--token-file": "."}, "holds no token|cannot be read|others can read"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_before_anything_is_made(
    cli: Cli, tmp_path: Path, token: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changed, text = WRONG[case]
    options = {"--bind": "127.0.0.1:0", "--token-file": str(token)} | changed
    folder = options.pop("DIR", "kept")
    given = [word for name, value in options.items() if value is not None for word in (name, value)]
    answer = cli("serve", folder, *given)
    assert answer.code == 2 and re.search(text, answer.err), answer.err
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("mode", "text", "said"),
    [
        *[(mode, TOKEN, "others can read") for mode in (0o640, 0o604, 0o620, 0o602)],
        (0o600, "short", "holds no token of 32 to 4096"),
        (0o600, "x" * 5000, "holds no token of 32 to 4096"),
    ],
)
def test_a_token_that_is_no_secret_is_refused(
    cli: Cli, tmp_path: Path, token: Path, mode: int, text: str, said: str
) -> None:
    token.write_text(text)
    token.chmod(mode)
    answer = cli("serve", tmp_path / "kept", "--bind", "127.0.0.1:0", "--token-file", token)
    assert answer.code == 2 and said in answer.err and str(token) in answer.err
    assert text not in answer.err


def test_the_root_of_a_job_is_not_served_beside_it(
    process: Cli, tmp_path: Path, token: Path
) -> None:
    with Checkpointer(tmp_path / "root"):
        answer = process("serve", tmp_path / "root", "--bind", "127.0.0.1:0", "--token-file", token)
    assert answer.code == 2 and f"is open for writing by pid {os.getpid()}" in answer.err


@needs_store
def test_a_node_and_its_peer_are_lost_and_the_job_goes_on_from_the_other_peer(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PeerServer() as other:
        monkeypatch.setenv(TOKEN_VARIABLE, str(other.token))
        with PeerServer() as lost:
            levels = [Level(server.url("run/a job")) for server in (lost, other)]
            with Checkpointer(tmp_path / "root", levels=levels) as ck:
                for step in (1, 2):
                    handle = ck.save(step, {"w": torch.full((10,), step)})
                    for level in levels:
                        handle.reached(level.url).result(60)
            until(lambda: agent_of(tmp_path / "root") is None, "the end of the agent")
            # What is kept there is a root as any other, where it lies.
            for server in (lost, other):
                assert cli("verify", server.kept / "run" / "a job").code == 0
        with PeerServer() as replacement:
            levels[0] = Level(replacement.url("run/a job"))
            with Checkpointer(tmp_path / "fresh", levels=levels) as ck:
                state = {"w": torch.zeros(10, dtype=torch.int64)}
                restored = ck.restore(state)
                assert restored is not None and restored.step == 2
                assert state["w"].tolist() == [2] * 10
                # It is caught up: the next loss is survived, too.
                ck.save(3, state).reached(levels[0].url).result(60)
            assert cli("verify", replacement.kept / "run" / "a job").code == 0
            end_agent(tmp_path / "fresh")
    texts = [path.read_text() for path in tmp_path.rglob(".levels/*") if path.is_file()]
    assert texts and not any(TOKEN in text for text in texts)


@needs_store
@pytest.mark.parametrize("case", ["well", "no token", "another token", "nobody", "not a secret"])
def test_doctor_says_what_keeps_a_peer_from_being_a_level(
    token: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "" if case == "no token" else str(token))
    with PeerServer() as server:
        if case == "another token":
            token.write_text(TOKEN[::-1])
        if case == "not a secret":
            token.chmod(0o644)
        url = "peer://127.0.0.1:1/run" if case == "nobody" else server.url()
        (found,) = check_levels(None, [url])
        assert re.search(
            {
                "well": "reachable, writable, its conditions hold; takes .* for each second",
                "no token": f"asks for the token of the job: let {TOKEN_VARIABLE} name a file",
                "another token": f"the credentials are refused.*let {TOKEN_VARIABLE} name a file",
                "nobody": r"cannot be reached.*endpoint \(http://127\.0\.0\.1:1\)",
                "not a secret": "others can read the token's file",
            }[case],
            found.found,
        ), found
        assert (found.level.value == "ok") is (case == "well") and url in found.found
        assert TOKEN not in str(found) and TOKEN[::-1] not in str(found)
        assert not [path for path in server.kept.rglob("*") if path.name[0] != "."]


@needs_store
def test_in_what_a_peer_keeps_for_another_node_pins_are_those_of_that_node(
    cli: Cli, ckpts: Path, peer: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in peer.environ().items():
        monkeypatch.setenv(name, value)
    name = uuid.uuid4().hex
    kept = peer.kept / name
    for step in (10, 20, 30):
        assert cli("push", ckpts, step, "--to", peer.url(name)).code == 0
    with open_far(peer.url(name)) as far:
        far.write_word("run.json", b'{"run": "abcd1234", "session": 1}', over=None)
        assert far.pins() == {20}
        answer = cli("rm", kept, "--keep-last", 1, "--yes")
        assert "pinned steps stay: 20" in answer.err
        assert committed_steps(kept) == (20, 30) and set(far.steps()) == {20, 30}
        assert cli("pin", kept, 30).out == "step 30 is pinned\n"
        assert far.pins() == {20, 30}
        for step in (20, 30):
            assert cli("unpin", kept, step).out == f"step {step} is not pinned\n"
        assert far.pins() == frozenset()
