"""Jobs: iterations that end in other ways than they should."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import horovod.torch as hvd

from ckpt_core import CkptError, ConfigError, NotCommitted, RestoreError, committed_steps
from tests.integrations.horovod.jobs_policies import saving
from tests.integrations.horovod.jobs_saved import warnings_logged
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


def gone_back(root: str, mode: str) -> dict[str, Any]:
    """Blocks that go back to the newest step: before a step of their own, behind it, and to make it anew."""
    counts = []
    with saving(root, keep_last=None) as ck:
        assert ck is not None
        training = Training(Recipe(name=f"gone-back{mode}"), _options(ck, mode))
        training.attach()
        optimizer = training.optimizer

        def block(act: Callable[[], object], save: bool | None = None) -> None:
            with optimizer.iteration(save=save):
                act()
            counts.append(optimizer.iterations)
            ck.wait()

        def anew() -> None:
            optimizer.restore()
            training.iterate(2)

        def given_up() -> None:
            training.iterate(2)
            optimizer.restore()

        block(lambda: training.iterate(0))
        block(lambda: training.iterate(1))
        expected = training.digest(buffers=False)
        block(optimizer.restore)
        block(optimizer.restore, save=True)
        block(given_up)
        same = training.digest(buffers=False) == expected
        block(anew)
        return {"counts": counts, "steps": ck.steps(), "same": same}


def gone_back_by_call(root: str, mode: str) -> dict[str, Any]:
    """The same without blocks: `end_iteration` behind a `restore()`, twice, and behind the next step."""
    counts = []
    with saving(root, keep_last=None) as ck:
        assert ck is not None
        training = Training(Recipe(name=f"gone-back-by-call{mode}"), _options(ck, mode))
        training.attach()
        optimizer = training.optimizer

        def end(save: bool | None = None) -> None:
            optimizer.end_iteration(save=save)
            counts.append(optimizer.iterations)
            ck.wait()

        for number in range(2):
            training.iterate(number)
            end()
        for save in (None, True):
            optimizer.restore()
            end(save)
        training.iterate(2)
        end()
        optimizer.restore()
        end()
        end()  # nothing went back since: an iteration without a step, as before
        return {"counts": counts, "steps": ck.steps()}


def found_nothing(root: str, mode: str) -> dict[str, Any]:
    """`restore()` in the first iteration, with nothing to go back to, or refused; it ends all the same."""
    with saving(root, keep_last=None) as ck:
        assert ck is not None
        training = Training(Recipe(name=f"found-nothing{mode}"), _options(ck, mode))
        training.attach()
        training.iterate(0)
        found = training.optimizer.restore()
        left_open = training.optimizer._iterations._layers is not None
        problem = ""
        try:
            training.optimizer.restore(optimizer=None)
        except ConfigError as exc:
            problem = str(exc)
        with suppress(NotCommitted):
            training.optimizer.restore(step=99)
        training.iterate(1)
        training.optimizer.end_iteration()
        ck.wait()
        return {
            "found": found is not None,
            "left_open": left_open,
            "problem": problem,
            "ended": training.optimizer.iterations,
            "steps": ck.steps(),
        }


class Breaking:
    """What cannot take its state back, if it breaks."""

    breaks = True

    def state_dict(self) -> dict[str, Any]:
        return {"one": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.breaks:
            raise RuntimeError("broken")


def failed_back(root: str, mode: str) -> dict[str, Any]:
    """What a `restore()` has left that failed half-way is no step, whatever ends its iteration."""
    with saving(root, keep_last=None) as ck:
        assert ck is not None
        training = Training(Recipe(name=f"failed-back{mode}"), _options(ck, mode))
        training.attach()
        optimizer, broken = training.optimizer, Breaking()
        training.iterate(0)
        optimizer.end_iteration(broken=broken)
        ck.wait()
        training.iterate(1)
        problem = ""
        try:
            optimizer.restore(broken=broken)
        except RestoreError as exc:
            problem = str(exc)
        optimizer.end_iteration(broken=broken)
        ck.wait()
        return {"problem": problem, "ended": optimizer.iterations, "steps": ck.steps()}


def accumulated(root: str, mode: str) -> dict[str, Any]:
    """Two iterations for each step, and every third is due; goes back to 4, and on to the same bits.

    Goes back from between the passes of a step, in a block that then makes the next pass.
    """
    recipe = Recipe(name=f"accumulated{mode}", horovod={"backward_passes_per_step": 2})
    with saving(root, keep_last=None) as ck, warnings_logged() as warned:
        assert ck is not None
        training = Training(recipe, {**_options(ck, mode), "every_n_steps": 3})
        training.attach()
        optimizer = training.optimizer

        def iterate(number: int, save: bool | None = None) -> None:
            with optimizer.iteration(save=save):
                if hvd.rank() == 0 or number % 2:  # a pass may leave a rank without gradients
                    training.backward(number)
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()

        for number in range(8):
            iterate(number)
        expected = training.digest(buffers=False)
        iterate(8)
        ck.wait()
        with optimizer.iteration():
            optimizer.restore(step=4)
            if hvd.rank() == 0:
                training.backward(4)
        assert optimizer.iterations == 5, "a pass was made"
        for number in range(optimizer.iterations, 8):
            iterate(number)
        found = training.digest(buffers=False)
        problem = ""
        try:
            iterate(8, save=True)
        except ConfigError as exc:
            problem = str(exc)
        iterate(9, save=True)
        ck.wait()
        return {
            "same": found == expected,
            "steps": ck.steps(),
            "warnings": warned,
            "problem": problem,
        }


def accumulated_beside(root: str, mode: str) -> dict[str, Any]:
    """Two iterations for each step of an optimizer that is attached; goes back to 3, or else to 2."""
    problems: list[str] = []
    with saving(root, keep_last=None) as ck, warnings_logged() as warned:
        assert ck is not None
        training, beside = _beside(f"beside{mode}", _options(ck, mode))

        def iterate(number: int, save: bool | None = None) -> None:
            with training.optimizer.iteration(save=save):
                training.iterate(number)
                if hvd.rank() == 0 or number % 2:  # a pass may leave a rank without gradients
                    beside.backward(number)
                if number % 2:
                    beside.optimizer.step()
                    beside.optimizer.zero_grad()

        def digests() -> list[str]:
            return [one.digest(buffers=False) for one in (training, beside)]

        for number in range(6):
            iterate(number)
        expected = digests()
        ck.wait()
        training.optimizer.restore(step=max(step for step in ck.steps() if step <= 3))
        began = training.optimizer.iterations
        for number in range(began, 6):
            iterate(number)
        found = digests()
        try:
            iterate(6, save=True)
        except ConfigError as exc:
            problems.append(str(exc))
        iterate(7, save=True)
        ck.wait()
        return {
            "same": found == expected,
            "began": began,
            "steps": ck.steps(),
            "warnings": warned,
            "problems": problems,
        }


def saved_alone(root: str, members: list[int] | None = None) -> dict[str, Any]:
    """One rank alone saves, while an attached optimizer takes two passes for each step."""
    problem = ""
    with saving(root, members) as ck:
        options = {"checkpointer": ck, "layerwise": "in_step"}
        training, beside = _beside("alone", options, members)
        for number in range(4):
            alone = number == 1 and hvd.rank() == 0
            with training.optimizer.iteration(save=alone or None):
                training.iterate(number)
                beside.backward(number)
                if number % 2:
                    beside.optimizer.step()
                    beside.optimizer.zero_grad()
        try:
            if ck is not None:
                ck.wait()
        except CkptError as exc:
            problem = str(exc)
        return {"ended": training.optimizer.iterations, "problem": problem}


def _beside(
    name: str, options: dict[str, Any], members: list[int] | None = None
) -> tuple[Training, Training]:
    """A training, and another of two passes for each step, which is attached to it."""
    training = Training(Recipe(name=name, ranks=members), options)
    passes = {"backward_passes_per_step": 2}
    recipe = Recipe(name=f"{name}-d", horovod=passes, seed=1, ranks=members)
    beside = Training(recipe, {"checkpointer": None})
    training.attach()
    training.optimizer.attach(d=beside.model, d_opt=beside.optimizer)
    return training, beside


def _options(checkpointer: Any, mode: str) -> dict[str, Any]:
    return {"checkpointer": checkpointer, "every_n_steps": 1, "layerwise": mode}
