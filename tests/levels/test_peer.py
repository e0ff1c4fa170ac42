"""A peer as a level: what is sent to it, and what of the environment is not."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from ckpt_core import Checkpointer, Level, bring_directory, load
from ckpt_core.errors import CkptError, ConfigError, RestoreError
from ckpt_core.levels import (
    Address,
    Away,
    Copy,
    Far,
    open_far,
    pull,
    push,
    read_keys,
    read_status,
    write_plan,
)
from ckpt_core.levels import PeerServer as Serving
from ckpt_core.levels.serving import allowing
from ckpt_core.store import committed_steps, opened_by_hand, step_path
from ckpt_core.system.files import Files
from ckpt_core.types import step_dir_name
from tests.faults.mounts import fill, mounted
from tests.levels.agents import Agents, plan_of, until
from tests.levels.making import make_store, save
from tests.levels.servers.before_peer import BeforePeer
from tests.levels.servers.faulty import SECRET, FaultServer, Request, always, in_environment
from tests.levels.servers.moto import needs_store
from tests.levels.servers.peer import TOKEN, PeerServer
from tests.levels.serving.asking import files_below
from tests.levels.stores import level_of, look_at, opened
from tests.levels.trainers import SOON_S, agent_of, end_agent, options
from tests.store.harness import Fault, QuickFiles, interrupted

pytestmark = needs_store

OTHERS = {
    "AWS_ACCESS_KEY_ID": "AKIDOTHER",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_SESSION_TOKEN": f"token{SECRET}",
    "AWS_REGION": "eu-central-1",
    "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
    "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1",
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
    "AWS_SKIP_SIGNATURE": "true",
    "AWS_UNSIGNED_PAYLOAD": "true",
    "AWS_REQUEST_PAYER": "true",
    "AWS_CONDITIONAL_PUT": "disabled",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "http_proxy": "http://127.0.0.1:9",
    "ALL_PROXY": "http://127.0.0.1:9",
    "no_proxy": "",
    "NO_PROXY": "",
    "AWS_CHECKSUM_ALGORITHM": "SHA256",
    "AWS_SERVER_SIDE_ENCRYPTION": "sse-c",
    "AWS_SSE_CUSTOMER_KEY_BASE64": "c2VjcmV0IGtleSBvZiAzMiBieXRlcywgYmFzZTY0IQ==",
}
COPY = Copy(7, "000000000007-0123abcd")


def test_settings_of_another_store_change_nothing(peer: PeerServer) -> None:
    with in_environment(OTHERS | peer.environ()), open_far(peer.url("others")) as far:
        far.check()
        data = memoryview(os.urandom(9 << 20))
        far.put(COPY, "large", iter([data]), len(data))
        assert far.files(COPY) == {"large": len(data)}
        assert far.read(COPY, "large", len(data)) == data


def test_nothing_secret_of_another_store_or_of_the_job_is_sent(peer: PeerServer) -> None:
    heard: list[Request] = []

    def fault(request: Request) -> None:
        heard.append(request)

    with FaultServer(buckets=("steps",)) as server:
        server.fault = fault
        url = f"peer://127.0.0.1:{server.port}/run"
        with in_environment(OTHERS | peer.environ()), open_far(url) as far:
            far.check()
            far.put(COPY, "large", iter([memoryview(bytes(9 << 20))]), 9 << 20)
            far.sweep([])
    assert len(heard) > 12
    for request in heard:
        text = f"{request.target} {request.headers}"
        for secret in (TOKEN, SECRET, OTHERS["AWS_SSE_CUSTOMER_KEY_BASE64"], "AKIDOTHER"):
            assert secret not in text
        assert "x-amz-security-token" not in request.headers
        assert request.headers["authorization"].startswith("AWS4-HMAC-SHA256 ")
        assert request.headers["x-amz-content-sha256"] != "UNSIGNED-PAYLOAD"


def test_no_text_holds_the_token_or_what_is_made_of_it(
    peer: PeerServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    keys = read_keys(peer.token)
    other = tmp_path / "other"
    other.touch(mode=0o600)
    other.write_text(TOKEN[::-1])
    texts = [repr(keys)]
    with FaultServer(buckets=("steps",)) as server, in_environment(peer.environ()):
        places = [f"peer://127.0.0.1:{port}/run" for port in (server.port, peer.port, 1)]
        for word in ("400", "403", "503", "reset"):
            server.fault = always(word)
            for url, environ in (
                (places[0], {}),
                (places[1], {"CKPT_PEER_TOKEN_FILE": str(other)}),
            ):
                with in_environment(environ), pytest.raises(CkptError) as caught:
                    open_far(url).check()
                texts.append("".join(traceback.format_exception(caught.value)))
    for text in [*texts, caplog.text]:
        assert TOKEN not in text and TOKEN[::-1] not in text
        assert keys.secret_access_key not in text and "Signature=" not in text
    assert len(texts) == 9


def test_without_a_token_it_is_said_where_it_belongs(
    peer: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPT_PEER_TOKEN_FILE", raising=False)
    with pytest.raises(ConfigError, match=r"let CKPT_PEER_TOKEN_FILE name a file"):
        open_far(peer.url())


def test_a_wrong_token_is_hopeless_and_a_dead_peer_is_not(peer: PeerServer, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.touch(mode=0o600)
    other.write_text(TOKEN[::-1])
    with in_environment({"CKPT_PEER_TOKEN_FILE": str(other)}), open_far(peer.url()) as far:
        with pytest.raises(Away, match="credentials are refused") as caught:
            far.steps()
        assert caught.value.hopeless
        with pytest.raises(Away, match="credentials are refused"):
            far.put(COPY, "large", iter([memoryview(bytes(9 << 20))]), 9 << 20)
    with in_environment(peer.environ()), open_far("peer://127.0.0.1:1/run") as far:
        with pytest.raises(
            Away, match=r"cannot be reached.*endpoint \(http://127.0.0.1:1\)"
        ) as caught:
            far.check()
        assert not caught.value.hopeless


def far_of(url: str) -> Far:
    """A level that is not asked for long."""
    from ckpt_core.levels.far.objects import ObjectFar

    return ObjectFar(url, request_s=1.0)


def test_clocks_that_are_apart_are_told_of_without_a_word_on_which_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    monkeypatch.setattr(allowing, "HOLDS", timedelta(seconds=-1))
    with (
        in_environment({"CKPT_PEER_TOKEN_FILE": str(token)}),
        Serving(tmp_path / "kept", read_keys(token), Address("127.0.0.1", 0)) as server,
        open_far(f"peer://{server.address}/run") as far,
        pytest.raises(
            Away, match=r"the clock there and that of this machine.*set the one that is"
        ) as caught,
    ):
        far.steps()
    assert caught.value.hopeless


def test_a_full_disk_of_a_peer_is_a_problem_that_may_pass(peer: PeerServer, tmp_path: Path) -> None:
    fault = Fault("pwrite", errno.ENOSPC)
    files = interrupted(QuickFiles, fault)
    address = Address("127.0.0.1", 0)
    with (
        in_environment(peer.environ()),
        Serving(tmp_path / "kept", read_keys(peer.token), address, files=files) as server,
        far_of(f"peer://{server.address}/run") as far,
    ):
        for nbytes in (10, 9 << 20):
            with pytest.raises(Away, match=r"it is full.*make room there") as caught:
                far.put(COPY, "shard", iter([memoryview(bytes(nbytes))]), nbytes)
            assert not caught.value.hopeless and far.files(COPY) == {}
        fault.armed = False
        far.put(COPY, "shard", iter([memoryview(bytes(10))]), 10)
        assert far.files(COPY) == {"shard": 10}


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_peer_that_is_full_to_the_last_byte_goes_on_once_it_is_to_keep_fewer_steps(
    root: Path, tmp_path: Path, agents: Agents, kind: str
) -> None:
    with mounted(kind, tmp_path) as disk, PeerServer(disk) as server:
        agents.environ = server.environ()
        store = make_store(root)
        for step in (1, 2, 3):
            save(store, step, nbytes=3 << 20)
        process = agents.start(root, plan_of(Level(server.url(), keep_last=3, backlog=100)))
        with in_environment(server.environ()), open_far(server.url()) as far:
            until(lambda: set(far.steps()) == {1, 2, 3})
            fill(disk)
            store.pin(2)  # which needs room there, too
            save(store, 4, nbytes=2 << 20)
            until(lambda: (found := read_status(root)) and "full" in found.levels[0].problem)
            write_plan(root, plan_of(Level(server.url(), keep_last=1)))
            until(lambda: set(far.steps()) == {2, 4})
            assert look_at(far) == {2: 0, 4: 0} and far.pins() == {2}
        store.close()
        assert agents.ended(process, root).levels[0].problem == ""


def test_a_token_that_is_named_from_where_the_job_began_is_found_wherever_it_has_gone_since(
    root: Path, tmp_path: Path, peer: PeerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(peer.home)
    monkeypatch.setenv("CKPT_PEER_TOKEN_FILE", peer.token.name)
    levels, given = [Level(peer.url("moved"))], options(timeout=SOON_S)
    try:
        with Checkpointer(root, given, levels=levels, files=QuickFiles()) as ck:
            ck.save(1, {"w": 1}).reached(1).result(SOON_S)
            monkeypatch.chdir(tmp_path)
            ck._engine.levels.errands.close()  # type: ignore[attr-defined]
            os.kill(until(lambda: agent_of(root)), signal.SIGKILL)
            ck.save(2, {"w": 2}).reached(1).result(SOON_S)
            shutil.rmtree(step_path(root, 2))
            assert ck.restore({"w": 0}).step == 2
    finally:
        end_agent(root)


def test_an_agent_goes_on_by_itself_when_its_peer_was_killed_and_started_anew(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    store = make_store(root)
    (tmp_path / "home").mkdir()
    with PeerServer(tmp_path / "home") as first, BeforePeer(first, "runs") as server:
        agents.environ = server.environ()
        first.close()  # SIGKILL
        save(store, 1)
        process = agents.start(root, plan_of(level_of(server)), again_s=0.1)
        until(lambda: (status := read_status(root)) and status.levels[0].problem)
        with PeerServer(tmp_path / "home") as second, opened(server) as far:
            server.peer = second
            until(lambda: far.steps())
            assert look_at(far) == {1: 0}
            save(store, 2)
            until(lambda: 2 in far.steps())
            store.close()
            status = agents.ended(process, root)
            assert look_at(far) == {1: 0, 2: 0} and not status.levels[0].problem


def test_what_a_peer_keeps_is_read_and_pinned_there_and_nothing_is_saved_beside_it(
    peer: PeerServer, root: Path, tmp_path: Path
) -> None:
    url, kept, state = peer.url("job"), peer.kept / "job", {"w": torch.arange(8)}
    with in_environment(peer.environ()):
        with Checkpointer(root) as ck:
            ck.save(1, state)
            ck.begin_files(1, "global_step1", pointer="latest").seal()
        for name in (step_dir_name(1), "global_step1"):
            push(root / name, Level(url), progress=lambda *_: None)
        with open_far(url) as far:
            far.write_word("run.json", b'{"run": "abcd1234", "session": 1}', over=None)
    before = files_below(peer.kept)
    writers: list[Callable[[], object]] = [
        lambda: Checkpointer(kept),
        lambda: Checkpointer(tmp_path / "other", levels=[Level(str(kept))]),
        lambda: push(root / step_dir_name(1), Level(str(kept)), progress=lambda *_: None),
        lambda: pull(str(root), "1", kept, replace=True, progress=lambda *_: None),
        lambda: bring_directory(kept, [str(root)], pointer="latest"),
    ]
    for write in writers:
        with pytest.raises(ConfigError, match=r"kept like an object store.*a root of your own"):
            write()
    assert files_below(peer.kept) == before
    assert torch.equal(load(kept)["w"], state["w"]) and committed_steps(kept) == (1,)
    with opened_by_hand(kept, files=Files()) as store:
        store.pin(1)
    pulled = pull(str(kept), None, tmp_path / "fresh", replace=False, progress=lambda *_: None)
    assert torch.equal(load(pulled.path)["w"], state["w"])
    (kept / "run.json").write_text('{"run": "of a program that trains"}')
    with Checkpointer(kept) as ck:
        assert ck.steps() == (1,)


def test_an_empty_root_begins_nothing_while_the_peer_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("x" * 40)
    token.chmod(0o600)
    monkeypatch.setenv("CKPT_PEER_TOKEN_FILE", str(token))
    for _ in range(2):  # and it may be tried again
        with pytest.raises(RestoreError, match=r"cannot be reached.*nothing was begun"):
            Checkpointer(tmp_path / "root", levels=["peer://127.0.0.1:9/run"])
