"""What the ranks of a test do whose nodes keep one another's steps; each function runs in every rank.

`shape` is that of the parity that they keep; "": whole copies.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckpt_core import Checkpointer, CkptError, FlatPart, Level, TorchStore
from ckpt_core.levels import read_status
from ckpt_core.levels.agreed import read_agreed
from ckpt_core.levels.parity.groups import Shape
from ckpt_core.levels.trainer.awaiting import Attempts
from ckpt_core.levels.trainer.joining import read_run
from ckpt_core.store import committed_steps
from tests.levels.trainers import agent_of, processes, until
from tests.multirank.crew import Rank
from tests.multirank.jobs import blank, make_state, options, same

_REACHED_S = 60.0
TOKEN = "token"


def home_of(place: str, node: str | None) -> Path:
    """All that a node has on its disk."""
    assert node is not None
    return Path(place) / node


def level_of(who: Rank, place: str, shape: str = "", **changes: Any) -> Level:
    """The copies of this node on another one, and those of another one here; or parity."""
    os.environ["CKPT_PEER_TOKEN_FILE"] = str(Path(place) / changes.pop("token", TOKEN))
    given: dict[str, Any] = {"parity": shape} if shape else {"peers": 1}
    given |= {"bind": "lo:0", "dir": home_of(place, who.node) / "kept"}
    given["domain"] = changes.pop("domains", {}).get(str(who.rank))
    return Level(**(given | changes))


def open_here(
    who: Rank,
    place: str,
    shape: str = "",
    *,
    met: TorchStore | None = None,
    behind: Sequence[str] = (),
    keep_last: int = 2,
    **changes: Any,
) -> Checkpointer:
    """A root on the disk of this node, and such levels."""
    root, level = home_of(place, who.node) / "root", level_of(who, place, shape, **changes)
    levels = [level, *map(Level, behind)]
    settings = options(keep_last=keep_last, timeout=_REACHED_S)
    return Checkpointer(root, settings, coordination=met or who.meet(), levels=levels)


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


def save_and_reach(
    who: Rank,
    place: str,
    steps: list[int],
    shape: str = "",
    *,
    pins: Sequence[int] = (),
    pause_s: float = 0.0,
    **changes: Any,
) -> dict[str, Any]:
    """Restore, save, and wait each time until this node's copy, or the group's parity, is verified.

    Those of `pins` are pinned once they are there. The agents have so long before the restore.
    """
    name = name_of(shape)
    with open_here(who, place, shape, **changes) as ck:
        time.sleep(pause_s)
        begun = restored(ck, who)
        for step in steps:
            handle = ck.save(step, make_state(who.rank, step), per_rank=["sampler"])
            handle.reached(name).result(_REACHED_S)
            if step in pins:
                ck.pin(step)
        ck.wait(level=name)
        gauge = ck.gauges.levels()[0]
    return {"begun": begun, "url": gauge.url, "newest": gauge.newest}


def _save_four(ck: Checkpointer, who: Rank, name: str) -> None:
    for step in (1, 2, 3, 4):
        handle = ck.save(step, make_state(who.rank, step), per_rank=["sampler"])
        handle.committed.result(_REACHED_S)
    ck.wait(level=name)


def go_back(who: Rank, place: str, shape: str = "") -> list[int]:
    """Save, go back to an older step in the same process, and wait for what is due; go on from there."""
    name = name_of(shape)
    with open_here(who, place, shape, keep_last=4, every=2) as ck:
        _save_four(ck, who, name)
        found = ck.restore(blank(make_state(who.rank, 1)), step=1)
        assert found is not None
        ck.wait(level=name)
        for step in (2, 3):
            ck.save(step, make_state(who.rank, step), per_rank=["sampler"])
        ck.wait(level=name, last=True)
        return list(committed_steps(ck.root))


def go_back_unseen(who: Rank, place: str, shape: str = "") -> bool:
    """As `go_back`, while the agent says nothing for a while: the last save is waited for nevertheless.

    Returns whether the nodes agree on a step that was saved since.
    """
    name = name_of(shape)
    with open_here(who, place, shape, keep_last=4, every=2) as ck:
        _save_four(ck, who, name)
        agent = agent_of(ck.root)
        assert agent is not None
        os.kill(agent, signal.SIGSTOP)
        threading.Timer(1.0, lambda: os.kill(agent, signal.SIGCONT)).start()
        assert ck.restore(blank(make_state(who.rank, 1)), step=1) is not None
        for step in (2, 3):
            ck.save(step, make_state(who.rank, step), per_rank=["sampler"])
        ck.wait(level=name, last=True)
        status, saved = read_status(ck.root), Attempts(ck.root).of([3])[3]
        assert status is not None and status.levels[0].steps.get(3) == saved
        for step in (4, 6, 8, 10):
            handle = ck.save(step, make_state(who.rank, step), per_rank=["sampler"])
            handle.reached(name).result(_REACHED_S)
        run = read_run(ck.root)
        agreed = None if run is None else read_agreed(ck.root, run)
        return agreed is not None and max(step for step, _ in agreed.kept) > 4


def go_on_cut(who: Rank, place: str, steps: list[int], shape: str = "", *, cut: bool) -> int:
    """As `save_and_reach`, with nothing private; a state of which each rank has all, or a run."""
    size = 60_000
    first, behind = (size * n // who.world_size for n in (who.rank, who.rank + 1))

    def state_of(step: int) -> dict[str, Any]:
        whole = torch.arange(size, dtype=torch.float32) + step
        return {"w": FlatPart(whole[first:behind].clone(), (size,), first) if cut else whole}

    with open_here(who, place, shape) as ck:
        state = state_of(0)
        found = ck.restore(state)
        begun = 0 if found is None else found.step
        got, wanted = ((one["w"].tensor if cut else one["w"]) for one in (state, state_of(begun)))
        assert torch.equal(got, wanted), f"step {begun} is not as it was saved"
        for step in steps:
            ck.save(step, state_of(step)).reached(name_of(shape)).result(_REACHED_S)
        ck.wait(level=name_of(shape))
    return begun


def save_and_end(who: Rank, place: str, steps: list[int], shape: str = "", *, behind: str) -> Any:
    """The newest step of each level while this rank is there, once the last one was waited for."""
    name = name_of(shape)
    root, level = home_of(place, who.node) / "root", level_of(who, place, shape, every=10)
    levels = [level, Level(behind, every=10)]
    settings = options(keep_last=2, timeout=_REACHED_S)
    with Checkpointer(root, settings, coordination=who.meet(), levels=levels) as ck:
        for step in steps:
            ck.save(step, make_state(who.rank, step), per_rank=["sampler"])
        ck.wait(level=name, last=True)
        ck.wait(level=behind, last=True)
        return [gauge.newest for gauge in ck.gauges.levels()]


def name_of(shape: str) -> str:
    """What `reached` calls the level."""
    return "parity" if shape else "peers"


def fall_behind(
    who: Rank, place: str, sleepers: list[int], steps: int, shape: str = ""
) -> dict[str, Any]:
    """Have a step with all nodes and copies, and save on while the agents of some nodes are stopped."""
    with open_here(who, place, shape) as ck:
        for step in (1, 2, 3):
            handle = ck.save(step, make_state(who.rank, step), per_rank=["sampler"])
            handle.reached(name_of(shape)).result(_REACHED_S)
        until(lambda: _has_what_is_sought(ck.root), "the agent to say so in its status")
        (Path(place) / f"reached-{who.rank}").touch()
        agent = agent_of(ck.root)
        if who.rank in sleepers and agent is not None:
            # Before there is another step that it could take, and not before the others have these.
            until(lambda: len([*Path(place).glob("reached-*")]) == who.world_size)
            os.kill(agent, signal.SIGSTOP)
        for step in range(4, 4 + steps):
            ck.save(step, make_state(who.rank, step), per_rank=["sampler"]).committed.result(60)
        run = read_run(ck.root)
        assert run is not None
        agreed = read_agreed(ck.root, run)
        assert agreed is not None
        return {"kept": agreed.kept, "sought": agreed.sought, "steps": committed_steps(ck.root)}


def _has_what_is_sought(root: Path) -> bool:
    """Whether the agent has said all that the next vote needs: a step has reached before it is told so."""
    run, status = read_run(root), read_status(root)
    agreed = None if run is None else read_agreed(root, run)
    if agreed is None or agreed.sought is None or status is None:
        return False
    step, attempt = agreed.sought
    seen = status.levels[0]
    return tuple(seen.keeps) == agreed.order and seen.steps.get(step) == attempt


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


def opens(who: Rank, place: str, each: list[dict[str, Any]], shape: str = "") -> str:
    """Each rank with a level of its own."""
    try:
        open_here(who, place, shape, **each[who.rank]).close()
    except CkptError as exc:
        return f"{type(exc).__name__}: {exc}"
    return "opened"


@dataclass(frozen=True)
class Loss:
    """Nodes that are lost, and how.

    Attributes:
        nodes: names of all, in the order of ranks.
        victims: ranks whose nodes are lost, together.
        seed: for the moment.
        early: from their beginning on, while nodes are filled; else once all is whole again.
        waits: each save waits for the copies (the parity) of the one before; else the first alone does.
        pause_s: from one save to the next, at most.
    """

    nodes: list[str]
    victims: list[int]
    seed: int
    early: bool
    waits: bool
    pause_s: float = 0.0


def train_until_lost(who: Rank, place: str, loss: dict[str, Any], shape: str = "") -> None:
    """Go on, save step after step, and note what has reached its peers; at some moment nodes are lost.

    With them end all ranks, as their launcher would see to. What each has noted is all that is left of it:
    where no save waits that is what has been agreed on, or, in one group, what is known to have its parity.
    """
    told = Loss(**loss)
    chance, name = random.Random(f"{told.seed} {who.rank}"), name_of(shape)
    (Path(place) / f"rank-{who.rank}.pid").write_text(str(os.getpid()))
    loses = who.rank == told.victims[0]
    loser = _loser(who, place, told) if loses else -1
    met = who.meet()  # from here on all have said who they are
    if loses and told.early:
        _lose_after(loser, random.Random(told.seed).uniform(0.0, 2.0))
    with open_here(who, place, shape, met=met) as ck:
        begun = step = restored(ck, who)
        _note(place, f"begun-{who.rank}", step)
        ck.wait(level=name)
        asked: dict[int, Future[None]] = {}
        while True:
            step += 1
            handle = ck.save(step, make_state(who.rank, step), per_rank=["sampler"])
            if loses and not told.early and step == begun + 2:
                handle.committed.result(_REACHED_S)  # so all ranks have noted the step before
                _lose_after(loser, random.Random(told.seed).uniform(0.0, 1.5))
            asked[step] = handle.reached(name)
            if told.waits or step == begun + 1:
                asked[step].result(_REACHED_S)
            handle.committed.result(_REACHED_S)
            one_group = bool(shape) and Shape.parse(shape).nodes == who.world_size
            if told.waits or step == begun + 1 or one_group:
                _note(place, f"reached-{who.rank}", _newest(asked))
            else:
                _note(place, f"reached-{who.rank}", max(agreed_of(ck), begun))
            time.sleep(chance.uniform(0.0, told.pause_s))


def _newest(asked: dict[int, Future[None]]) -> int:
    """The newest step that is known to have reached, the first one having done so."""
    done = [step for step, one in asked.items() if one.done() and one.exception() is None]
    return max(done)


def agreed_of(ck: Checkpointer) -> int:
    """The newest step that this node knows to be with all nodes and at all copies; 0: none."""
    run = read_run(ck.root)
    agreed = None if run is None else read_agreed(ck.root, run)
    return 0 if agreed is None else max((step for step, _ in agreed.kept), default=0)


def _note(place: str, name: str, step: int) -> None:
    fresh = Path(place) / f".{name}"
    fresh.write_text(str(step))
    fresh.replace(Path(place) / name)


def _loser(who: Rank, place: str, loss: Loss) -> int:
    """A process that waits for a number of seconds, on the pipe that this returns, and loses the nodes then.

    Called before there are threads: it is a fork.
    """
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            os.close(write)
            if seconds := os.read(read, 100):
                _lose(who, place, loss, float(seconds))
        finally:
            os._exit(0)
    os.close(read)
    return write


def _lose_after(loser: int, seconds: float) -> None:
    os.write(loser, str(seconds).encode())


def _lose(who: Rank, place: str, loss: Loss, seconds: float) -> None:
    time.sleep(seconds)
    homes = [home_of(place, loss.nodes[rank]) for rank in loss.victims]
    # What runs on these nodes ends with them, and nothing of their disks is left.
    for rank in loss.victims:
        _kill(place, rank)
    for home in homes:
        for pid in processes(home / "root"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for home in homes:
        while home.exists():
            shutil.rmtree(home, ignore_errors=True)
    for rank in range(who.world_size):
        _kill(place, rank)


def _kill(place: str, rank: int) -> None:
    with contextlib.suppress(ProcessLookupError, OSError, ValueError):
        os.kill(int((Path(place) / f"rank-{rank}.pid").read_text()), signal.SIGKILL)
