"""A state that is a function of (step, mark), so that any torn mixture of two of them shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ckpt_core import load
from ckpt_core.options import Options
from ckpt_core.types import step_dir_name

Tree = dict[str, Any]

NAMES = frozenset({"manifest.json", "rank-00000.json", "shard-00000-0.safetensors"})
SECOND = "shard-00000-1.safetensors"
HOUSEKEEPING = frozenset({".inflight", ".slots", ".lock", ".pins", ".corrupt"})


def make_state(step: int, mark: int = 0, *, rows: int = 2, base: bool = False) -> Tree:
    """Some kilobytes in several chunks: large leaves, small ones, and plain values.

    Args:
        base: with a leaf that is the same at every step.
    """
    seed = step * 1000 + mark
    return {
        "weight": torch.arange(rows * 1000, dtype=torch.float32) + seed,
        "moment": torch.full((rows * 700,), float(seed), dtype=torch.float64),
        "buffer": torch.tensor([seed, -seed]),
        "step": step,
        "mark": mark,
        "notes": [f"step {step}", {"mark": mark}],
        **({"base": torch.arange(3000, dtype=torch.float32).sin()} if base else {}),
    }


def blank_like(tree: Any) -> Any:
    """The same tree, of zeros."""
    if isinstance(tree, torch.Tensor):
        return torch.zeros_like(tree)
    if isinstance(tree, dict):
        return {key: blank_like(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [blank_like(value) for value in tree]
    return type(tree)()


def describe(tree: Tree) -> tuple[int, int]:
    """(step, mark) of a state, once every bit of it has been checked."""
    step, mark = tree["step"], tree["mark"]
    rows = tree["weight"].numel() // 1000
    assert_same(tree, make_state(step, mark, rows=rows, base="base" in tree))
    return step, mark


def assert_same(got: Any, expected: Any, place: str = "state") -> None:
    """Every bit of two trees is the same."""
    assert type(got) is type(expected), place
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype and got.shape == expected.shape, place
        assert torch.equal(got, expected), f"{place} is torn"
    elif isinstance(expected, dict):
        assert list(got) == list(expected), place
        for key, value in expected.items():
            assert_same(got[key], value, f"{place}.{key}")
    elif isinstance(expected, list):
        assert len(got) == len(expected), place
        for index, value in enumerate(expected):
            assert_same(got[index], value, f"{place}[{index}]")
    else:
        assert got == expected, place


def step_state(root: Path, step: int) -> tuple[int, int]:
    """(step, mark) of a committed step, read back whole."""
    found = describe(load(root / step_dir_name(step)))
    assert found[0] == step, f"{root} holds the state of step {found[0]} as step {step}"
    return found


def options(**changes: Any) -> Options:
    """Small chunks, so that a state of some kilobytes has several."""
    settings: dict[str, Any] = {
        "in_flight": 2,
        "chunk_bytes": 4096,
        "writers": 1,
        "readers": 1,
        "keep_last": 2,
        "eager_leaf_bytes": 512,
        "timeout": 30,
    }
    return Options(**(settings | changes))
