"""Jobs: a rank is killed in the middle of a snapshot or of a step; the job is run again."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

import ckpt_horovod
from ckpt_core import Checkpointer, CkptError, RngState, StoreOptions
from tests.crash.layers import KillAt
from tests.integrations.horovod.disks import SlowFiles, tiny
from tests.integrations.horovod.launch import wait_for
from tests.integrations.horovod.training import Net, Recipe, Training, digest, make_optimizer

ITERATIONS = 7
DYING = 4
"""Iteration, counted from 1, from which on the victim may die."""

_DEAD_AFTER_S = 8.0
_BETWEEN_S = 0.05
_SLOW_S = 0.002
_INTO_THE_STEP_S = 0.3


def undisturbed() -> list[str]:
    """The digests of a run that nothing happens to."""
    training = Training(Recipe(name="undisturbed"))
    digests = []
    for number in range(ITERATIONS):
        training.iterate(number)
        digests.append(_digest(training))
    return digests


def _digest(training: Training) -> str:
    """Buffers are those of the first rank after a restore, on every rank."""
    return training.digest(buffers=hvd.rank() == 0)


def killed(root: str, mode: str, victim: int, moment: dict[str, Any] | None) -> dict[str, Any]:
    """Train until the victim is dead; where Horovod tells the survivor.

    Args:
        moment: arguments of KillAt, from iteration 4 on. None: in the backward of that iteration, when the
            survivor waits in `step`.
    """
    dies, waiting = hvd.rank() == victim, Path(f"{root}.waiting")
    kill = KillAt(**moment) if moment is not None and dies else None
    files: Any = SlowFiles(hvd.rank(), _SLOW_S)
    if kill is not None:
        kill.armed = False
        files = kill.files(_Slow)
    coordination = ckpt_horovod.coordination(options=StoreOptions(dead_after=_DEAD_AFTER_S))
    ck = Checkpointer(root, tiny(timeout=20.0), coordination=coordination, files=files)
    options = {"checkpointer": ck, "every_n_steps": 1, "layerwise": mode}
    training = Training(Recipe(name="killed"), options)
    training.attach()
    for number in range(200):
        if number + 1 == DYING and kill is not None:
            kill.armed = True
        elif number + 1 == DYING and dies:
            training.model.first.weight.register_hook(lambda _: _die_once(waiting))
        where = _iterate(training, number, waiting if number + 1 == DYING else None)
        if where:
            return {"where": where, "iteration": number + 1}
        time.sleep(_BETWEEN_S)
    raise AssertionError("the victim lives")


def _iterate(training: Training, number: int, waiting: Path | None) -> str:
    """Where HorovodInternalError was raised, if it was. A commit may have failed before.

    Args:
        waiting: made once nothing is left to do but the step.
    """
    with contextlib.suppress(CkptError):
        training.optimizer.zero_grad()
    try:
        training.backward(number)
    except HorovodInternalError:
        return "backward"
    if waiting is not None:
        waiting.touch()
    try:
        training.optimizer.step()
    except HorovodInternalError:
        return "step"
    training.scheduler.step()
    with contextlib.suppress(CkptError):
        training.optimizer.end_iteration()
    return ""


def _die_once(waiting: Path) -> None:
    assert wait_for([waiting], limit_s=60)
    time.sleep(_INTO_THE_STEP_S)
    os.kill(os.getpid(), signal.SIGKILL)


class _Slow(SlowFiles):
    def __init__(self) -> None:
        super().__init__(7, _SLOW_S)


def resumed(root: str, mode: str, name: str) -> dict[str, Any]:
    """Run the job again to its end: from which step, and what every iteration ended with."""
    with Checkpointer(root, tiny(), coordination=ckpt_horovod.coordination()) as ck:
        options = {"checkpointer": ck, "every_n_steps": 1, "layerwise": mode}
        training = Training(Recipe(name=f"resumed-{name}"), options)
        training.attach()
        found = training.optimizer.restore()
        assert found is not None
        assert training.optimizer.iterations == found.step
        digests = []
        for number in range(training.optimizer.iterations, ITERATIONS):
            training.iterate(number)
            training.optimizer.end_iteration()
            digests.append(_digest(training))
    return {"step": found.step, "digests": digests}


def save(root: str, mode: str, steps: int) -> dict[str, Any]:
    """Some steps for others to restore; what the last one holds that is the same on all ranks."""
    with Checkpointer(root, tiny(), coordination=ckpt_horovod.coordination()) as ck:
        options = {"checkpointer": ck, "every_n_steps": 1, "layerwise": mode}
        training = Training(Recipe(name=f"save{mode}"), options)
        training.attach()
        for number in range(steps):
            training.iterate(number)
            training.optimizer.end_iteration()
    return {"shared": shared(training), "buffers": buffers(training)}


def restore(root: str, name: str) -> dict[str, Any]:
    """Restore what another number of ranks saved, and go on for a step."""
    with Checkpointer(root, tiny(), coordination=ckpt_horovod.coordination()) as ck:
        options = {"checkpointer": ck, "every_n_steps": 1}
        training = Training(Recipe(name=f"restore-{name}", seed=9), options)
        training.attach()
        found = training.optimizer.restore()
        assert found is not None
        result = {
            "step": found.step,
            "shared": shared(training),
            "buffers": buffers(training),
            "ranks": found.world_size,
        }
        training.iterate(found.step)
        training.optimizer.end_iteration(save=False)
        return {**result, "after": shared(training)}


def shared(training: Training) -> str:
    """Digest of parameters, optimizer and scheduler: equal on all ranks."""
    state = training.state()
    params = dict(training.model.named_parameters())
    return digest([params, state["optimizer"], state["scheduler"]])


def buffers(training: Training) -> str:
    """Digest of the BatchNorm buffers: those of the first rank are saved."""
    return digest(dict(training.model.named_buffers()))


def plain_restore(root: str) -> dict[str, Any]:
    """Without Horovod: a plain model and optimizer. Called in the test process."""
    torch.manual_seed(4)
    model = Net(Recipe(name="").width)
    optimizer = make_optimizer("AdamW", model, {})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": RngState()}
    kept = torch.get_rng_state()
    try:
        with Checkpointer(root) as ck:
            found = ck.restore(parts)
    finally:
        torch.set_rng_state(kept)
    assert found is not None
    params = dict(model.named_parameters())
    state = [params, optimizer.state_dict(), scheduler.state_dict()]
    return {"shared": digest(state), "buffers": digest(dict(model.named_buffers()))}
