"""Jobs: which iterations are saved, and what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

import ckpt_horovod
from ckpt_core import Auto, Checkpointer, ConfigError, EverySeconds
from tests.integrations.horovod.disks import tiny
from tests.integrations.horovod.launch import wait_for
from tests.integrations.horovod.training import Recipe, Training, process_set

ITERATIONS = 8


class Moody:
    """Says something else on each rank, as a clock would."""

    def __init__(self) -> None:
        self.asked: dict[int, int] = {}

    def should_save(self, step: int) -> bool:
        assert step not in self.asked, f"asked twice about {step}"
        answer = (step * 7 + hvd.rank() * 3) % 5 < 2
        self.asked[step] = int(answer)
        return answer


def told(
    root: str, mode: str, *, rank0_hook: bool = False, members: list[int] | None = None
) -> Any:
    """A policy that differs from rank to rank; with a hook on one rank, whose steps are then made whole."""
    with saving(root, members) as ck:
        policy = Moody()
        options = {"checkpointer": ck, "policy": policy, "layerwise": mode}
        training = Training(Recipe(name=f"told{mode}{rank0_hook}", ranks=members), options)
        training.attach()
        if rank0_hook and hvd.rank() == 0:
            training.optimizer.register_step_post_hook(lambda *_: None)
        made = []
        for number in range(ITERATIONS):
            training.iterate(number)
            if training.optimizer.end_iteration() is not None:
                made.append(number + 1)
        if ck is not None:
            ck.wait()
        return {"asked": sorted(policy.asked.items()), "made": made}


def twice(root: str) -> Any:
    """Two steps in one iteration, and a policy that is told: it is asked once for each iteration."""
    with saving(root) as ck:
        policy = Moody()
        options = {"checkpointer": ck, "policy": policy, "layerwise": "in_step"}
        training = Training(Recipe(name="told-twice", loop="twice"), options)
        training.attach()
        for number in range(ITERATIONS):
            with training.optimizer.iteration():
                training.iterate(number)
        assert ck is not None
        ck.wait()
        return {"asked": sorted(policy.asked.items()), "steps": ck.steps()}


def two_told(root: str) -> Any:
    """Two optimizers without names, with policies that are told; both end their iterations together."""
    torch.manual_seed(0)
    models, policies = [torch.nn.Linear(4, 4) for _ in range(2)], [Moody() for _ in range(2)]
    with saving(f"{root}0", keep_last=None) as one, saving(f"{root}1", keep_last=None) as other:
        optimizers = [
            ckpt_horovod.DistributedOptimizer(
                torch.optim.SGD(model.parameters()), checkpointer=ck, policy=policy
            )
            for model, ck, policy in zip(models, (one, other), policies, strict=True)
        ]
        for number in range(40):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
            for optimizer in optimizers:
                optimizer.end_iteration(save=None if number < ITERATIONS else False)
        assert one is not None
        assert other is not None
        one.wait()
        other.wait()
        return [one.steps(), other.steps()]


def one_root(root: str, mode: str) -> Any:
    """Two optimizers save by one Checkpointer; then one that is made anew, in place of both."""
    problems = []
    with saving(root, keep_last=None) as ck:
        assert ck is not None
        first, second = (_small(f"root-{mode}-{name}", ck, mode) for name in "ab")
        for _ in range(2):
            for make in (first, second):
                try:
                    make()
                except ConfigError as exc:
                    problems.append(str(exc))
        anew = _small(f"root-{mode}-c", ck, mode)
        anew()
        ck.wait()
        try:
            first()
        except ConfigError as exc:
            problems.append(str(exc))
        anew()
        ck.wait()
        return {"problems": problems, "steps": ck.steps()}


def phases(root: str, mode: str) -> Any:
    """Two optimizers, both made at the start: one restores what the other has saved, and goes on."""
    problems = []
    with saving(root, keep_last=None) as ck:
        assert ck is not None
        first, second = (_small(f"phases-{mode}", ck, mode) for _ in range(2))
        for _ in range(3):
            first()
        second.optimizer.restore()
        second()
        try:
            first()
        except ConfigError as exc:
            problems.append(str(exc))
        first.optimizer.restore()
        first()
        ck.wait()
        return {"problems": problems, "steps": ck.steps()}


def _small(name: str, checkpointer: Checkpointer, mode: str) -> Any:
    """Makes an iteration of an optimizer of its own, which is saved."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = ckpt_horovod.DistributedOptimizer(
        torch.optim.SGD(model.parameters()),
        named_parameters=model.named_parameters(name),
        **_options(checkpointer, mode),
    )

    def make() -> None:
        with optimizer.iteration():
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    make.optimizer = optimizer  # type: ignore[attr-defined]
    return make


def _options(checkpointer: Checkpointer, mode: str) -> dict[str, Any]:
    return {"checkpointer": checkpointer, "every_n_steps": 1, "layerwise": mode}


def one_more(root: str) -> Any:
    """The first rank alone has made another optimizer before, and never steps it."""
    kept = []
    for number in range(2 if hvd.rank() == 0 else 1):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = ckpt_horovod.DistributedOptimizer(
            torch.optim.SGD(model.parameters()), checkpointer=None, policy=EverySeconds(3600)
        )
        kept.append((number, optimizer))
    for _ in range(3):
        with optimizer.iteration():
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    return optimizer.iterations


def left_early(root: str) -> Any:
    """The last job of its ranks: the second has ended when the first one ends an iteration."""
    with saving(root) as ck:
        training = Training(
            Recipe(name="left-early"), {"checkpointer": ck, "policy": EverySeconds(3600)}
        )
        training.attach()
        for number in range(3):
            with training.optimizer.iteration():
                training.iterate(number)
                if number == 2 and hvd.rank() == 0:
                    assert wait_for([Path(root).parent / "1.ended"], limit_s=60)
    return training.optimizer.iterations


def told_again(root: str) -> Any:
    """A policy that is told, and training that goes back to a checkpoint in between."""
    with saving(root) as ck:
        assert ck is not None
        options = {"checkpointer": ck, "policy": EverySeconds(0.001), "layerwise": "in_step"}
        training = Training(Recipe(name="told-again"), options)
        training.attach()
        made = []
        for number in (0, 1, 2, 1, 2, 3):
            if number == 1 and made:
                ck.wait()
                training.optimizer.restore(step=1)
            training.iterate(number)
            handle = training.optimizer.end_iteration(save=True if number == 0 else None)
            made.append([training.optimizer.iterations, handle is not None])
        ck.wait()
        return {"made": made, "steps": ck.steps()}


class Once:
    """Says yes to an iteration when it is first asked about it, and never again."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def should_save(self, step: int) -> bool:
        self.asked.append(step)
        return self.asked.count(step) == 1


def made_again(root: str, mode: str, *, tells: bool = False) -> Any:
    """A step fails half-way, training goes back to the iteration before, and makes it again."""
    which: dict[str, Any] = {"policy": Once()} if tells else {"every_n_steps": 1}
    with saving(root) as ck:
        assert ck is not None
        training = Training(
            Recipe(name=f"made-again-{mode}{tells}"),
            {"checkpointer": ck, "layerwise": mode, **which},
        )
        training.attach()
        _iterate(training, 0, 1)
        ck.wait()
        for group in training.optimizer.param_groups:
            group["lr"] = None
        with contextlib.suppress(TypeError):
            _iterate(training, 2)
        training.optimizer.restore()
        _iterate(training, 2, 3)
        ck.wait()
        return ck.steps()


def _iterate(training: Training, *numbers: int) -> None:
    for number in numbers:
        training.iterate(number)
        training.optimizer.end_iteration()


def measured(root: str) -> Any:
    """A policy that measures: the first rank's decisions hold for both."""
    with saving(root) as ck:
        policy = Auto(1.0, cache=False)
        training = Training(Recipe(name="measured"), {"checkpointer": ck, "policy": policy})
        training.attach()
        made = []
        for number in range(40):
            training.iterate(number)
            if training.optimizer.end_iteration() is not None:
                made.append(number + 1)
        assert ck is not None
        ck.wait()
        return {"made": made, "steps": ck.steps()}


def asked_for(root: str) -> Any:
    """No policy: saved is what is asked for; and what is not wanted is not saved in spite of one."""
    with saving(root) as ck:
        training = Training(Recipe(name="asked-for"), {"checkpointer": ck})
        training.attach()
        handles = []
        for number in range(4):
            training.iterate(number)
            handles.append(training.optimizer.end_iteration(save=True if number == 2 else None))
        assert ck is not None
        ck.wait()
        return {"steps": ck.steps(), "handles": [handle is not None for handle in handles]}


def unwanted(root: str, mode: str) -> Any:
    """`save=False` takes back what the policy said, layers that are under way included."""
    with saving(root) as ck:
        options = {"checkpointer": ck, "every_n_steps": 1, "layerwise": mode}
        training = Training(Recipe(name=f"unwanted{mode}"), options)
        training.attach()
        for number in range(4):
            training.iterate(number)
            training.optimizer.end_iteration(save=False if number in (1, 2) else None)
        assert ck is not None
        ck.wait()
        return {"steps": ck.steps()}


def parts(root: str) -> Any:
    """Parts of one iteration join the tree, come back, and are private where they are said to be."""
    with saving(root) as ck:
        options = {"checkpointer": ck, "every_n_steps": 1, "per_rank": ["mine"]}
        training = Training(Recipe(name="parts"), options)
        training.attach(model=False)
        training.optimizer.attach(mine=torch.full((3,), float(hvd.rank())))
        for number in range(2):
            with training.optimizer.iteration(losses=[number, 0.5]):
                training.iterate(number)
        assert ck is not None
        ck.wait()
        found = training.optimizer.restore(losses=None)
        mine = training.optimizer.checkpoint_tree(losses=[])["mine"].tolist()
        return {"losses": found.state["losses"], "step": found.step, "mine": mine}


def refused(root: str) -> dict[str, str]:
    """The text of every refusal."""
    found: dict[str, str] = {}

    def refuses(name: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except ConfigError as exc:
            found[name] = str(exc)

    def wrap(**options: Any) -> Any:
        return Training(Recipe(name="refused"), options).optimizer

    with saving(root) as ck:
        refuses("both", lambda: wrap(checkpointer=ck, every_n_steps=2, policy=Moody()))
        refuses("no policy", lambda: wrap(checkpointer=ck, policy=3))
        refuses("zero", lambda: wrap(checkpointer=ck, every_n_steps=0))
        refuses("layerwise", lambda: wrap(checkpointer=ck, layerwise="eager"))
        refuses("no checkpointer", lambda: wrap(checkpointer=root))
        with Checkpointer(f"{root}-alone{hvd.rank()}", tiny()) as alone:
            refuses("alone", lambda: wrap(checkpointer=alone))
        optimizer = wrap(checkpointer=ck)
        refuses("taken", lambda: optimizer.attach(optimizer=1))
        refuses("taken once", lambda: optimizer.end_iteration(save=True, optimizer=1))
        with optimizer.iteration(save=False):
            refuses("nested", lambda: optimizer.iteration().__enter__())
            refuses("inside", optimizer.end_iteration)
        refuses("restore", lambda: wrap(checkpointer=None).restore())
        refuses("roots", lambda: ckpt_horovod.coordination(roots="here"))  # type: ignore[arg-type]
    return found


def outside(root: str, members: list[int]) -> list[str]:
    """What a rank is told that is not in the process set, and is to save with it, or alone."""
    ranks = process_set(members)
    problems: list[str] = []
    if not ranks.included():
        try:
            ckpt_horovod.coordination(process_set=ranks)
        except ConfigError as exc:
            problems.append(str(exc))
        with Checkpointer(root, tiny()) as alone:
            try:
                Training(Recipe(name="outside", ranks=members), {"checkpointer": alone})
            except ConfigError as exc:
                problems.append(str(exc))
    return problems


@contextlib.contextmanager
def saving(
    root: str, members: list[int] | None = None, **options: Any
) -> Iterator[Checkpointer | None]:
    """A Checkpointer of these ranks; None on the others."""
    ranks = None if members is None else process_set(members)
    if ranks is not None and not ranks.included():
        yield None
        return
    coordination = ckpt_horovod.coordination(process_set=ranks)
    with Checkpointer(root, tiny(**options), coordination=coordination) as ck:
        yield ck


def vouched(root: str) -> dict[str, Any]:
    """An optimizer that the user vouched for in vain."""
    with saving(root) as ck:
        options = {"checkpointer": ck, "every_n_steps": 1, "layerwise": "in_step"}
        recipe = Recipe(name="vouched", optimizer="GroupCounter")
        training = Training(recipe, {**options, "separable": True})
        training.attach()
        try:
            training.iterate(0)
        except ConfigError as exc:
            return {"problem": str(exc), "ended": training.optimizer.iterations}
    return {}
