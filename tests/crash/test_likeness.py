"""Killed roots count as alike only if they are the same but for what is drawn at random, and for times."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.likeness import likeness
from tests.crash.scenarios import SCENARIOS, Scenario

HISTORY = SCENARIOS["retire_and_recycle"]


def prepared(place: Path, plan: Scenario = HISTORY) -> Path:
    """A root with steps, a slot to write over, and something left in flight."""
    plan.prepare(place)
    steps = sorted(place.glob("step-*"))
    (place / ".inflight" / "000000000030-0123abcd").mkdir()
    shutil.copytree(steps[0], place / ".inflight" / "000000000010-0123abcd.replaced")
    return place


def test_two_runs_of_one_history_are_alike(tmp_path: Path) -> None:
    first, second = prepared(tmp_path / "first"), prepared(tmp_path / "second")
    assert list(first.glob(".slots/*"))
    assert likeness(first) == likeness(second) == likeness(first)
    shutil.copytree(first, tmp_path / "copy")
    assert likeness(tmp_path / "copy") == likeness(first)


def flip(root: Path) -> None:
    shard = max(root.glob("step-*/shard-*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def cut(root: Path) -> None:
    manifest = max(root.glob("step-*/manifest.json"))
    manifest.write_bytes(manifest.read_bytes()[:-9])


def other_attempt(root: Path) -> None:
    """One of two names that had the same id gets another."""
    left = root / ".inflight" / "000000000030-0123abcd"
    left.rename(left.with_name("000000000030-0123abce"))


def newer(root: Path) -> None:
    manifest = min(root.glob("step-*/manifest.json"))
    os.utime(manifest, ns=(2**61, 2**61))


CHANGES: list[Callable[[Path], object]] = [
    flip,
    cut,
    other_attempt,
    newer,
    lambda root: (root / ".inflight" / "000000000030-0123abcd").rmdir(),
    lambda root: (root / "step-000000000010").rename(root / "step-000000000011"),
    lambda root: min(root.glob(".slots/*")).unlink(),
    lambda root: (root / ".inflight" / "000000000030-0123abcd" / "empty").touch(),
    lambda root: (root / "latest").symlink_to("step-000000000010"),
]


@pytest.mark.parametrize("change", range(len(CHANGES)))
def test_any_other_difference_counts(change: int, tmp_path: Path) -> None:
    root = prepared(tmp_path / "root")
    before = likeness(root)
    CHANGES[change](root)
    assert likeness(root) != before
