"""What the ranks of a test do with directories of files; each function runs in every rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch

from ckpt_core import Checkpointer, CkptError, verify
from ckpt_core.system.files import Files
from tests.crash.layers import CHANGES, KillAt, hooked
from tests.crash.promises import QuickFiles
from tests.multirank.crew import Rank
from tests.multirank.jobs import filling, gated, make_state, options, root_of, same

POINTER = "latest"


def files_of(rank: int, step: int) -> dict[str, Any]:
    """The files that a rank adds: rank 0 one more, which all ranks share; rank 2 none."""
    state = make_state(rank, step)
    found = {f"optim/zero_pp_rank_{rank}.pt": state["sampler"], f"rank_{rank}.pt": state}
    if rank == 2:
        found = {}
    return found | ({"model.pt": state["model"]} if rank == 0 else {})


def start(ck: Checkpointer, who: Rank, step: int, directory: str) -> Any:
    """Add this rank's files and seal."""
    save = ck.begin_files(step, directory, pointer=POINTER)
    for name, tree in files_of(who.rank, step).items():
        save.add(name, tree)
    return save.seal()


def outcome_of(handle: Any) -> str:
    """The name of the directory, or what went wrong."""
    try:
        return str(handle.committed.result(60).name)
    except CkptError as exc:
        return f"{type(exc).__name__}: {exc}"


def check(root: Path, directory: str, ranks: list[int], step: int) -> None:
    """The directory is whole and holds the files of these ranks."""
    path = root / directory
    report = verify(path)
    assert report.ok, report
    wanted = {name: tree for rank in ranks for name, tree in files_of(rank, step).items()}
    there = {str(file.relative_to(path)) for file in path.rglob("*.pt")}
    assert there == set(wanted)
    for name, tree in wanted.items():
        assert same(torch.load(path / name, weights_only=True), tree), name


def save_directories(who: Rank, root: str, directories: list[str]) -> list[str]:
    """Save them one after the other, at most two in flight."""
    handles = []
    with Checkpointer(root_of(who, root), options(), coordination=who.meet()) as ck:
        for step, name in enumerate(directories):
            handles.append(start(ck, who, step, name))
            ck.wait_staged()
    return [outcome_of(handle) for handle in handles]


def killed_at(who: Rank, root: str, victim: int, n: int, again: bool) -> dict[str, Any]:
    """Commit a directory together; then the victim dies at its n-th file operation of the next save."""
    kill = KillAt(n, point="after") if who.rank == victim else None
    armed = threading.Event()

    def hook(name: str, args: tuple[Any, ...], act: Any) -> Any:
        return kill(name, args, act) if kill is not None and armed.is_set() else act()

    files = hooked(QuickFiles, hook, CHANGES)
    ck = Checkpointer(
        root_of(who, root), options(on_error="warn"), coordination=who.meet(), files=files
    )
    start(ck, who, 1, "tag1").committed.result(60)
    armed.set()
    outcome = outcome_of(start(ck, who, 2, "tag1" if again else "tag2"))
    armed.clear()
    ck.close()
    return {"outcome": outcome, "operations": 0 if kill is None else kill.count}


def dies_after_its_vote(who: Rank, root: str, victim: int) -> str:
    """The victim dies as soon as its vote for the second save is in."""
    coordination: Any = who.meet()
    agree = coordination.agree

    def agree_and_die(attempt_id: str, step: int, *more: Any) -> Any:
        found = agree(attempt_id, step, *more)
        if (who.rank, step) == (victim, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    coordination.agree = agree_and_die
    ck = Checkpointer(root, options(on_error="warn"), coordination=coordination)
    start(ck, who, 1, "tag1").committed.result(60)
    outcome = outcome_of(start(ck, who, 2, "tag2"))
    ck.close()
    return outcome


def full_disk(who: Rank, root: str) -> list[str]:
    """Rank 1 cannot write the second save; the others fail with it, and the third one works."""
    broken = threading.Event()
    files = filling(broken)
    outcomes = []
    with Checkpointer(root, options(on_error="warn"), coordination=who.meet(), files=files) as ck:
        for step in (1, 2, 3):
            if who.rank == 1 and step == 2:
                broken.set()
            outcomes.append(outcome_of(start(ck, who, step, "tag")))
            broken.clear()
    return outcomes


def opens_late(who: Rank, root: str, form: str) -> list[str]:
    """Rank 0 cannot write the second save; rank 1 opens its files when the directory is gone."""
    broken = threading.Event()
    opening = Path(root).with_name("opening")

    def hook(name: str, args: tuple[Any, ...], act: Any) -> Any:
        if broken.is_set() and who.rank == 0 and name == "pwrite":
            while not opening.exists():
                time.sleep(0.001)
            raise OSError(28, os.strerror(28), "disk")
        if broken.is_set() and who.rank == 1 and name == "create":
            opening.touch()
            while args[0].parent.exists():
                time.sleep(0.001)
        return act()

    files = hooked(Files, hook, CHANGES)
    outcomes = []
    with Checkpointer(root, options(on_error="warn"), coordination=who.meet(), files=files) as ck:
        for step in (1, 2, 3):
            if step == 2:
                broken.set()
            if form == "step":
                handle = ck.save(step, make_state(who.rank, step), per_rank=["sampler"])
            else:
                handle = start(ck, who, step, "tag")
            outcomes.append(outcome_of(handle))
            broken.clear()
    return outcomes


class Lenient(Files):
    """A filesystem on which two hosts may both be told that they have made a new file."""

    def create(self, path: Path, *, direct: bool = False) -> int:
        try:
            return super().create(path, direct=direct)
        except FileExistsError:
            return self.open_write(path, direct=direct)


def same_name(who: Rank, root: str, lenient: bool = False) -> list[str]:
    """All ranks add the same name; then each its own."""
    outcomes = []
    files = Lenient() if lenient else Files()
    with Checkpointer(root, options(on_error="warn"), coordination=who.meet(), files=files) as ck:
        for step in (1, 2):
            save = ck.begin_files(step, f"tag{step}", pointer=POINTER)
            save.add("mine.pt" if step == 1 else f"rank_{who.rank}.pt", torch.ones(10_000))
            outcomes.append(outcome_of(save.seal()))
    return outcomes


def other_directory(who: Rank, root: str) -> list[str]:
    """Rank 1 means another directory than rank 0; then the same."""
    outcomes = []
    with Checkpointer(root, options(on_error="warn"), coordination=who.meet()) as ck:
        for step in (1, 2):
            name = f"tag{step}{'x' if (who.rank, step) == (1, 1) else ''}"
            outcomes.append(outcome_of(start(ck, who, step, name)))
    return outcomes


def gives_up(who: Rank, root: str) -> list[str]:
    """Rank 1 aborts, then cannot save what it adds and aborts; then all is well."""
    outcomes = []
    with Checkpointer(root, options(on_error="warn"), coordination=who.meet()) as ck:
        for step in (1, 2, 3):
            save = ck.begin_files(step, "tag", pointer=POINTER)
            try:
                odd = threading.Lock() if (who.rank, step) == (1, 2) else 0
                save.add(f"rank_{who.rank}.pt", {"w": torch.ones(10_000), "odd": odd})
                if (who.rank, step) == (1, 1):
                    raise KeyboardInterrupt
                outcomes.append(outcome_of(save.seal()))
            except (CkptError, KeyboardInterrupt) as exc:
                save.abort()
                outcomes.append(type(exc).__name__)
    return outcomes


def raises_and_gives_up(who: Rank, root: str) -> list[str]:
    """Rank 1 raises to its caller and says so as it aborts; nothing of it is raised again, on any rank."""
    outcomes = []
    with Checkpointer(root, options(), coordination=who.meet()) as ck:
        for step in (1, 2):
            save = ck.begin_files(step, "tag", pointer=POINTER)
            save.add(f"rank_{who.rank}.pt", torch.ones(10_000) * step)
            if (who.rank, step) == (1, 1):
                save.abort(ValueError("of the caller"))
                outcomes.append("ValueError")
                continue
            outcomes.append(outcome_of(save.seal()))
    return outcomes


def slow_rank(who: Rank, root: str, gate: str) -> list[bool]:
    """The last rank writes nothing until the others have trained on: nobody waits for it meanwhile."""
    files = gated(who, gate)
    with Checkpointer(root, options(in_flight=2), coordination=who.meet(), files=files) as ck:
        handles = []
        for step in (1, 2):
            handles.append(start(ck, who, step, f"tag{step}"))
            ck.wait_staged()
        pending = [not handle.committed.done() for handle in handles]
        pointed = (Path(root) / POINTER).exists()
        if who.rank == 0:
            Path(gate).touch()
        for handle in handles:
            handle.committed.result(60)
    return [*pending, pointed]


def publishes_the_second_first(who: Rank, root: str) -> list[str]:
    """Two saves are in flight, and the ranks come to the commit of the later one first."""
    coordination: Any = who.meet()
    agree = coordination.agree

    def agree_late(attempt_id: str, step: int, *more: Any) -> Any:
        found = agree(attempt_id, step, *more)
        while step == 1 and not (Path(root) / "tag2").exists():
            time.sleep(0.001)
        return found

    coordination.agree = agree_late
    with Checkpointer(root, options(in_flight=2), coordination=coordination) as ck:
        handles = []
        for step in (1, 2):
            handles.append(start(ck, who, step, f"tag{step}"))
            ck.wait_staged()
        return [outcome_of(handle) for handle in handles]
