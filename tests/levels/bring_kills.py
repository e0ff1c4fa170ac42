"""Kills while a step is brought, in children of the warm process."""

from __future__ import annotations

import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

from ckpt_core.restore import verify
from ckpt_core.store import committed_steps, step_path
from tests import places
from tests.crash.killing import POINTS
from tests.crash.layers import KillAt
from tests.crash.promises import quiet
from tests.crash.warm import forked
from tests.levels.restoring import brings_back, fill, opened, restored_state, shard_in
from tests.restore.harness import assert_same, flip, small_state

_NEVER = 1_000_000
_MOST = 12


def fresh(root: Path) -> None:
    """A root that has nothing."""
    root.mkdir()


def older(root: Path) -> None:
    """A root that has an older step."""
    fill(root, 10)


def damaged(root: Path) -> None:
    """A root whose newest step is damaged."""
    fill(root, 10, 20)
    flip(shard_in(root, 20), 9000)


ROOTS: dict[str, Callable[[Path], None]] = {"fresh": fresh, "older": older, "damaged": damaged}


def kill_everywhere(kind: str, point: str, place: str) -> int:
    """Kill at file operations of a bring, look, restart and look again; how many kills there were."""
    quiet()
    home = Path(place)
    prepared, level = home / "prepared", home / "level"
    ROOTS[kind](prepared)
    fill(level, 10, 20)
    total = _lived(home, prepared, level, _NEVER, point)
    count = 0
    for n in places.some(range(total), _MOST, of=f"bring {kind} {point}"):
        if _lived(home, prepared, level, n, point) == signal.SIGKILL:
            count += 1
            sent, problem = forked(lambda: _check(home / "root", level, kind))
            assert not sent and not problem, f"{kind}, killed {point} operation {n}: {problem}"
    return count


def _lived(home: Path, prepared: Path, level: Path, n: int, point: str) -> int:
    """How many operations a life had that was not cut short; or the signal that ended it."""
    root, log = home / "root", home / "count"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(prepared, root)
    kill = KillAt(n, point=point, names=POINTS[point])

    def live() -> None:
        files = kill.files()
        kill.armed = False
        with opened(root, files=files) as store:
            further = brings_back(store, [level], files=files)
            (attempt,) = further.steps()[20]
            kill.armed = True
            further.bring(20, attempt)
            kill.armed = False
        log.write_text(str(kill.count))

    sent, problem = forked(live)
    assert not problem, problem
    return sent or int(log.read_text())


def _check(root: Path, level: Path, kind: str) -> None:
    """What is visible is whole, and a restart has the newest step to the bit."""
    for step in committed_steps(root):
        if (kind, step) != ("damaged", 20):
            assert verify(step_path(root, step)).ok
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if kind == "damaged" else "error")
        step, state = restored_state(root, [level])
    assert step == 20
    assert_same(state, small_state(20))
    assert verify(root).ok
    assert committed_steps(root) == ((20,) if kind == "fresh" else (10, 20))
    assert not list((root / ".inflight").iterdir())
