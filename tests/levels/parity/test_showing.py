"""What a node shows of its root: steps, to be read by whoever has the token, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, ConfigError
from ckpt_core.cli.app import app
from ckpt_core.levels import Away, Copy, read_keys
from ckpt_core.levels.serving.binding import Address
from ckpt_core.levels.serving.server import PeerServer
from ckpt_core.store import step_path
from tests.levels.making import bytes_of, make_store, save
from tests.levels.parity.clusters import flip
from tests.levels.servers.faulty import in_environment
from tests.levels.servers.moto import needs_store
from tests.levels.servers.peer import TOKEN

pytestmark = needs_store

SHOWN = "abab/root-of-node-00003"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = make_store(tmp_path / "root")
    save(store, 7)
    store.close()
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "root" / "link").symlink_to(tmp_path)
    return tmp_path / "root"


@pytest.fixture
def server(root: Path, tmp_path: Path) -> Iterator[PeerServer]:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    keys = read_keys(str(token))
    with (
        PeerServer(tmp_path / "kept", keys, Address("127.0.0.1", 0)) as server,
        in_environment({"CKPT_PEER_TOKEN_FILE": str(token)}),
    ):
        server.show(SHOWN, root)
        yield server


def test_its_steps_are_read_as_they_lie(server: PeerServer, root: Path) -> None:
    from ckpt_core.levels.far.plain import PlainFar

    with PlainFar(f"peer://{server.address}/{SHOWN}") as far:
        ((step, attempt),) = far.steps().items()
        copy = Copy(step, attempt)
        assert far.manifest(copy.target) == (step_path(root, 7) / "manifest.json").read_bytes()
        sizes = far.files(copy)
        assert sorted(sizes) == ["rank-00000.json", "shard-00000-0.safetensors"]
        name = "shard-00000-0.safetensors"
        assert far.read(copy, name, sizes[name]) == bytes_of(7, 0, 0, sizes[name])


def _run(*words: str) -> object:
    with pytest.raises(SystemExit) as end:
        app(words)
    return end.value.code


def test_commands_read_it_by_its_url(
    server: PeerServer, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"peer://{server.address}/{SHOWN}"
    with Checkpointer(root) as ck:
        path = ck.save(8, {"w": torch.ones(100)}).committed.result(60)
        ck.pin(8)
    assert _run("verify", url, "--step=8") == 0
    assert _run("ls", url) == 0
    assert capsys.readouterr().err == ""
    flip(path / "shard-00000-0.safetensors", -1)
    assert _run("verify", url, "--step=8") == 1


@pytest.mark.parametrize("command", ["pin", "unpin"])
def test_a_step_is_pinned_and_unpinned_on_the_node_itself(
    server: PeerServer, root: Path, command: str
) -> None:
    with Checkpointer(root) as ck:
        ck.pin(7)
    with pytest.raises(ConfigError, match="pin and unpin on that node"):
        app([command, f"peer://{server.address}/{SHOWN}", "7"])


def test_nothing_there_is_changed_and_nothing_hidden_or_outside_is_shown(
    server: PeerServer, root: Path
) -> None:
    from ckpt_core.levels.far.plain import PlainFar

    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with PlainFar(f"peer://{server.address}/{SHOWN}") as far:
        with pytest.raises(Away):
            far.put(Copy(7, "000000000007-0123abcd"), "x", iter([memoryview(b"x")]), 1)
        with pytest.raises(Away):
            far.write_word("run.json", b"{}", over=None)
        far._bucket.delete([])
        with pytest.raises(Away):
            far._bucket.delete(["step-000000000007/manifest.json"])
        for key in (".lock", ".pins/7", "link/secret", "../secret", "link"):
            assert _seen(far, key) is None, key
        assert all(not name.startswith(".") for name in far._bucket.look()[0])
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def _seen(far: Any, key: str) -> object:
    with suppress(Away):
        return far._bucket.get(key)
    return None


def test_a_stranger_sees_nothing_of_it(server: PeerServer, tmp_path: Path) -> None:
    from ckpt_core.levels.far.plain import PlainFar

    other = tmp_path / "other"
    other.touch(mode=0o600)
    other.write_text("another token that is long enough to be one")
    with (
        in_environment({"CKPT_PEER_TOKEN_FILE": str(other)}),
        PlainFar(f"peer://{server.address}/{SHOWN}") as far,
        pytest.raises(Away),
    ):
        far.steps()


def test_what_is_shown_no_more_is_not_there(server: PeerServer, root: Path) -> None:
    from ckpt_core.levels.far.plain import PlainFar

    with PlainFar(f"peer://{server.address}/{SHOWN}") as far:
        server.show("", root)
        assert far.steps() == {} and far.manifest("step-000000000007") is None
