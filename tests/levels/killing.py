"""Kills an agent at one file operation after another, and has the next one go on: `python killing.py ...`.

A process of its own without torch, which forks a child for each life: that takes milliseconds.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt_core.levels import Plan, write_plan
from ckpt_core.levels.agent.agent import run_agent
from ckpt_core.levels.agent.board import Timing
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.options import Level
from ckpt_core.store import pinned_steps, unpinned_marks
from tests import places
from tests.levels.making import CHUNK_BYTES, look, make_store, save
from tests.store.harness import NoExchange, QuickFiles, interrupted

_NEVER = 1_000_000
QUICK = Timing(
    poll_s=0.002, gone_s=0.0, look_s=0.0, others_s=0.0, beat_s=0.002, again_s=0.002, end_s=20.0
)


class KillAt:
    """Ends this process before the n-th operation."""

    def __init__(self, n: int) -> None:
        self.n, self.count = n, 0

    def __call__(self, name: str, args: tuple[Any, ...]) -> None:
        if self.count == self.n:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


def prepare(root: Path, near: Path, far: Path, scenario: str) -> None:
    """What is there when the agent begins that is killed."""
    store = make_store(root)
    for step in (1, 2):
        save(store, step, nbytes=2 * CHUNK_BYTES)
    if scenario == "pins":
        store.pin(1)
    store.close()
    write_plan(root, plan(near, far))
    child(lambda: run_agent(root, files=QuickFiles(), timing=QUICK))
    store = make_store(root)
    if scenario == "replace":
        save(store, 2, mark=1, nbytes=2 * CHUNK_BYTES)
    else:
        for step in (3, 4):
            save(store, step, nbytes=2 * CHUNK_BYTES)
    if scenario == "pins":
        store.pin(2)
        store.unpin(1)
    store.close()


def plan(near: Path, far: Path) -> Plan:
    """Two levels: the steps of the first one go on to the second."""
    keep = {"keep_last": 2, "backlog": 2}
    return Plan("ab" * 8, 1, "t" * 16, (Level(str(near), **keep), Level(str(far), every=2, **keep)))


def child(act: Callable[[], object]) -> int:
    """Do it in a child: the signal that ended it, 0 for none."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def check(near: Path, far: Path, reached: dict[Path, dict[int, str]], what: str) -> None:
    """Nothing is visible that is not whole, and nothing is lost that was there: the newest of it stays."""
    for place in (near, far):
        seen = look(place)
        for step in seen:
            assert step in (1, 2, 3, 4), (what, seen)
        newest = max(reached[place], default=0)
        assert max(seen, default=0) >= newest or _is_aside(place, newest), (what, seen, newest)


def _is_aside(place: Path, step: int) -> bool:
    """Only where names cannot be exchanged: the next agent brings it back."""
    return bool(list((place / ".inflight").glob(f"{step:012d}-*.replaced")))


def main(place: Path, scenario: str, kind: str, most: int) -> int:
    """How many kills there were."""
    base = {"exchange": QuickFiles, "two": NoExchange}[kind]
    prepared = place / "prepared"
    prepare(prepared / "root", prepared / "near", prepared / "far", scenario)
    here, kills = place / "now", 0
    count_file = place / "count"

    def lived(n: int) -> int:
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(prepared, here)
        write_plan(here / "root", plan(here / "near", here / "far"))
        switch = KillAt(n)

        def act() -> None:
            run_agent(here / "root", files=interrupted(base, switch), timing=QUICK)
            count_file.write_text(str(switch.count))

        return child(act)

    assert lived(_NEVER) == 0
    wanted = {"near": look(here / "near"), "far": look(here / "far")}
    expected = {
        "replace": ({1: 0, 2: 1}, {2: 1}),
        "more": ({3: 0, 4: 0}, {2: 0, 4: 0}),
        "pins": ({2: 0, 3: 0, 4: 0}, {2: 0, 4: 0}),
    }[scenario]
    assert (wanted["near"], wanted["far"]) == expected, wanted
    # Several threads do not always come to the same number: the last places may not be reached.
    for n in places.some(range(int(count_file.read_text())), most, of=f"agent {scenario} {kind}"):
        what = f"{scenario}, {kind}: killed before operation {n}"
        reached = {
            here / name: DirectoryFar(prepared / name, files=QuickFiles()).steps()
            for name in ("near", "far")
        }
        if lived(n) == 0:
            continue
        kills += 1
        check(here / "near", here / "far", reached, what)
        assert child(lambda: run_agent(here / "root", files=base(), timing=QUICK)) == 0, what
        assert (look(here / "near"), look(here / "far")) == expected, what
        if scenario == "pins":
            pinned = [pinned_steps(here / name) for name in ("near", "far")]
            assert pinned == [{2}, {2}] and not unpinned_marks(here / "root"), (what, pinned)
        left = {
            path.name for name in ("near", "far") for path in (here / name / ".inflight").iterdir()
        }
        assert not {name for name in left if "." in name}, (what, left)
    return kills


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))))
