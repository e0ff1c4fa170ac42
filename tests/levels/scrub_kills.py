"""Kills while a damaged step is replaced, in children of the warm process."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

from ckpt_core.levels import scrub
from ckpt_core.restore import verify
from ckpt_core.store import committed_steps, step_path
from tests import places
from tests.crash.killing import POINTS
from tests.crash.layers import KillAt
from tests.crash.promises import quiet
from tests.crash.warm import forked
from tests.levels.restoring import fill, opened, shard_in
from tests.restore.harness import flip

_NEVER = 1_000_000
_MOST = 10


def kill_everywhere(point: str, place: str) -> int:
    """Kill at file operations of a scrub of a root, look, and scrub again; how many kills there were."""
    quiet()
    home = Path(place)
    prepared = home / "prepared"
    fill(prepared / "level", 10, 20)
    shutil.copytree(prepared / "level", prepared / "root")
    flip(shard_in(prepared / "root", 20), 9000)
    total = _lived(home, _NEVER, point)
    count = 0
    for n in places.some(range(total), _MOST, of=f"scrub {point}"):
        if _lived(home, n, point) == signal.SIGKILL:
            count += 1
            sent, problem = forked(lambda: _check(home / "now"))
            assert not sent and not problem, f"killed {point} operation {n}: {problem}"
    return count


def _scrubbed(now: Path, kill: KillAt | None = None) -> list[bool]:
    files = None if kill is None else kill.files()
    roots = [str(now / "root"), str(now / "level")]
    return [one.ok for one in scrub(roots, progress=lambda *_: None, files=files)]


def _lived(home: Path, n: int, point: str) -> int:
    now, log = home / "now", home / "count"
    shutil.rmtree(now, ignore_errors=True)
    shutil.copytree(home / "prepared", now)
    kill = KillAt(n, point=point, names=POINTS[point])

    def live() -> None:
        assert all(_scrubbed(now, kill))
        log.write_text(str(kill.count))

    sent, problem = forked(live)
    assert not problem, problem
    return sent or int(log.read_text())


def _check(now: Path) -> None:
    """Nothing is lost, the level is as it was, and the next scrub comes to its end."""
    assert verify(now / "level").ok
    assert verify(step_path(now / "root", 10)).ok
    assert all(_scrubbed(now))
    assert verify(now / "root").ok and committed_steps(now / "root") == (10, 20)
    with opened(now / "root"):
        assert not list((now / "root" / ".inflight").iterdir())
