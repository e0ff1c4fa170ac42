"""Kills while directories of files are taken on or brought back, in children of the warm process."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from ckpt_core import verify
from ckpt_core.levels import write_plan
from ckpt_core.levels.agent.agent import run_agent
from ckpt_core.levels.bring.named_bringing import Wish, bring_named
from ckpt_core.options import Level
from ckpt_core.system.files import Files
from tests import places
from tests.crash.killing import POINTS
from tests.crash.layers import KillAt
from tests.crash.promises import quiet
from tests.crash.warm import forked
from tests.levels.agents import plan_of
from tests.levels.killing import QUICK
from tests.levels.named_making import FILES, damage, far_of, save, whole

_NEVER = 1_000_000
_MOST = 8
OLD, NEW = "global_step10", "global_step20"


def bring(home: Path, files: Files) -> None:
    """The newest directory of the level to the root."""
    bring_named([far_of(home / "level")], Wish(home / "root", pointer="latest"), files=files)


def carry(home: Path, files: Files) -> None:
    """An agent: both directories of the root to the level."""
    write_plan(home / "root", plan_of(Level(str(home / "level"), backlog=5)))
    run_agent(home / "root", files=files, timing=QUICK)


def to_a_fresh_root(home: Path) -> None:
    """Nothing is there."""
    _both(home / "level")
    (home / "root").mkdir()


def over_a_damaged_one(home: Path) -> None:
    """The root has the newest, damaged."""
    _both(home / "level")
    shutil.copytree(home / "level", home / "root")
    damage(home / "root" / NEW / FILES[0])


def to_a_fresh_level(home: Path) -> None:
    """The level has nothing."""
    _both(home / "root")


def over_an_older_save(home: Path) -> None:
    """The level has an earlier save of one that was saved again."""
    save(home / "root", 5, NEW)
    carry(home, Files())
    _both(home / "root")


def _both(root: Path) -> None:
    save(root, 10)
    save(root, 20)


CASES: dict[str, tuple[Callable[[Path], None], Callable[[Path, Files], None], str]] = {
    "to a fresh root": (to_a_fresh_root, bring, "root"),
    "over a damaged one": (over_a_damaged_one, bring, "root"),
    "to a fresh level": (to_a_fresh_level, carry, "level"),
    "over an older save": (over_an_older_save, carry, "level"),
}


def kill_everywhere(case: str, point: str, place: str) -> int:
    """Kill at file operations, look, go on, and look again; how many kills there were."""
    quiet()
    home = Path(place)
    prepare, act, side = CASES[case]
    sent, problem = forked(lambda: prepare(_made(home / "prepared")))
    assert not sent and not problem, problem
    total = _lived(home, act, _NEVER, point)
    count = 0
    for n in places.some(range(total), _MOST, of=f"named {case} {point}"):
        if _lived(home, act, n, point) == signal.SIGKILL:
            count += 1
            now = home / "now"
            sent, problem = forked(lambda now=now: _check(now, act, side, case))
            assert not sent and not problem, f"{case}, killed {point} operation {n}: {problem}"
    return count


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def _lived(home: Path, act: Callable[[Path, Files], None], n: int, point: str) -> int:
    """How many operations a life had that was not cut short; or the signal that ended it."""
    now, log = home / "now", home / "count"
    shutil.rmtree(now, ignore_errors=True)
    shutil.copytree(home / "prepared", now, symlinks=True)
    kill = KillAt(n, point=point, names=POINTS[point])

    def live() -> None:
        act(now, kill.files())
        log.write_text(str(kill.count))

    sent, problem = forked(live)
    assert not problem, problem
    return sent or int(log.read_text())


def _check(now: Path, act: Callable[[Path, Files], None], side: str, case: str) -> None:
    """What is visible is whole, what was there is not lost; and the next try comes to its end."""
    place = now / side
    if place.exists():
        _look(place, case)
    act(now, Files())
    seen = whole(place)
    assert seen[NEW] == 20
    assert (place / "latest").read_text() == NEW
    assert side == "level" or not list((place / ".inflight").iterdir())


def _look(place: Path, case: str) -> None:
    names = set(far_of(place).directories())
    if case == "over a damaged one":
        assert names == {OLD, NEW}
        assert verify(place / OLD).ok
    else:
        assert names == set(whole(place))
    if case == "over an older save":
        assert NEW in names
    pointer = place / "latest"
    assert not pointer.exists() or pointer.read_text() in names
