"""Jobs: the wrapped optimizer is Horovod's in everything else; and how many bytes each rank writes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import ckpt_horovod
from tests.integrations.horovod.jobs_policies import saving
from tests.integrations.horovod.training import Recipe, Training, cloned, digest


def what_it_is(root: str) -> dict[str, Any]:
    """Its classes and names, beside those of Horovod's own."""
    with saving(root) as ck:
        ours = Training(Recipe(name="ours"), {"checkpointer": ck}).optimizer
    stock = Training(Recipe(name="stock")).optimizer
    public = {name for name in dir(stock) if not name.startswith("_")}
    return {
        "is AdamW": isinstance(ours, torch.optim.AdamW),
        "is Optimizer": isinstance(ours, torch.optim.Optimizer),
        "names": [type(ours).__name__, type(stock).__name__],
        "modules": [type(ours).__module__, type(stock).__module__],
        "bases": type(ours).__bases__ == type(stock).__bases__,
        "missing": sorted(public - set(dir(ours))),
        "defaults": ours.defaults == stock.defaults,
    }


def state_dicts(root: str) -> dict[str, Any]:
    """A state dict goes from ours to Horovod's and back."""
    with saving(root) as ck:
        ours = Training(Recipe(name="ours"), {"checkpointer": ck, "every_n_steps": 1})
        ours.attach()
        for number in range(2):
            ours.iterate(number)
        stock = Training(Recipe(name="stock"))
        stock.optimizer.load_state_dict(cloned(ours.optimizer.state_dict()))
        stock.model.load_state_dict(ours.model.state_dict())
        stock.scheduler.load_state_dict(ours.scheduler.state_dict())
        there = digest(stock.optimizer.state_dict()) == digest(ours.optimizer.state_dict())
        ours.optimizer.load_state_dict(cloned(stock.optimizer.state_dict()))
        back = digest(stock.optimizer.state_dict()) == digest(ours.optimizer.state_dict())
        for run in (ours, stock):
            torch.manual_seed(5)
            run.iterate(2)
        on = digest(dict(ours.model.state_dict())) == digest(dict(stock.model.state_dict()))
        return {"there": there, "back": back, "on": on}


def broadcasts(root: str) -> dict[str, Any]:
    """`broadcast_parameters` and `broadcast_optimizer_state`, of a fresh optimizer and of a used one."""
    found: dict[str, Any] = {}
    with saving(root) as ck:
        for name, options in (("stock", None), ("ours", {"checkpointer": ck, "every_n_steps": 1})):
            run = Training(Recipe(name=f"broadcast-{name}", optimizer="Adam"), options)
            if options:
                run.attach()
            with torch.no_grad():
                for param in run.model.parameters():
                    param.add_(hvd.rank())
            hvd.broadcast_parameters(run.model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(run.optimizer, root_rank=0)
            torch.manual_seed(7)
            run.optimizer.zero_grad()
            run.iterate(0)
            run.optimizer.param_groups[0]["lr"] = 0.02 * (1 + hvd.rank())
            hvd.broadcast_optimizer_state(run.optimizer, root_rank=0)
            run.iterate(1)
            found[name] = digest([dict(run.model.named_parameters()), run.optimizer.state_dict()])
            found[f"{name} lr"] = run.optimizer.param_groups[0]["lr"]
    return found


def schedulers(root: str) -> dict[str, Any]:
    """Schedulers made before and after wrapping, ours and Horovod's; then ours goes back to a checkpoint."""
    found: dict[str, Any] = {}
    for when in ("before", "after"):
        found[f"stock {when}"] = _scheduled(when, None)[0]
        with saving(f"{root}-{when}") as ck:
            digests, run = _scheduled(when, {"checkpointer": ck, "every_n_steps": 2})
            found[f"ours {when}"] = digests
            ck.wait()  # type: ignore[union-attr]
            model, optimizer, scheduler = run
            assert optimizer.restore().step == 4
            again = [_trained(model, optimizer, scheduler, number) for number in (4, 5)]
            found[f"again {when}"] = again == digests[4:6]
    return found


def _scheduled(when: str, options: dict[str, Any] | None) -> tuple[list[str], Any]:
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    base = torch.optim.Adam(model.parameters(), lr=0.1)
    named = list(model.named_parameters(prefix=f"{when}-{options is None}"))
    scheduler: Any = None
    if when == "before":
        scheduler = torch.optim.lr_scheduler.StepLR(base, 2, gamma=0.5)
    optimizer = (
        hvd.DistributedOptimizer(base, named_parameters=named)
        if options is None
        else ckpt_horovod.DistributedOptimizer(base, named_parameters=named, **options)
    )
    if when == "after":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    if options is not None:
        optimizer.attach(model=model, scheduler=scheduler)
    count = 6 if options is None else 5
    digests = [_trained(model, optimizer, scheduler, number) for number in range(count)]
    if options is not None:
        digests.append(_trained(model, optimizer, scheduler, 5, end=False))
    return digests, (model, optimizer, scheduler)


def _trained(model: Any, optimizer: Any, scheduler: Any, number: int, end: bool = True) -> str:
    optimizer.zero_grad()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number * 10 + hvd.rank()))
    model(x).square().sum().backward()
    optimizer.step()
    scheduler.step()
    if end and hasattr(optimizer, "end_iteration"):
        optimizer.end_iteration()
    return digest([dict(model.named_parameters()), optimizer.state_dict()])


def used_before(root: str) -> dict[str, Any]:
    """An optimizer that has been stepped keeps its state when it is wrapped."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    base = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    base.step()
    before = digest(base.state_dict())
    with saving(root) as ck:
        named = model.named_parameters(prefix="used")
        ours = ckpt_horovod.DistributedOptimizer(base, named_parameters=named, checkpointer=ck)
    return {"kept": digest(ours.state_dict()) == before, "entries": len(ours.state)}


def errors(root: str) -> dict[str, list[str]]:
    """What Horovod refuses, in its own words: [ours, Horovod's]."""
    model = nn.Linear(3, 3)
    params, named = list(model.parameters()), list(model.named_parameters())
    cases: dict[str, dict[str, Any]] = {
        "duplicate names": {"named_parameters": [("a", params[0]), ("a", params[1])]},
        "unnamed": {"named_parameters": [("a", params[0])]},
        "not pairs": {"named_parameters": [params[0]]},
        "passes": {"named_parameters": named, "backward_passes_per_step": 0},
        "groups": {"named_parameters": named, "groups": -1},
    }
    with saving(root) as ck:
        ours = partial(ckpt_horovod.DistributedOptimizer, checkpointer=ck)
        ways = (ours, hvd.DistributedOptimizer)
        base = partial(torch.optim.SGD, params, lr=0.1)
        found = {
            name: [_error(partial(way, base(), **options)) for way in ways]
            for name, options in cases.items()
        }
        made = [_wrapped(way, f"errors{number}") for number, way in enumerate(ways)]
        found["zero_grad"] = [_error(partial(one.zero_grad, set_to_none=True)) for one in made]
        found["early"] = [_error(partial(_zero_grad_too_early, one)) for one in made]
    return found


def _wrapped(way: Callable[..., Any], prefix: str) -> Any:
    model = nn.Linear(3, 3)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    return way(base, list(model.named_parameters(prefix=prefix)))


def _zero_grad_too_early(optimizer: Any) -> None:
    loss = sum(param.sum() for group in optimizer.param_groups for param in group["params"])
    loss.backward()  # type: ignore[union-attr]
    try:
        optimizer.zero_grad()
    finally:
        optimizer.synchronize()


def _error(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as exc:
        text = str(exc)
        # The numbers of objects differ.
        return f"{type(exc).__name__}: {''.join(c for c in text if not c.isdigit())}"
    return ""


def names(root: str) -> list[str]:
    """What a step waits for, of all parameters: the names of leaves."""
    with saving(root) as ck:
        run = Training(Recipe(name="names"), {"checkpointer": ck, "every_n_steps": 1})
        run.attach()
        run.iterate(0)
        run.optimizer.end_iteration()
        tree = run.optimizer._tree
        return [name for param in run.model.parameters() for name in tree.names(param)]


def large(root: str, mode: str) -> dict[str, Any]:
    """Two steps of a state of some megabytes."""
    with saving(root, chunk_bytes="64KiB", staging_bytes="16MiB", eager_leaf_bytes="16KiB") as ck:
        assert ck is not None
        options = {"checkpointer": ck, "every_n_steps": 1, "layerwise": mode}
        training = Training(Recipe(name=f"large{mode}", width=700), options)
        training.attach()
        for number in range(2):
            training.iterate(number)
            training.optimizer.end_iteration()
        ck.wait()
        return {"steps": ck.steps()}


def shared(root: str) -> dict[str, Any]:
    """Six steps with a frozen layer, each committed before the next; the last one brings back the same."""
    settings: dict[str, Any] = {"share_unchanged": True, "keep_last": None, "rebase_every": 50}
    with saving(root, chunk_bytes="64KiB", staging_bytes="16MiB", **settings) as ck:
        assert ck is not None
        options = {"checkpointer": ck, "every_n_steps": 1, "layerwise": "in_step"}
        training = Training(Recipe(name="shared", width=300, trained_alone=True), options)
        training.attach()
        for number in range(6):
            training.iterate(number)
            training.optimizer.end_iteration()
            ck.wait()
        before = [param.detach().clone() for param in training.model.parameters()]
        training.iterate(6)
        training.optimizer.restore()
        after = list(training.model.parameters())
        return {
            "steps": ck.steps()[:6],
            "same": all(map(torch.equal, before, after)),
        }
