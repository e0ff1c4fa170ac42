"""What the ranks of a test do whose nodes keep one another's steps; each function runs in every rank."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from ckpt_core import Checkpointer, CkptError, Level, TorchStore
from ckpt_core.levels.agreed import read_agreed
from ckpt_core.levels.trainer.joining import read_run
from ckpt_core.store import committed_steps
from tests.levels.trainers import agent_of, processes
from tests.multirank.crew import Rank
from tests.multirank.jobs import blank, make_state, options, same

_REACHED_S = 60
TOKEN = "token"


def home_of(place: str, node: str | None) -> Path:
    """All that a node has on its disk."""
    assert node is not None
    return Path(place) / node


def level_of(who: Rank, place: str, **changes: Any) -> Level:
    """The copies of this node on another one, and those of another one here."""
    os.environ["CKPT_PEER_TOKEN_FILE"] = str(Path(place) / changes.pop("token", TOKEN))
    given: dict[str, Any] = {"peers": 1, "bind": "lo:0", "dir": home_of(place, who.node) / "copies"}
    return Level(**(given | changes))


def open_here(who: Rank, place: str, met: TorchStore | None = None, **changes: Any) -> Checkpointer:
    """A root on the disk of this node."""
    root, level = home_of(place, who.node) / "root", level_of(who, place, **changes)
    return Checkpointer(root, options(), coordination=met or who.meet(), levels=[level])


def restored(ck: Checkpointer, who: Rank) -> int:
    """Go on from the newest step; 0: there is none."""
    state = blank(make_state(who.rank, 1))
    found = ck.restore(state)
    if found is None:
        return 0
    state["step"] = found.state["step"]
    state["sampler"]["seen"] = found.state["sampler"]["seen"]
    assert same(state, make_state(who.rank, found.step)), (
        f"step {found.step} is not as it was saved"
    )
    return found.step


def save_and_reach(who: Rank, place: str, steps: list[int], **changes: Any) -> dict[str, Any]:
    """Restore, save, and wait each time until this node's copy is verified."""
    with open_here(who, place, **changes) as ck:
        begun = restored(ck, who)
        for step in steps:
            handle = ck.save(step, make_state(who.rank, step), per_rank=["sampler"])
            handle.reached("peers").result(_REACHED_S)
        ck.wait(level="peers")
        (gauge,) = ck.gauges.levels()
    return {"begun": begun, "url": gauge.url}


def fall_behind(who: Rank, place: str, sleeper: int, steps: int) -> dict[str, Any]:
    """Have a step with all nodes and copies, and save on while the agent of one node is stopped."""
    with open_here(who, place) as ck:
        for step in (1, 2, 3):
            handle = ck.save(step, make_state(who.rank, step), per_rank=["sampler"])
            handle.reached("peers").result(_REACHED_S)
        for step in range(4, 4 + steps):
            ck.save(step, make_state(who.rank, step), per_rank=["sampler"]).committed.result(60)
            agent = agent_of(ck.root)
            if step == 4 and who.rank == sleeper and agent is not None:
                os.kill(agent, signal.SIGSTOP)
        run = read_run(ck.root)
        assert run is not None
        agreed = read_agreed(ck.root, run)
        assert agreed is not None
        return {"kept": agreed.kept, "sought": agreed.sought, "steps": committed_steps(ck.root)}


def opens(who: Rank, place: str, each: list[dict[str, Any]]) -> str:
    """Each rank with a level of its own."""
    try:
        open_here(who, place, **each[who.rank]).close()
    except CkptError as exc:
        return f"{type(exc).__name__}: {exc}"
    return "opened"


def train_until_lost(
    who: Rank, place: str, victim: int, seed: int, early: bool, waits: bool = True
) -> None:
    """Go on, save step after step, and note what has reached its peers; at some moment a node is lost.

    With it end all ranks, as their launcher would see to. What each has noted is all that is left of it.

    Args:
        early: it is lost from its beginning on, while it is filled; else once the group is whole again.
        waits: each save for the copies of the one before; else the first alone does, and only what has been
            agreed on is noted.
    """
    (Path(place) / f"rank-{who.rank}.pid").write_text(str(os.getpid()))
    loser = _loser(who, place) if who.rank == victim else -1
    met = who.meet()  # from here on all have said who they are
    if who.rank == victim and early:
        _lose_after(loser, random.Random(seed).uniform(0.0, 2.0))
    with open_here(who, place, met) as ck:
        begun = step = restored(ck, who)
        _note(place, f"begun-{who.rank}", step)
        ck.wait(level="peers")
        while True:
            step += 1
            handle = ck.save(step, make_state(who.rank, step), per_rank=["sampler"])
            if who.rank == victim and not early and step == begun + 2:
                handle.committed.result(_REACHED_S)  # so all ranks have noted the step before
                _lose_after(loser, random.Random(seed).uniform(0.0, 1.5))
            if waits or step == begun + 1:
                handle.reached("peers").result(_REACHED_S)
                _note(place, f"reached-{who.rank}", step)
            else:
                handle.committed.result(_REACHED_S)
                _note(place, f"reached-{who.rank}", max(agreed_of(ck), begun))


def agreed_of(ck: Checkpointer) -> int:
    """The newest step that this node knows to be with all nodes and at all copies; 0: none."""
    run = read_run(ck.root)
    agreed = None if run is None else read_agreed(ck.root, run)
    return 0 if agreed is None else max((step for step, _ in agreed.kept), default=0)


def _note(place: str, name: str, step: int) -> None:
    fresh = Path(place) / f".{name}"
    fresh.write_text(str(step))
    fresh.replace(Path(place) / name)


def _loser(who: Rank, place: str) -> int:
    """A process that waits for a number of seconds, on the pipe that this returns, and loses the node then.

    Called before there are threads: it is a fork.
    """
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            os.close(write)
            if seconds := os.read(read, 100):
                _lose(who, place, float(seconds))
        finally:
            os._exit(0)
    os.close(read)
    return write


def _lose_after(loser: int, seconds: float) -> None:
    os.write(loser, str(seconds).encode())


def _lose(who: Rank, place: str, seconds: float) -> None:
    time.sleep(seconds)
    home = home_of(place, who.node)
    # What runs on the node ends with it, and nothing of its disk is left.
    _kill(place, who.rank)
    for pid in processes(home / "root"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while home.exists():
        shutil.rmtree(home, ignore_errors=True)
    for rank in range(who.world_size):
        _kill(place, rank)


def _kill(place: str, rank: int) -> None:
    with contextlib.suppress(ProcessLookupError, OSError, ValueError):
        os.kill(int((Path(place) / f"rank-{rank}.pid").read_text()), signal.SIGKILL)
