"""What the ranks of a test do whose nodes keep parity of one another's steps."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

from ckpt_core import Checkpointer, CkptError, Level, TorchStore
from tests.levels.trainers import agent_of, processes
from tests.multirank.crew import Rank
from tests.multirank.jobs import make_state, options
from tests.multirank.peer_jobs import TOKEN, home_of, restored

_REACHED_S = 60


def open_here(
    who: Rank, place: str, shape: str, met: TorchStore | None = None, **changes: Any
) -> Checkpointer:
    """A root and parity on the disk of this node."""
    os.environ["CKPT_PEER_TOKEN_FILE"] = str(Path(place) / TOKEN)
    home = home_of(place, who.node)
    given: dict[str, Any] = {"parity": shape, "bind": "lo:0", "dir": home / "kept"}
    levels: list[Any] = [Level(**(given | changes.pop("level", {})))]
    levels += [Level(url) for url in changes.pop("behind", [])]
    keep = changes.pop("keep_last", 2)
    settings = options(keep_last=keep)
    return Checkpointer(home / "root", settings, coordination=met or who.meet(), levels=levels)


def save_and_reach(
    who: Rank, place: str, shape: str, steps: list[int], **changes: Any
) -> dict[str, Any]:
    """Restore, save, and wait each time until the parity is verified at all nodes of the group."""
    with open_here(who, place, shape, **changes) as ck:
        begun = restored(ck, who)
        for step in steps:
            handle = ck.save(step, make_state(who.rank, step), per_rank=["sampler"])
            handle.reached("parity").result(_REACHED_S)
        ck.wait(level="parity")
        gauge = ck.gauges.levels()[0]
    return {"begun": begun, "url": gauge.url, "newest": gauge.newest}


def save_fast(who: Rank, place: str, shape: str, steps: list[int], seed: int) -> int:
    """Save without waiting for parity, one step in the root; now and then the agent is killed.

    The last step gets its parity.
    """
    chance = random.Random(f"{seed} {who.rank}")
    root = home_of(place, who.node) / "root"
    with open_here(who, place, shape, keep_last=1) as ck:
        begun = restored(ck, who)
        for step in steps:
            ck.save(step, make_state(who.rank, step), per_rank=["sampler"]).committed.result(60)
            if chance.random() < 0.1 and (pid := agent_of(root)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        ck.wait(level="parity")
    return begun


def opens(who: Rank, place: str, shape: str, each: list[dict[str, Any]]) -> str:
    """Each rank with a level of its own."""
    try:
        open_here(who, place, shape, level=each[who.rank]).close()
    except CkptError as exc:
        return f"{type(exc).__name__}: {exc}"
    return "opened"


def train_until_lost(
    who: Rank, place: str, shape: str, victims: list[int], seed: int, early: bool, pause_s: float
) -> None:
    """Go on, save step after step without waiting, and note what has reached; at some moment nodes are lost.

    With them end all ranks, as their launcher would see to. What each has noted is all that is left of it.

    Args:
        early: they are lost at the beginning, while others are filled; else once the group is whole again.
        pause_s: from one save to the next, at most.
    """
    (Path(place) / f"rank-{who.rank}.pid").write_text(str(os.getpid()))
    met = who.meet()  # from here on all have said who they are
    if who.rank == victims[0] and early:
        _lose_after(who, place, victims, random.Random(seed).uniform(0.0, 2.0))
    with open_here(who, place, shape, met) as ck:
        step = restored(ck, who)
        note(place, f"begun-{who.rank}", step)
        ck.wait(level="parity")
        chance, asked, lost = random.Random(f"{seed} {who.rank}"), [], False
        while True:
            step += 1
            handle = ck.save(step, make_state(who.rank, step), per_rank=["sampler"])
            asked.append((step, handle.reached("parity")))
            handle.committed.result(_REACHED_S)
            if (
                who.rank == victims[0]
                and not early
                and has_reached(place, who.world_size)
                and not lost
            ):
                lost = True
                _lose_after(who, place, victims, random.Random(seed).uniform(0.0, 2.5))
            time.sleep(chance.uniform(0.0, pause_s))
            for done, future in [one for one in asked if one[1].done()]:
                asked.remove((done, future))
                if future.exception() is None:
                    note(place, f"reached-{who.rank}", done)


def has_reached(place: str, ranks: int) -> bool:
    """Whether all have noted that something has."""
    return all((Path(place) / f"reached-{rank}").exists() for rank in range(ranks))


def note(place: str, name: str, step: int) -> None:
    """Keep a number beside the nodes."""
    fresh = Path(place) / f".{name}"
    fresh.write_text(str(step))
    fresh.replace(Path(place) / name)


def _lose_after(who: Rank, place: str, victims: list[int], seconds: float) -> None:
    arguments = (who, place, victims, seconds)
    threading.Thread(target=_lose, args=arguments, daemon=True).start()


def _lose(who: Rank, place: str, victims: list[int], seconds: float) -> None:
    """All that runs on the lost nodes ends, and with it the job; the test takes away their disks."""
    time.sleep(seconds)
    nodes = (Path(place) / "nodes").read_text().split()
    for victim in victims:
        for pid in processes(Path(place) / nodes[victim] / "root"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    others = [rank for rank in range(who.world_size) if rank != who.rank]
    for rank in [*sorted(others, key=lambda rank: rank not in victims), who.rank]:
        with contextlib.suppress(ProcessLookupError, OSError, ValueError):
            os.kill(int((Path(place) / f"rank-{rank}.pid").read_text()), signal.SIGKILL)
