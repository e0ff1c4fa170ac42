"""What ranks do that are to die, and what those do that come after them. Each function runs in every rank."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckpt_deepspeed
from ckpt_core import Checkpointer, TorchStore, verify
from ckpt_core.save import named_files as files_save
from ckpt_core.system.files import Files
from ckpt_deepspeed import CkptCoreEngine, roots
from tests.crash.layers import CHANGES, KillAt, NoExchange, hooked
from tests.crash.promises import QuickFiles
from tests.integrations.deepspeed.training import digest, engine, train

STEPS = 6
TIMEOUT_S = 8.0
SMALL = {"chunk_bytes": 4096, "eager_leaf_bytes": 256, "writers": 2, "timeout": TIMEOUT_S}
"""Small chunks, so that a small state is several of them, and next to nothing is copied at once."""

CALLS: dict[str, tuple[Any, str]] = {
    "pickling": (files_save, "plan_zip"),
    "copying": (files_save, "stage_items"),
    "sealing": (files_save.FilesSave, "seal"),
    "voting": (TorchStore, "agree"),
    "settling": (TorchStore, "settle"),
}
"""Moments that are no file operation: the n-th call of a function."""


class SlowFiles(QuickFiles):
    """A disk so slow that a tag is still being written when the next one begins."""

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        time.sleep(0.003)
        super().pwrite(fd, data, offset)


class SlowNoExchange(NoExchange, SlowFiles):
    """The same, where a name cannot be exchanged."""


class Moment:
    """Kills this process at one operation of a save, once armed.

    Args:
        of: name of an operation of `Files`, or a key of CALLS.
        n: which one of them.
        point: "before" it, "after" it, or "torn".
        about: it counts only if one of its paths has this in it.
    """

    def __init__(self, of: str, n: int = 0, point: str = "before", about: str = "") -> None:
        self._armed = threading.Event()
        self._of, self._n, self._point, self._about = of, n, point, about
        names = CHANGES if of == "any" else (of,)
        self._kill = KillAt(n, point=point, names=names)
        if of in CALLS:
            self._wrap(*CALLS[of])

    def arm(self) -> None:
        """From now on operations count."""
        self._armed.set()

    def files(self, base: type[Files]) -> Files:
        """Files that end this process."""
        return hooked(base, self._hook)

    def _hook(self, name: str, args: tuple[Any, ...], act: Callable[[], Any]) -> Any:
        about = any(self._about in str(arg) for arg in args if isinstance(arg, Path))
        if self._of in CALLS or not self._armed.is_set() or (self._about and not about):
            return act()
        return self._kill(name, args, act)

    def _wrap(self, owner: Any, name: str) -> None:
        real, lock, count = getattr(owner, name), threading.Lock(), iter(range(1000))

        @functools.wraps(real)
        def dying(*args: Any, **options: Any) -> Any:
            due = False
            if self._armed.is_set():
                with lock:
                    due = next(count) == self._n
            if due and self._point == "before":
                die()
            found = real(*args, **options)
            if due:
                die()
            return found

        setattr(owner, name, dying)


def die() -> None:
    """kill -9 of this very process."""
    os.kill(os.getpid(), signal.SIGKILL)


def save_by(files: Files) -> None:
    """Let everything that is saved from now on go through this file layer."""
    roots.Checkpointer = functools.partial(Checkpointer, files=files)  # type: ignore[misc,assignment]


def acknowledging(root: Path) -> None:
    """Each rank notes beside the root which step it was told is durable, as soon as it is told."""
    log = os.open(f"{root}.told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    real = CkptCoreEngine.seal

    def seal(self: CkptCoreEngine) -> Any:
        handle = real(self)

        def note(committed: Any) -> None:
            if committed.exception() is None:
                os.write(log, f"{handle.step}\n".encode())

        handle.committed.add_done_callback(note)
        return handle

    CkptCoreEngine.seal = seal  # type: ignore[method-assign]


def client_of(step: int) -> dict[str, Any]:
    """The client_state of a step: large enough for some chunks."""
    return {"step": step, "noise": torch.full((3000,), float(step))}


def killed(
    root: str,
    moments: dict[str, dict[str, Any]],
    at: int = 3,
    zero: int = 2,
    tag: str | None = None,
    exchange: bool = True,
    alone: bool = False,
) -> str:
    """Train and save at each step, two tags in flight; from the save of step `at` on, ranks die.

    Args:
        moments: rank -> arguments of Moment; {"of": "training"}: between two saves.
        alone: nothing older is in flight when that save begins.
        tag: saved again and again, instead of a new one at each step.
        exchange: whether the filesystem can exchange two names.
    """
    how = moments.get(str(dist.get_rank()))
    base = SlowFiles if exchange else SlowNoExchange
    moment = None if how is None or how["of"] == "training" else Moment(**how)
    save_by(base() if moment is None else moment.files(base))
    acknowledging(Path(root))
    made = engine(zero, "bf16", **SMALL)
    for step in range(1, STEPS + 1):
        train(made, step - 1, step)
        if step == at and alone:
            ckpt_deepspeed.wait(root)
            dist.barrier()
        if step == at and moment is not None:
            moment.arm()
        elif step == at and how is not None:
            die()
        made.save_checkpoint(root, tag=tag, client_state=client_of(step))
        if "STARTED" in os.environ:
            Path(os.environ["STARTED"]).touch()
    ckpt_deepspeed.close()
    return "lives"


def undisturbed(zero: int) -> str:
    """How a run ends that nothing happens to."""
    made = engine(zero, "bf16")
    train(made, 0, STEPS)
    return digest(made)


def resumed(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run jobs again that were killed, each to its end."""
    return [_resumed(**case) for case in cases]


def _resumed(root: str, zero: int, tag: str | None) -> dict[str, Any]:
    made = engine(zero, "bf16", seed=7, **SMALL)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        path, client = made.load_checkpoint(root)
    begin = 0 if path is None else made.global_steps
    right = True
    if path is None:
        made = engine(zero, "bf16", **SMALL)
    else:
        expected = client_of(begin)
        right = client["step"] == begin and torch.equal(client["noise"], expected["noise"])
    for step in range(begin + 1, STEPS + 1):
        train(made, step - 1, step)
        made.save_checkpoint(root, tag=tag, client_state=client_of(step))
    ckpt_deepspeed.close()
    return {
        "begin": begin,
        "end": digest(made),
        "right": right,
        "told": [str(one.message) for one in told if root in str(one.message)],
        "latest": (Path(root) / "latest").read_text(),
        "left": sorted(path.name for path in Path(root).glob(".inflight/*")),
    }


def looked_at(roots: list[str]) -> list[dict[str, Any]]:
    """What is there, without this package: tags, `latest`, and what torch.load makes of its files.

    Called in one process.
    """
    return [_looked_at(Path(root)) for root in roots]


def _looked_at(root: Path) -> dict[str, Any]:
    tags = [path for path in root.iterdir() if path.is_dir() and path.name[0] != "."]
    latest = root / "latest"
    told = Path(f"{root}.told")
    found: dict[str, Any] = {
        "whole": {path.name: verify(path).ok for path in tags},
        "latest": latest.read_text() if latest.exists() else None,
        "told": [int(step) for step in told.read_text().split()] if told.exists() else [],
        "steps": [],
    }
    if found["latest"] in found["whole"]:
        for path in sorted((root / found["latest"]).glob("*.pt")):
            state = torch.load(path, weights_only=False)
            found["steps"] += [state["global_steps"]] if "global_steps" in state else []
    return found
