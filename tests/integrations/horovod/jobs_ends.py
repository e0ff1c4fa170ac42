"""Jobs: iterations that end in other ways than they should."""

from __future__ import annotations

from typing import Any

from ckpt_core import ConfigError, committed_steps
from tests.integrations.horovod.jobs_policies import saving
from tests.integrations.horovod.training import Recipe, Training


def broken(root: str, mode: str, *, go_on: bool) -> dict[str, Any]:
    """An exception inside the block of iteration 3, after its step; training goes on, or ends."""
    recipe = Recipe(name=f"broken{mode}{go_on}")
    with saving(root, keep_last=None) as ck:
        assert ck is not None
        training = Training(recipe, _options(ck, mode))
        training.attach()
        for number in range(5 if go_on else 3):
            try:
                with training.optimizer.iteration():
                    training.iterate(number)
                    if number == 2:
                        raise KeyError("a bad batch")
            except KeyError:
                continue
        ended = training.optimizer.iterations
    return {"ended": ended, "steps": list(committed_steps(root))}


def late_end(root: str, mode: str) -> dict[str, Any]:
    """`end_iteration` after `zero_grad` has ended the iteration."""
    with saving(root) as ck:
        assert ck is not None
        training = Training(Recipe(name=f"late{mode}"), _options(ck, mode))
        training.attach()
        training.iterate(0)
        training.optimizer.zero_grad()
        try:
            training.optimizer.end_iteration()
        except ConfigError as exc:
            problem = str(exc)
        training.backward(1)
        training.optimizer.step()
        training.optimizer.end_iteration()
        ck.wait()
        return {"problem": problem, "ended": training.optimizer.iterations, "steps": ck.steps()}


def evaluated(root: str, mode: str) -> dict[str, Any]:
    """A forward in evaluation mode ends nothing."""
    with saving(root) as ck:
        assert ck is not None
        training = Training(Recipe(name=f"eval{mode}"), _options(ck, mode))
        training.attach()
        training.iterate(0)
        training.model.eval()
        training.loss(0)
        training.model.train()
        before = training.optimizer.iterations
        training.optimizer.end_iteration()
        return {"before": before, "after": training.optimizer.iterations}


def skipped_block(root: str) -> dict[str, Any]:
    """A block without a step, after an iteration that the block's beginning ended."""
    with saving(root, keep_last=None) as ck:
        assert ck is not None
        training = Training(Recipe(name="skipped-block"), _options(ck, "in_step"))
        training.attach()
        training.iterate(0)
        with training.optimizer.iteration():
            training.optimizer.zero_grad()
        with training.optimizer.iteration():
            training.iterate(2)
        ck.wait()
        return {"ended": training.optimizer.iterations, "steps": ck.steps()}


def _options(checkpointer: Any, mode: str) -> dict[str, Any]:
    return {"checkpointer": checkpointer, "every_n_steps": 1, "layerwise": mode}
