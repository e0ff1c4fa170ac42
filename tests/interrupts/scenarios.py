"""What is interrupted, and what must hold after: the run goes on with the same Checkpointer."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import ckpt_core
from ckpt_core import Checkpointer, CkptError, ConfigError, Options
from ckpt_core.save.layerwise import LayerwiseSave
from ckpt_core.save.named_files import FilesSave
from ckpt_core.save.open_save import OpenSave
from ckpt_core.types import step_dir_name
from tests.crash.promises import QuickFiles
from tests.interrupts.trap import Boom, Trap

SOON_S = 60.0
"""Far below `timeout`: whatever waits for a place or memory that has leaked takes longer."""

LAZY, EAGER = 3, 2

KEPT = 2
"""So many steps, as `keep_last` says."""

SIZES = 5
"""Of states by which a run is checked: all are larger than that which is struck."""


def options(**changes: Any) -> Options:
    given = {
        "chunk_bytes": 4096,
        "eager_leaf_bytes": 256,
        "staging_bytes": "256KiB",
        "writers": 1,
        "readers": 1,
        "keep_last": KEPT,
        "timeout": 600.0,
    }
    return Options(**(given | changes))


@dataclass
class Run:
    """A training run in small: its tensors change from step to step, and are larger where it is checked.

    What is struck has the same tensors, and so the same lines, at each strike: no line is passed over.

    Attributes:
        step: the last one that a save was tried of.
        good: the last one that is known to be committed.
    """

    root: Path
    changes: dict[str, Any] = field(default_factory=dict)
    lazy: int = LAZY
    step: int = 0
    good: int = 0
    ck: Checkpointer = field(init=False)
    state: dict[str, Any] = field(init=False)
    others: frozenset[threading.Thread] = field(init=False)

    def __post_init__(self) -> None:
        self.others = frozenset(threading.enumerate())
        self.open()
        self.train()

    def open(self) -> None:
        self.ck = Checkpointer(self.root, options(**self.changes), files=QuickFiles())

    def train(self, *, longer: int = 0) -> int:
        """The next step, of longer tensors."""
        self.step += 1
        size = 1500 + longer
        self.state = {f"w{i}": torch.full((size + i,), float(self.step)) for i in range(self.lazy)}
        self.state |= {f"b{i}": torch.full((i + 5,), -float(self.step)) for i in range(EAGER)}
        self.state |= {"none": torch.empty(0, 3), "step": self.step}
        return self.step

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.state.items() if name != "step"}

    def save(self) -> ckpt_core.SaveHandle:
        return self.ck.save(self.step, self.state)

    def check(self) -> None:
        """Everything works, nothing is lost, nothing is left."""
        assert gc.isenabled()
        if self.ck._engine.store._protected():
            # A hold goes with the frames of who had it; those of an interrupted call may be in a circle.
            gc.collect()
            assert not self.ck._engine.store._protected()
        began = time.monotonic()
        self.ck.wait_staged()
        self.train(longer=400 * (1 + self.step % SIZES))
        self.save().committed.result(SOON_S)
        self.ck.wait()
        assert time.monotonic() - began < SOON_S
        self.check_saved(self.step)
        if self.good in (0, *self.ck.steps()):
            self.good = self.step
        else:
            assert self.good < self.step  # retired by newer ones
            self.good = self.step
        self.check_idle()

    def check_saved(self, step: int) -> None:
        found = ckpt_core.load(self.root / step_dir_name(step))
        assert found["step"] == step
        assert found.keys() == self.state.keys()
        for name, tensor in self.tensors().items():
            assert torch.equal(found[name], tensor), name

    def settle(self) -> None:
        """Have the memory and files that states of all sizes need: what is struck then does not grow them."""
        for _ in range(SIZES):
            self.check()

    def check_idle(self) -> None:
        engine = self.ck._engine
        assert engine.flights.active() == ()
        assert not any(one.undo for one in engine.journal.threads.values())
        pool = engine.pipeline.memory._pool
        # The threads that end a checkpoint tell of it before they are through.
        assert pool is None or pool.wait_idle(deadline=time.monotonic() + SOON_S)
        assert gc.isenabled()
        # A step that were kept for good would move the lines, and so the place of each strike that follows.
        until(lambda: len(self.ck.steps()) <= KEPT, f"retirement: {self.ck.steps()}")

    def close(self) -> None:
        began = time.monotonic()
        self.ck.close()
        assert time.monotonic() - began < SOON_S
        self.check_ended()

    def check_ended(self) -> None:
        """No thread of the engine is left but older ones, and the one that the process has for SIGTERM."""

        def alive() -> list[str]:
            names = [one.name for one in threading.enumerate() if one not in self.others]
            return [name for name in names if name.startswith("ckpt-") and name != "ckpt-sigterm"]

        # Whoever has been told of the end of a thread may be a moment ahead of it.
        until(lambda: not alive(), f"threads are left: {alive()}")


def until(reached: Callable[[], bool], what: str) -> None:
    """Wait a moment."""
    deadline = time.monotonic() + SOON_S
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


@dataclass
class Struck:
    """What came of a call with a trap."""

    result: Any = None
    error: BaseException | None = None


def of_the_process() -> tuple[object, ...]:
    """What a call changes for a while, and others notice if it stays."""
    return torch.is_grad_enabled(), list(warnings.filters), torch.get_default_device()


def strike(trap: Trap, call: Callable[[], Any]) -> Struck:
    """Run `call` with the trap; the error must be the trap's own, and must come if it has struck."""
    struck, before = Struck(), of_the_process()

    def keep() -> None:
        # At once: what the call gave must not be lost in the frames of the test.
        struck.result = call()

    try:
        trap.run(keep)
    except trap.kind as exc:
        struck.error = exc
    except CkptError as exc:
        # An error, never an interrupt, may come as the cause of one that says what it means.
        if not isinstance(exc.__cause__, Boom):
            raise
        struck.error = exc
    if trap.struck and not trap.dropped:
        assert struck.error is not None, f"swallowed: {trap.struck}"
    assert of_the_process() == before, f"changed by an interrupt at {trap.struck}"
    return struck


# -- the calls ---------------------------------------------------------------------------------------


def save(run: Run, trap: Trap) -> None:
    run.train()
    strike(trap, run.save)


def begin(run: Run, trap: Trap) -> None:
    run.train()
    struck = strike(trap, lambda: run.ck.begin(run.step, run.tensors()))
    if struck.result is not None:
        struck.result.abort()


def abort(run: Run, trap: Trap) -> None:
    run.train()
    save = run.ck.begin(run.step, run.tensors())
    save.stage(["w0"])
    if strike(trap, save.abort).error is not None:
        save.abort()


def stage(run: Run, trap: Trap) -> None:
    run.train()
    save = run.ck.begin(run.step, run.tensors())
    save.stage(["w1"])
    names = ["b0", "w0", "none"]
    struck = strike(trap, lambda: save.stage(names))
    run.ck.wait_staged(names)
    save.stage(names)
    _finish(run, save, struck)


def seal(run: Run, trap: Trap) -> None:
    run.train()
    save = run.ck.begin(run.step, run.tensors())
    save.stage(run.tensors())
    struck = strike(trap, lambda: save.seal(run.state))
    _finish(run, save, struck)


def _finish(run: Run, save: LayerwiseSave, struck: Struck) -> None:
    if not save._sealed:
        save.stage(run.tensors())
    _ended(save, lambda: save.seal(run.state))
    run.ck.wait()
    run.check_saved(run.step)


def _ended(save: OpenSave, seal: Callable[[], Any]) -> None:
    """Sealed: now, or in the call that was interrupted."""
    if not save._sealed:
        seal().committed.result(SOON_S)


def begin_files(run: Run, trap: Trap) -> None:
    run.train()
    struck = strike(trap, lambda: run.ck.begin_files(run.step, "files", pointer="latest"))
    if struck.result is not None:
        struck.result.abort()


def add(run: Run, trap: Trap) -> None:
    run.train()
    save = run.ck.begin_files(run.step, "files", pointer="latest")
    save.add("first.pt", run.tensors())
    struck = strike(trap, lambda: save.add("second.pt", run.tensors()))
    if struck.error is not None:
        # It was added, or was not.
        with contextlib.suppress(ConfigError):
            save.add("second.pt", run.tensors())
    run.ck.wait_staged()
    _finish_files(run, save)


def add_all(run: Run, trap: Trap) -> None:
    run.train()
    save = run.ck.begin_files(run.step, "files", pointer="latest")
    files = {"first.pt": run.tensors(), "second.pt": run.tensors()}
    struck = strike(trap, lambda: save.add_all(files))
    if struck.error is not None:
        # Both were added, or neither was.
        with contextlib.suppress(ConfigError):
            save.add_all(files)
    run.ck.wait_staged()
    _finish_files(run, save)


def seal_files(run: Run, trap: Trap) -> None:
    run.train()
    save = run.ck.begin_files(run.step, "files", pointer="latest")
    save.add("first.pt", run.tensors())
    save.add("second.pt", run.tensors())
    strike(trap, save.seal)
    _finish_files(run, save)


def _finish_files(run: Run, save: FilesSave) -> None:
    # torch's own files are whole: no switch of it was left on.
    torch.save(run.tensors(), run.root.parent / "plain.pt")
    plain = torch.load(run.root.parent / "plain.pt", weights_only=True)
    assert all(torch.equal(plain[key], value) for key, value in run.tensors().items())
    _ended(save, save.seal)
    run.ck.wait()
    assert (run.root / "latest").read_text() == "files"
    for name in ("first.pt", "second.pt"):
        found = torch.load(run.root / "files" / name, weights_only=True)
        assert all(torch.equal(found[key], value) for key, value in run.tensors().items())


def wait_staged(run: Run, trap: Trap) -> None:
    run.train()
    handle = run.save()
    strike(trap, lambda: run.ck.wait_staged(["w0"]))
    handle.committed.result(SOON_S)


def wait(run: Run, trap: Trap) -> None:
    run.train()
    handle = run.save()
    strike(trap, run.ck.wait)
    handle.committed.result(SOON_S)


def prepare(run: Run, trap: Trap) -> None:
    run.train()
    strike(trap, lambda: run.ck.prepare(run.state))


def restore(run: Run, trap: Trap) -> None:
    run.train()
    run.save().committed.result(SOON_S)
    into = {key: torch.zeros_like(value) for key, value in run.tensors().items()} | {"step": 0}
    strike(trap, lambda: run.ck.restore(into))
    found = run.ck.restore(into)
    assert found is not None and found.state["step"] == run.step
    assert all(torch.equal(into[key], value) for key, value in run.tensors().items())


class Renamed(torch.nn.Linear):
    """Loads in a way of its own."""

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict(*args, **kwargs)


def objects(value: float) -> dict[str, Any]:
    """What is loaded by calls of torch, which change the state of the process meanwhile."""
    model = Renamed(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.full((1, 3), value)).sum().backward()
    optimizer.step()
    sparse = (torch.eye(3) * value).to_sparse().requires_grad_()
    return {"model": model, "optimizer": optimizer, "sparse": sparse}


def restore_objects(run: Run, trap: Trap) -> None:
    run.train()
    saved, into = objects(float(run.step)), objects(-1.0)
    run.ck.save(run.step, saved).committed.result(SOON_S)
    strike(trap, lambda: run.ck.restore(into))
    assert run.ck.restore(into) is not None
    assert torch.equal(into["model"].weight, saved["model"].weight)
    assert torch.equal(into["sparse"].to_dense(), saved["sparse"].to_dense())
    moments = [one["optimizer"].state_dict()["state"][0]["exp_avg"] for one in (into, saved)]
    assert torch.equal(*moments)


def close(run: Run, trap: Trap) -> None:
    run.train()
    handle = run.save()
    strike(trap, run.ck.close)
    run.ck.close()
    handle.committed.result(SOON_S)
    run.check_ended()
    run.open()


def leave(run: Run, trap: Trap) -> None:
    """The end of a `with` block, also by the interrupt."""

    def loop() -> None:
        with run.ck:
            run.save()

    run.train()
    strike(trap, loop)
    run.ck.close()
    run.check_ended()
    run.open()


def make(run: Run, trap: Trap) -> None:
    run.close()
    struck = strike(trap, lambda: Checkpointer(run.root, options(), files=QuickFiles()))
    if struck.result is not None:
        struck.result.close()
    run.check_ended()
    run.open()
