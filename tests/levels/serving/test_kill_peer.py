"""kill -9 of a peer at any of its file operations: nothing half is seen, nothing acknowledged is lost."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from urllib.request import Request, urlopen

from ckpt_core.levels import Away, Copy, Far
from tests import places
from tests.levels.making import make_store, save
from tests.levels.sending import sent_to
from tests.levels.servers.faulty import in_environment
from tests.levels.servers.moto import needs_store
from tests.levels.servers.peer import PeerServer
from tests.levels.stores import look_at, read

pytestmark = needs_store

PROGRAM = str(Path(__file__).parents[1] / "servers" / "peer_program.py")
MOST = 6
_NEVER = 1_000_000
_PARTS_BYTES = 9 << 20  # two parts


class Noting:
    """Sends for an agent, and notes what was acknowledged."""

    def __init__(self, far: Far) -> None:
        self._far = far
        self.arrived: dict[tuple[Copy, str], bytes] = {}
        self.published: list[Copy] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._far, name)

    def put(self, copy: Copy, name: str, blocks: Iterable[memoryview], nbytes: int) -> None:
        data = b"".join(map(bytes, blocks))
        self._far.put(copy, name, iter([memoryview(data)]), nbytes)
        self.arrived[copy, name] = data

    def publish(self, copy: Copy, manifest: bytes, *, replaces: str | None = None) -> bool:
        done = self._far.publish(copy, manifest, replaces=replaces)
        self.published.append(copy)
        return done


def far_of(server: PeerServer, *, request_s: float = 20.0) -> Far:
    from ckpt_core.levels.far.objects import ObjectFar

    return ObjectFar(server.url(), request_s=request_s)


def at_last(home: Path) -> PeerServer:
    """One that is not killed."""
    return PeerServer(home, (PROGRAM, str(_NEVER), str(home / "count")))


def life(root: Path, home: Path, n: int) -> tuple[Noting, bool]:
    """Send a second step to a peer that is killed at a file operation, and take the first away."""
    with PeerServer(home, (PROGRAM, str(n), str(home / "count"))) as server:
        with in_environment(server.environ()):
            noting = Noting(far_of(server, request_s=1.0))
            with contextlib.suppress(Away):
                assert sent_to(noting, root, 2)  # type: ignore[arg-type]
                noting.retire(["step-000000000001"])  # type: ignore[operator]
                return noting, True
        return noting, False


def test_a_kill_of_a_peer_at_any_operation_shows_nothing_half_and_loses_nothing(
    root: Path, tmp_path: Path
) -> None:
    store = make_store(root)
    for step in (1, 2):
        save(store, step, nbytes=_PARTS_BYTES, sums=False)
    store.close()
    prepared = tmp_path / "prepared"
    with PeerServer(_made(prepared)) as server, in_environment(server.environ()):
        assert sent_to(far_of(server), root, 1)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(prepared / "kept" / ".incoming")
    begun = _operations(root, prepared, tmp_path / "begun", sends=False)
    count = _operations(root, prepared, tmp_path / "whole", sends=True)
    assert count > begun + 20
    for n in places.some(range(begun, count), MOST, of="peer"):
        home = tmp_path / f"killed-{n}"
        shutil.copytree(prepared, home)
        noting, _ = life(root, home, n)
        with at_last(home) as server, in_environment(server.environ()):
            with far_of(server) as far:
                assert not list((home / "kept" / ".incoming").iterdir()), f"{n}: swept"
                seen = set(look_at(far))
                assert seen <= {1, 2} and seen, f"{n}: {seen}"
                assert noting.published == [] or 2 in seen, f"{n}: acknowledged, and lost"
                for (copy, name), data in noting.arrived.items():
                    assert read(far, copy, name, len(data)) == data, f"{n}: {name}"
                assert sent_to(far, root, 2)
                far.retire(["step-000000000001"])
                assert look_at(far) == {2: 0}, n
            assert not list((home / "kept" / ".incoming").iterdir()), f"{n}: left over"
        shutil.rmtree(home)


def _made(home: Path) -> Path:
    home.mkdir()
    return home


def _operations(root: Path, prepared: Path, home: Path, *, sends: bool) -> int:
    """How many there are until it serves; or in the whole life."""
    shutil.copytree(prepared, home)
    if sends:
        assert life(root, home, _NEVER)[1]
    else:
        at_last(home).close()
    return int((home / "count").read_text())


def test_an_upload_that_a_kill_of_the_agent_has_cut_off_is_aborted_by_the_next_one(
    tmp_path: Path,
) -> None:
    from ckpt_core.levels.far.clients import endpoint, peer_settings
    from ckpt_core.levels.signing import signed

    copy = Copy(7, "000000000007-0123abcd")
    with PeerServer() as server, in_environment(server.environ()), far_of(server) as far:
        place = f"{endpoint(server.url())}/steps/run/{copy.target}/{copy.folder}/a%20shard?uploads="
        headers = signed("POST", place, peer_settings(), when=datetime.now(UTC))
        urlopen(Request(place, method="POST", headers=headers), timeout=60).close()
        assert len(list((server.kept / ".incoming").iterdir())) == 1
        far.take_up(lambda name: name == "another")
        assert len(list((server.kept / ".incoming").iterdir())) == 1
        with in_environment({"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}):
            far.take_up(lambda name: name == f"{copy.target}/{copy.folder}/a shard")
        assert not list((server.kept / ".incoming").iterdir())
