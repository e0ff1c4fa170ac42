"""An agent that keeps steps for other nodes: where it says it does, for as long as they may come."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from ckpt_core.levels import (
    Away,
    Copy,
    Word,
    open_far,
    parse_address,
    read_keys,
    read_plan,
    read_status,
    write_plan,
)
from ckpt_core.levels.agent.claims import Fenced, take
from ckpt_core.levels.claiming import claim_word, parsed
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.levels.mailbox import Serve, Status, note_claim
from ckpt_core.levels.serving import server
from ckpt_core.options import Level
from ckpt_core.system.files import Files
from tests.levels.agents import Agents, plan_of, until
from tests.levels.making import make_store, save
from tests.levels.servers.faulty import in_environment
from tests.levels.servers.moto import needs_store
from tests.levels.servers.peer import TOKEN, PeerServer

pytestmark = needs_store

COPY = Copy(7, "000000000007-0123abcd")


@pytest.fixture
def token(tmp_path: Path) -> Iterator[str]:
    name = tmp_path / "token"
    name.touch(mode=0o600)
    name.write_text(TOKEN)
    with in_environment({"CKPT_PEER_TOKEN_FILE": str(name)}):
        yield str(name)


def told(root: Path) -> Status | None:
    """What the agent says of the plan that is there."""
    plan, status = read_plan(root), read_status(root)
    return status if plan and status and status.token == plan.token else None


def test_an_agent_serves_until_nobody_comes_any_more(
    root: Path, tmp_path: Path, token: str, agents: Agents
) -> None:
    store = make_store(root)
    save(store, 1)
    serve = Serve(str(tmp_path / "copies"), "127.0.0.1:0", token)
    process = agents.start(root, plan_of(serve=serve), serves_s=1.0)
    address = until(lambda: (found := told(root)) and found.serving)
    # Another plan, of the next trainer: what is served goes on, at the same port.
    write_plan(root, plan_of(serve=serve, session=2))
    assert until(lambda: (found := told(root)) and found.serving) == address
    with open_far(f"peer://{address}/run") as far:
        store.close()
        for number in range(8):
            far.put(COPY, f"shard-{number}", iter([memoryview(bytes(10))]), 10)
            assert process.poll() is None
    assert agents.ended(process, root).ended == "up to date"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))


def test_an_agent_takes_the_token_that_is_in_the_file_when_the_next_job_begins(
    root: Path, tmp_path: Path, token: str, agents: Agents
) -> None:
    serve = Serve(str(tmp_path / "copies"), "127.0.0.1:0", token)
    with closing(make_store(root)) as store, ExitStack() as stack:
        other = stack.enter_context(closing(served_at(tmp_path / "other", token, 0)))
        levels = [Level(f"peer://{other.address}/run")]
        save(store, 1)
        agents.start(root, plan_of(*levels, serve=serve))
        until(lambda: (found := told(root)) and found.serving and found.levels[0].reached)
        Path(token).write_text(TOKEN[::-1])
        other.close()
        stack.enter_context(closing(served_at(tmp_path / "other", token, other.address.port)))
        write_plan(root, plan_of(*levels, serve=serve, session=2))
        address = until(lambda: (found := told(root)) and found.serving)
        with open_far(f"peer://{address}/run") as far:
            far.put(COPY, "shard-0", iter([memoryview(bytes(10))]), 10)
            assert far.files(COPY) == {"shard-0": 10}
        save(store, 2)
        until(lambda: (found := told(root)) and found.levels and 2 in found.levels[0].reached)


def served_at(place: Path, token: str, port: int) -> server.PeerServer:
    address = parse_address(f"127.0.0.1:{port}")
    return server.PeerServer(place, read_keys(token), address, files=Files())


def test_an_agent_that_cannot_listen_says_so_and_does_when_it_can(
    root: Path, tmp_path: Path, token: str, agents: Agents
) -> None:
    with closing(make_store(root)), socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        serve = Serve(str(tmp_path / "copies"), address, token)
        agents.start(root, plan_of(serve=serve))
        assert "cannot listen at" in until(lambda: (found := told(root)) and found.refused)
        taken.close()
        assert until(lambda: (found := told(root)) and found.serving) == address


def test_an_agent_that_is_believed_dead_takes_nothing_from_the_next_session(tmp_path: Path) -> None:
    with PeerServer() as peer, in_environment(peer.environ()):
        assert read_keys(peer.token)
        with open_far(peer.url("ab/node-00000")) as far:
            for _ in range(2):
                take(far, plan_of(session=2), tmp_path)
            with pytest.raises(Fenced, match="at session 2"):
                take(far, plan_of(session=1), tmp_path)
            take(far, plan_of(session=3), tmp_path)
            far.write_word(
                "run.json", b'{"run": "other", "session": 1}', over=far.read_word("run.json").tag
            )  # type: ignore[union-attr]
            with pytest.raises(Away, match="belongs to another run"):
                take(far, plan_of(session=4), tmp_path)


def test_a_claim_of_the_same_root_that_was_cut_off_keeps_its_session(tmp_path: Path) -> None:
    note_claim(tmp_path, "of this root")
    words = DirectoryFar(tmp_path / "far", files=Files())
    claim = claim_word("ab" * 8, 2, host="here", pid=1, token="of this root")
    words.write_word("run.json", claim, over=None)
    take(words, plan_of(session=1), tmp_path)
    assert parsed(words.read_word("run.json"))["session"] == 2


def test_what_a_later_session_claims_meanwhile_stays_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (
        PeerServer() as peer,
        in_environment(peer.environ()),
        open_far(peer.url("ab/node-00000")) as far,
    ):
        take(far, plan_of(session=2), tmp_path)
        read_word = far.read_word

        def read_and_be_late(name: str) -> Word | None:
            word = read_word(name)
            monkeypatch.setattr(far, "read_word", read_word)
            take(far, plan_of(session=4), tmp_path)
            return word

        monkeypatch.setattr(far, "read_word", read_and_be_late)
        with pytest.raises(Away):
            take(far, plan_of(session=3), tmp_path)
        assert parsed(read_word("run.json"))["session"] == 4
