"""Jobs: storage that fails on one rank."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator
from typing import Any

import horovod.torch as hvd
import torch
from horovod.runner.elastic.worker import HostUpdateResult

import ckpt_horovod
from ckpt_core import Checkpointer, CkptError, committed_steps
from ckpt_horovod.elastic import TorchState
from tests.crash.layers import CHANGES
from tests.faults.layers import FaultAt
from tests.integrations.horovod.disks import counting, tiny
from tests.integrations.horovod.training import Recipe, Training

ITERATIONS = 8
BROKEN, MENDED = 2, 5


def failing(
    root: str, mode: str, on_error: str, code: str, ends: str, operation: str, **options: Any
) -> dict[str, Any]:
    """From iteration 3 to 5 the disk of rank 1 fails; where that is raised, and what becomes of training.

    Args:
        ends: how iterations do, by "call" or by the next "zero_grad" or "step".
        operation: of the file layer, which fails; "" for all of them.
        options: of the Checkpointer, besides those of `tiny`.
    """
    recipe = Recipe(name=f"{mode}-{on_error}-{code}-{ends}-{'-'.join(options)}")
    stock = Training(Recipe(name=f"stock-{recipe.name}"))
    expected = [_iterate(stock, number, [], None) for number in range(ITERATIONS)]
    names = (operation,) if operation else CHANGES
    fault = FaultAt(None, getattr(errno, code), lasting=True, names=names)
    raised: list[list[Any]] = []
    with (
        counting() as counted,
        Checkpointer(
            root,
            tiny(on_error=on_error, **options),
            coordination=ckpt_horovod.coordination(),
            files=fault.files(),
        ) as ck,
    ):
        saving = {"checkpointer": ck, "every_n_steps": 1, "layerwise": mode}
        training = Training(recipe, saving)
        training.attach(model=ends != "step")  # whose forward would end them before
        found = []
        for number in range(ITERATIONS):
            if hvd.rank() == 1:
                fault.n = 0 if BROKEN <= number < MENDED else None
            ending = None if ends == "call" else ck
            found.append(_iterate(training, number, raised, ending, by_step=ends == "step"))
            if ends == "call":
                _try(number, "end", raised, training.optimizer.end_iteration)
                _settle(ck)
        _try(ITERATIONS, "close", raised, ck.close)
    return {
        "stock": expected,
        "found": found,
        "raised": raised,
        "struck": len(fault.struck),
        "in_layers": counted.in_layers,
        "ended": training.optimizer.iterations,
    }


def interrupted(root: str, mode: str, what: str, *, blocking: bool = False) -> dict[str, Any]:
    """What belongs to the user raises on rank 0, once, in a loop whose iterations end by the next step().

    Args:
        what: the "state" of an attached object, as iteration 2 is saved; or the "policy", asked about 4.
    """
    name = f"interrupted-{mode}-{what}-{blocking}"
    stock = Training(Recipe(name=f"stock-{name}"))
    expected = [_iterate(stock, number, [], None) for number in range(ITERATIONS)]
    raised: list[list[Any]] = []
    mine = _Mine(0)
    with Checkpointer(
        root, tiny(blocking=blocking), coordination=ckpt_horovod.coordination()
    ) as ck:
        policy = _Breaking(4 if what == "policy" else None)
        saving = {"checkpointer": ck, "policy": policy, "layerwise": mode}
        training = Training(Recipe(name=name), saving)
        training.attach(model=False)
        training.optimizer.attach(mine=mine)
        found = []
        for number in range(ITERATIONS):
            mine.breaks = what == "state" and hvd.rank() == 0 and number == BROKEN
            found.append(_iterate(training, number, raised, ck, by_step=True))
    return {"same": found == expected, "raised": raised, "steps": committed_steps(root)}


def edited(root: str) -> dict[str, Any]:
    """Rank 0 alone touches a parameter after the step of the second iteration."""
    training_ends: list[int] = []
    with Checkpointer(
        root,
        tiny(on_error="warn", timeout=10.0, staging_bytes="1MiB"),
        coordination=ckpt_horovod.coordination(),
    ) as ck:
        options = {"checkpointer": ck, "every_n_steps": 1, "layerwise": "in_step"}
        training = Training(Recipe(name="edited"), options)
        training.attach()
        for number in range(5):
            _iterate(training, number, [], None)
            if number == 1 and hvd.rank() == 0:
                with torch.no_grad():
                    next(training.model.parameters()).add_(0.0)
            training.optimizer.end_iteration()
            training_ends.append(training.optimizer.iterations)
            _settle(ck)
            # Rank 0 has tried this one once more: a save that began beside that would be lost with it.
            hvd.barrier()
        return {"steps": list(ck.steps()), "ended": training_ends}


def short_of_memory(root: str) -> dict[str, Any]:
    """Nothing is written before a whole snapshot is staged; rank 1 has memory for one, and not for two."""
    raised: list[list[Any]] = []
    with Checkpointer(
        root,
        tiny(pipelined=False, staging_bytes="200KB" if hvd.rank() == 1 else "4MiB", blocking=True),
        coordination=ckpt_horovod.coordination(),
    ) as ck:
        options = {"checkpointer": ck, "every_n_steps": 2, "layerwise": "in_step"}
        training = Training(Recipe(name="short-of-memory"), options)
        training.attach()
        for number in range(4):
            _iterate(training, number, [], None)
            _try(number, "end", raised, training.optimizer.end_iteration)
        training.optimizer.zero_grad()
        # What is saved as a whole fits, and the ranks are still in step.
        ck.save(9, training.optimizer.checkpoint_tree())
        return {"raised": raised, "steps": list(ck.steps()), "ended": training.optimizer.iterations}


def commit_failing(root: str) -> dict[str, Any]:
    """The disk of rank 0 fails for one commit of an elastic job; the loop catches that, and goes on."""
    raised: list[list[Any]] = []
    training = Training(Recipe(name="commit-failing"), {"checkpointer": None})
    with _elastic(root, training, FaultAt(None, errno.ENOSPC, lasting=True)) as (state, fault):
        for number in range(ITERATIONS):
            training.iterate(number)
            if hvd.rank() == 0:
                fault.n = 0 if number == BROKEN else None
            _try(number, "commit", raised, state.commit)
            _settle(state.checkpointer)
    return {"raised": raised, "steps": committed_steps(root)}


def commit_interrupted(root: str) -> dict[str, Any]:
    """What belongs to the user raises on rank 0, in one commit of an elastic job."""
    raised: list[list[Any]] = []
    training = Training(Recipe(name="commit-interrupted"), {"checkpointer": None})
    mine = _Mine(0)
    with _elastic(root, training, FaultAt(None, errno.ENOSPC), mine=mine) as (state, _):
        for number in range(ITERATIONS):
            training.iterate(number)
            mine.breaks = hvd.rank() == 0 and number == BROKEN
            _try(number, "commit", raised, state.commit)
            _settle(state.checkpointer)
    return {"raised": raised, "steps": committed_steps(root)}


def own_parts(root: str) -> dict[str, Any]:
    """A job is started again, in whose attributes some parts belong to each rank alone."""
    per_rank = ["stats.mine", "object.number", "whole"]
    for number in (7, 8):
        training = Training(Recipe(name=f"own-parts-{number}"), {"checkpointer": None})
        with TorchState(
            training.model,
            training.optimizer,
            root=root,
            per_rank=per_rank,
            stats={"mine": -1, "all": -1},
            whole=-1,
            object=_Mine(-1),
        ) as state:
            state.sync()
            if number == 7:
                state.stats, state.whole = {"mine": hvd.rank(), "all": number}, hvd.rank()
                state.object.number = hvd.rank()
                state.commit()
    return {"stats": state.stats, "whole": state.whole, "object": state.object.number}


def joined(root: str) -> dict[str, Any]:
    """Behind a loss a worker that is new meets one that has made steps; neither makes one at first."""
    training = Training(Recipe(name="joined"), {"checkpointer": None})
    state = TorchState(training.model, training.optimizer, root=root)
    with state:
        state.sync()
        training.iterate(0)
        state.commit()
    state.restore()
    state.on_reset()
    if hvd.rank() == 1:
        training = Training(Recipe(name="joined"), {"checkpointer": None})
        state = TorchState(training.model, training.optimizer, root=root)
    with state:
        state.sync()
        counts = [training.optimizer.iterations]
        for number in (1, 2):
            if number == 2:
                training.iterate(number)
            training.optimizer.end_iteration()
            counts.append(training.optimizer.iterations)
    return {"counts": counts}


def between_passes(root: str) -> dict[str, Any]:
    """An elastic job looks for hosts, and commits, behind a pass that left gradients on rank 1 alone."""
    raised: list[list[Any]] = []
    recipe = Recipe(name="between-passes", horovod={"backward_passes_per_step": 2})
    training = Training(recipe, {"checkpointer": None})
    with _elastic(root, training, FaultAt(None, errno.ENOSPC)) as (state, _):
        if hvd.rank() == 1:
            training.backward(0)
        if hvd.rank() == 0:
            state.on_hosts_updated(time.time(), HostUpdateResult.added)
        _try(0, "look", raised, state.check_host_updates)
        _try(0, "commit", raised, state.commit)
        training.backward(1)
        training.optimizer.step()
        _try(1, "commit", raised, state.commit)
    return {"raised": raised, "steps": committed_steps(root)}


class _Mine:
    """A user's own object."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.breaks = False

    def state_dict(self) -> dict[str, Any]:
        if self.breaks:
            raise RuntimeError("out of memory")
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


class _Breaking:
    """A policy that says yes, but where it breaks."""

    def __init__(self, at: int | None) -> None:
        self.at = at

    def should_save(self, step: int) -> bool:
        if step == self.at:
            raise RuntimeError("no answer")
        return True


def before_the_step(root: str) -> dict[str, Any]:
    """Hosts change between `synchronize()` and its step; the step before was left out, as by a GradScaler."""
    raised: list[list[Any]] = []
    recipe = Recipe(name="before-the-step", horovod={"backward_passes_per_step": 2})
    training = Training(recipe, {"checkpointer": None})
    optimizer = training.optimizer
    with _elastic(root, training, FaultAt(None, errno.ENOSPC)) as (state, _):
        _reduce_passes(training)
        _try(0, "commit", raised, state.commit)
        optimizer.zero_grad()
        held = state._iterations.is_accumulating({}, reduced=True)
        _reduce_passes(training)
        if hvd.rank() == 0:
            state.on_hosts_updated(time.time(), HostUpdateResult.added)
        _try(1, "look", raised, state.check_host_updates)
        with optimizer.skip_synchronize():
            optimizer.step()
        _try(2, "look", raised, state.check_host_updates)
    return {"raised": raised, "held": held}


def _reduce_passes(training: Training) -> None:
    for part in range(2):
        training.backward(0, part)
    training.optimizer.synchronize()


@contextlib.contextmanager
def _elastic(
    root: str, training: Training, fault: FaultAt, **attributes: Any
) -> Iterator[tuple[TorchState, FaultAt]]:
    """A state that has been synced, and writes through `fault`."""
    with TorchState(training.model, training.optimizer, root=root, **attributes) as state:
        # Put there by hand: its files are faulty.
        made = Checkpointer(
            root, tiny(), coordination=ckpt_horovod.coordination(), files=fault.files()
        )
        state._checkpointer = made
        state._iterations.use(made)
        state.sync()
        yield state, fault


def _iterate(
    training: Training,
    number: int,
    raised: list[list[Any]],
    ends: Checkpointer | None,
    *,
    by_step: bool = False,
) -> str:
    optimizer = training.optimizer
    if by_step:
        training.model.zero_grad()
    else:
        _try(number, "zero_grad", raised, optimizer.zero_grad)
        if ends is not None:
            _settle(ends)
    training.backward(number)
    if by_step:
        _try(number, "step", raised, optimizer.step)
        if ends is not None:
            _settle(ends, but=optimizer.iterations + 1)  # its layers are open
    else:
        optimizer.step()  # nothing of a save is ever raised here
    training.scheduler.step()
    return training.digest()


def _try(number: int, where: str, raised: list[list[Any]], act: Any) -> None:
    try:
        act()
    except (CkptError, RuntimeError) as exc:
        raised.append([number, where, type(exc).__name__])


def _settle(ck: Checkpointer, *, but: int = -1) -> None:
    """Let what is in flight end, so that the next save is the one that tells; errors stay where they are.

    Args:
        but: this step goes on.
    """
    deadline = time.monotonic() + 60
    while any(flight.step != but for flight in ck._engine.flights.active()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
