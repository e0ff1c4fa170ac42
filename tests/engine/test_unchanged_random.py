"""Whatever changes a leaf, and whatever becomes of other steps: every step equals its own reference."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_core import Checkpointer, NotCommitted, Options, load, verify
from ckpt_core.save import still_files
from ckpt_core.store import step_path
from tests import places

STEPS = 30
SEEDS = 4


class Model(nn.Module):
    """Tied weights, a view of a weight, and room for an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 40)
        self.layers = nn.ModuleList([nn.Linear(40, 40) for _ in range(4)])
        self.head = nn.Linear(40, 60, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("statistics", torch.zeros(500))


class Training:
    """A state and everything that may be done to it between two saves."""

    def __init__(self, dice: random.Random) -> None:
        torch.manual_seed(dice.randrange(1000))
        self.dice = dice
        self.model = Model()
        self.numbers = torch.zeros(2000)
        self.alias = self.numbers.numpy()
        self.view = self.model.layers[0].weight.detach().view(-1)[100:300]
        self.optimizers = [
            torch.optim.AdamW(self.model.layers[1].parameters(), fused=True),
            torch.optim.AdamW(self.model.layers[2].parameters(), foreach=True),
            torch.optim.SGD([self.model.embedding.weight], lr=0.1),
        ]
        self.ways: list[Callable[[], Any]] = [
            *(lambda one=one: self._step(one) for one in self.optimizers),
            lambda: self.model.layers[3].weight.data.add_(1),
            lambda: self.alias.__setitem__(dice.randrange(2000), dice.random()),
            lambda: self.view.mul_(1.5),
            lambda: self.model.embedding.weight.data[dice.randrange(60)].add_(1),
            lambda: self.model.statistics.add_(1),
            self._replace,
        ]

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, self.dice.random())
        optimizer.step()

    def _replace(self) -> None:
        old = self.model.layers[3].bias
        self.model.layers[3].bias = nn.Parameter(torch.full_like(old, self.dice.random()))

    @property
    def state(self) -> dict[str, Any]:
        # Plain tensors, so that each is a leaf whose only barrier is the one below.
        return {"model": self.model, "numbers": self.numbers, "optimizers": self.optimizers}

    def reference(self) -> dict[str, torch.Tensor]:
        tensors = {**self.model.state_dict(), "numbers": self.numbers}
        for index, optimizer in enumerate(self.optimizers):
            for key, values in optimizer.state_dict()["state"].items():
                tensors |= {f"{index}.{key}.{name}": value for name, value in values.items()}
        return {
            name: value.detach().clone()
            for name, value in tensors.items()
            if isinstance(value, torch.Tensor)
        }


def read_back(path: Path) -> dict[str, torch.Tensor]:
    tree = load(path)
    tensors = {**tree["model"], "numbers": tree["numbers"]}
    for index, optimizer in enumerate(tree["optimizers"]):
        for key, values in optimizer["state"].items():
            tensors |= {f"{index}.{key}.{name}": value for name, value in values.items()}
    return {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}


def options_of(dice: random.Random) -> Options:
    return Options(
        share_unchanged=True,
        rebase_every=dice.choice((2, 5, 50)),
        keep_last=dice.choice((1, 3, None)),
        keep_every=dice.choice((None, 4)),
        in_flight=dice.choice((1, 2, 3)),
        chunk_bytes=dice.choice((4096, 16384, "8MiB")),
        writers=dice.choice((1, 3)),
        eager_leaf_bytes=dice.choice((0, 200, 4000)),
        checksum=dice.random() < 0.8,
        direct_io=dice.choice(("auto", "off")),
        timeout=60,
    )


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_step_equals_its_reference(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(f"{places.run_number()} unchanged {seed}")
    # Writers help to compare, however small the files are.
    monkeypatch.setattr(still_files, "_helpers", lambda nbytes, pipeline: seed % 3)
    shared = 0
    training, expected = Training(dice), dict[int, Any]()
    busy = dice.sample(training.ways, dice.randrange(1, 4))
    step = 0
    for _ in range(2):  # two processes, one after the other
        with Checkpointer(tmp_path, options_of(dice)) as ck:
            for _ in range(STEPS // 2):
                step = max(step + dice.choice((1, 1, 1, 2, 0, -1)), 0)
                expected[step] = training.reference()
                ck.save(step, training.state)
                do_something_else(ck, tmp_path, dice)
                ck.wait_staged()
                for way in (*busy, *dice.sample(training.ways, dice.choice((0, 0, 0, 1)))):
                    way()
            ck.wait()
        shared += check(tmp_path, expected)
    print(f"seed {seed}: {shared} files with several names")


def do_something_else(ck: Checkpointer, root: Path, dice: random.Random) -> None:
    """Now and then a step goes by hand, or one is pinned."""
    steps = ck.steps()
    if not steps or dice.random() < 0.8:
        return
    step = dice.choice(steps)
    if dice.random() < 0.5:
        shutil.rmtree(step_path(root, step), ignore_errors=True)
        return
    with contextlib.suppress(NotCommitted):  # retired meanwhile
        ck.pin(step)


def check(root: Path, expected: dict[int, Any]) -> int:
    """Every step there is is whole; how many files have several names."""
    for path in root.glob("step-*"):
        step = int(path.name.removeprefix("step-"))
        found, wanted = read_back(path), expected[step]
        assert found.keys() == wanted.keys()
        wrong = [name for name in wanted if not torch.equal(found[name], wanted[name])]
        assert not wrong, f"step {step}: {wrong}"
        assert verify(path).ok
    return sum(path.stat().st_nlink > 1 for path in root.glob("step-*/shard-*"))
