"""Whole processes that save: `python -m tests.faults.programs <name> <root>`."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path

import torch

from ckpt_core import Checkpointer
from tests.crash.states import make_state, options
from tests.faults.layers import Delays


def _slow(root: Path, **changes: object) -> Checkpointer:
    return Checkpointer(root, options(in_flight=4, **changes), files=Delays(0.05).files())


def leave_without_close(root: Path) -> None:
    """The script ends with saves in flight."""
    ck = _slow(root)
    for step in (1, 2, 3):
        ck.save(step, make_state(step))


def leave_by_an_error(root: Path) -> None:
    """The training loop raises with saves in flight."""
    with _slow(root) as ck:
        for step in (1, 2, 3):
            ck.save(step, make_state(step))
        raise ZeroDivisionError("the loop failed")


def leave_a_child(root: Path) -> None:
    """The processes of multiprocessing end with saves in flight."""
    for step, kind in enumerate(("fork", "spawn"), start=1):
        context = multiprocessing.get_context(kind)
        child = context.Process(target=leave_without_close, args=(root / str(step),))
        child.start()
        child.join(60)
        assert child.exitcode == 0, child.exitcode


def leave_a_worker(root: Path) -> None:
    """A forked child lives on while this process waits to be killed."""
    ck = _slow(root)
    ck.save(1, make_state(1)).committed.result(60)
    child = os.fork()
    if child == 0:
        time.sleep(120)
        os._exit(0)
    print(f"worker {child}", flush=True)
    time.sleep(120)


class _Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return index


def use_a_data_loader(root: Path) -> None:
    """Workers of a data loader are forked while saves are in flight; they disturb nothing."""
    with _slow(root) as ck:
        for step in (1, 2, 3):
            ck.save(step, make_state(step))
            loader = torch.utils.data.DataLoader(
                _Numbers(), num_workers=2, multiprocessing_context="fork"
            )
            assert sum(int(batch) for batch in loader) == sum(range(64))
        ck.wait()


def obey_sigterm(root: Path) -> None:
    """A loop that saves once more when it is told to stop."""
    with _slow(root, on_error="raise") as first:
        first.save(1, make_state(1))
    with Checkpointer(root, options(), on_sigterm="save") as ck:
        print("ready", flush=True)
        step = 1
        while not ck.stop_requested:
            step += 1
            time.sleep(0.01)
        ck.save(5000, make_state(5000))
    print("saved", flush=True)


def ignore_sigterm(root: Path) -> None:
    """A loop that does not look; the grace period ends it."""
    ck = Checkpointer(root, options(), on_sigterm="save", sigterm_grace=1.0)
    ck.save(1, make_state(1)).committed.result(60)
    print("ready", flush=True)
    time.sleep(120)


PROGRAMS = {
    program.__name__: program
    for program in (
        leave_without_close,
        leave_by_an_error,
        leave_a_child,
        leave_a_worker,
        use_a_data_loader,
        obey_sigterm,
        ignore_sigterm,
    )
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    PROGRAMS[sys.argv[1]](Path(sys.argv[2]))
