"""Steps of several ranks for the tests of the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.restore.ranks import Job

GOLDEN = Path(__file__).parents[1] / "compat" / "golden-v2" / "step-000000000007"

_SEEN = torch.arange(6000.0).view(60, 100)
BOXED = {
    "columns": torch.arange(7 * 50, dtype=torch.int16).view(7, 50),
    "cube": torch.arange(6 * 5 * 9, dtype=torch.float64).view(6, 5, 9),
}
JOB = Job(
    world=4,
    replicated={
        "weight": torch.arange(40_000.0).view(200, 200),
        "seen": {"whole": _SEEN, "column": _SEEN[:, 5]},
        "bias": torch.arange(200.0),
        "none": torch.ones(0, 3),
        "epoch": 3,
    },
    private=lambda rank: {"order": torch.arange(500) * (rank + 1), "seen": 10 + rank},
    boxed=BOXED,
    dim=1,
)
ALIKE = replace(JOB, private=lambda rank: {"order": torch.arange(500), "seen": 10})


def same(a: Any, b: Any) -> bool:
    """Every bit of two tensors is the same."""
    return bool(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b))


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a tree of dicts, by path."""
    for key, value in tree.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            yield from flat(value, name)
        elif isinstance(value, torch.Tensor):
            yield name, value


def diff(cli: Callable[..., Any], a: Path, b: Path) -> Any:
    """What `diff --json` says."""
    answer = cli("diff", a, b, "--json")
    assert answer.code < 2, answer.err
    found = json.loads(answer.out)
    assert answer.code == (0 if found["same"] else 1)
    return found
