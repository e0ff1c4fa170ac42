"""Jobs: the same training by Horovod alone and with checkpoints, compared bit by bit."""

from __future__ import annotations

from typing import Any

import ckpt_horovod
from ckpt_core import Checkpointer
from tests.integrations.horovod.disks import GatedFiles, counting, tiny
from tests.integrations.horovod.training import Recipe, Saving, Training, process_set

ITERATIONS = 6
EVERY = 2
HELD_UP_S = 0.02


def compare(root: str, recipe: dict[str, Any]) -> dict[str, Any]:
    """Digests after each iteration: {"stock": [...], "in_step": {...}, "lazy": {...}}."""
    found: dict[str, Any] = {"stock": stock(Recipe(**recipe, name="stock"))}
    for mode in ("in_step", "lazy"):
        found[mode] = saved(Recipe(**recipe, name=mode), Saving(f"{root}/{mode}", mode, EVERY))
    return found


def stock(recipe: Recipe) -> list[str]:
    """By Horovod's own optimizer."""
    training = Training(recipe)
    digests = []
    for number in range(ITERATIONS):
        training.iterate(number)
        digests.append(training.digest())
    return digests


def saved(recipe: Recipe, saving: Saving) -> dict[str, Any]:
    """With checkpoints, each of which is still being copied when the next step begins."""
    files = GatedFiles()
    members = None if recipe.ranks is None else process_set(recipe.ranks)
    if members is not None and not members.included():
        return _not_saved(recipe, saving)
    digests, held_up, due = [], 0, False
    coordination = ckpt_horovod.coordination(process_set=members)
    with (
        counting(lambda: None if due else files.open_after(HELD_UP_S)) as counted,
        Checkpointer(saving.root, tiny(), coordination=coordination, files=files) as ck,
    ):
        training = Training(recipe, saving.options(ck))
        training.attach()
        for number in range(ITERATIONS):
            held_up += not ck.is_staged()
            due = (number + 1) % EVERY == 0
            if due:
                ck.wait()
                files.shut()  # until the next step has begun
            training.iterate(number)
            if not due:
                files.open()  # where that step was skipped
            training.optimizer.end_iteration()
            digests.append(training.digest())
        files.open()
        ck.wait()
        steps = list(ck.steps())
    return {
        "digests": digests,
        "steps": steps,
        "held_up": held_up,
        "parts": counted.parts,
        "in_layers": counted.in_layers,
        "whole": counted.whole,
    }


def _not_saved(recipe: Recipe, saving: Saving) -> dict[str, Any]:
    training = Training(recipe, saving.options(None))
    digests = []
    for number in range(ITERATIONS):
        training.iterate(number)
        assert training.optimizer.end_iteration() is None
        digests.append(training.digest())
    return {"digests": digests}
