"""Scrub of a root with parity: both the steps and the parity are read, and each repairs the other."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt_core.levels import Scrubbed, places_of, scrub
from ckpt_core.levels.parity.groups import Shape
from ckpt_core.restore import verify
from ckpt_core.store import step_path
from tests.levels.parity.clusters import STEP, contents, flip
from tests.levels.parity.serving import ServedCluster, served
from tests.levels.servers.moto import needs_store

pytestmark = needs_store


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ServedCluster]:
    with served(tmp_path, Shape(2, 1)) as cluster:
        yield cluster


def scrubbed(cluster: ServedCluster, n: int, *, dry_run: bool = False) -> list[Scrubbed]:
    places = places_of(cluster.root(n))
    return [*scrub(places, progress=lambda *_: None, dry_run=dry_run)]


def test_a_sound_root_and_the_parity_that_it_keeps_are_read(cluster: ServedCluster) -> None:
    found = scrubbed(cluster, 1)
    assert [(one.url, one.copy.target) for one in found] == [
        (str(cluster.root(1)), f"step-{STEP:012d}"),
        (str(cluster.kept(1)), f"parity-{STEP:012d}"),
    ]
    assert all(one.ok and not one.damage and one.checked_bytes > 0 for one in found)


def test_what_is_here_is_read_though_a_node_of_the_group_is_away(cluster: ServedCluster) -> None:
    cluster.servers[2].close()
    assert [one.ok for one in scrubbed(cluster, 0)] == [True, True]
    flip(step_path(cluster.root(0), STEP) / "shard-00000-0.safetensors", 5000)
    root, kept = scrubbed(cluster, 0)
    assert kept.ok and not root.ok and root.damage
    assert "does not answer" in root.left or "no other place" in root.left


def test_a_damaged_step_of_the_root_is_rebuilt_from_the_group(cluster: ServedCluster) -> None:
    step, before = step_path(cluster.root(1), STEP), cluster.contents(1)
    flip(step / "shard-00001-0.safetensors", 5000)
    looked = scrubbed(cluster, 1, dry_run=True)
    assert [one.ok for one in looked] == [False, True] and not verify(step).ok
    root, kept = scrubbed(cluster, 1)
    assert root.damage and root.source == f"parity://{cluster.root(1)}" and not kept.damage
    assert cluster.contents(1) == before


def stripe(folder: Path) -> None:
    flip(next(folder.glob("stripe-*")), 1000)


def sums(folder: Path) -> None:
    flip(next(folder.glob("sums-*")), 3)


def parts(folder: Path) -> None:
    (folder / "parts").unlink()


def ranks(folder: Path) -> None:
    flip(folder / "rank-00000.json", 30)


def manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{}")


@pytest.mark.parametrize("harm", [stripe, sums, parts, ranks, manifest])
def test_damaged_parity_is_made_again_of_the_steps_of_the_group(
    cluster: ServedCluster, harm: Callable[[Path], None]
) -> None:
    folder = cluster.parity(2)
    before = contents(folder)["stripe-02"]
    harm(folder)
    assert [one.ok for one in scrubbed(cluster, 2, dry_run=True)] == [True, False]
    root, kept = scrubbed(cluster, 2)
    assert not root.damage and kept.damage and kept.ok, kept
    assert kept.source == "the steps of its 3 nodes"
    assert contents(folder)["stripe-02"] == before
    assert verify(folder).ok and not any(one.damage for one in scrubbed(cluster, 2))


def test_what_cannot_be_made_again_stays_and_says_why(cluster: ServedCluster) -> None:
    stripe(cluster.parity(0))
    flip(step_path(cluster.root(1), STEP) / "shard-00001-0.safetensors", 5000)
    _, kept = scrubbed(cluster, 0)
    assert not kept.ok and "shard-00001-0.safetensors" in kept.left, "that one is scrubbed first"
    shutil.rmtree(step_path(cluster.root(1), STEP))
    _, kept = scrubbed(cluster, 0)
    assert not kept.ok and "node-00001 does not hold step 7 any more" in kept.left
    assert cluster.parity(0).is_dir() and not list((cluster.kept(0) / ".inflight").iterdir())
