"""Parts of a step at several places are one step, once all of them are there."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_core.errors import CorruptCheckpoint, NotCommitted
from ckpt_core.layout import Manifest
from ckpt_core.levels.bring.fetching import Wanted, fetch
from ckpt_core.levels.bring.joined import JoinedFar
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.levels.far.door import Away
from ckpt_core.levels.parity.groups import Shape
from ckpt_core.levels.parity.rebuilding import Node, ParityFar
from ckpt_core.levels.tokens import TOKEN_VARIABLE
from ckpt_core.store import step_path
from tests.levels.parity.clusters import ATTEMPT, STEP, Cluster, contents, flip
from tests.levels.servers.moto import needs_store
from tests.levels.servers.peer import TOKEN
from tests.store.harness import QuickFiles


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """Three nodes, of a rank each."""
    return Cluster(tmp_path, Shape(2, 1))


def joined(*roots: Path) -> JoinedFar:
    return JoinedFar("peers:///run", [DirectoryFar(root, files=QuickFiles()) for root in roots])


def bring(far: JoinedFar, cluster: Cluster) -> dict[str, bytes]:
    """All of it, to a root of another number of ranks."""
    into = step_path(cluster.folder / "brought", STEP)
    into.mkdir(parents=True)
    fetch(far, Wanted(cluster.save, into, (), 2, 0.1), lambda *_: None, files=QuickFiles())
    manifest = Manifest.decode((into / "manifest.json").read_bytes(), path=into)
    assert [row.rank for row in manifest.ranks] == [0, 1, 2] and manifest.attempt == ATTEMPT
    return contents(into)


def test_all_parts_together_are_the_step_bit_for_bit(cluster: Cluster) -> None:
    far = joined(*(cluster.root(n) for n in range(3)))
    assert far.steps() == {STEP: ATTEMPT}
    parts = [cluster.contents(n) for n in range(3)]
    told = [Manifest.decode(part["manifest.json"], path=cluster.folder) for part in parts]
    found = bring(far, cluster)
    manifest = Manifest.decode(found.pop("manifest.json"), path=cluster.folder)
    assert manifest.state_bytes == sum(one.state_bytes for one in told)
    whole = {name: data for part in parts for name, data in part.items()}
    del whole["manifest.json"]
    assert found == whole and len(whole) == 6


def test_a_step_of_which_a_part_is_nowhere_is_not_there(cluster: Cluster) -> None:
    far = joined(cluster.root(0), cluster.root(1))
    assert far.steps() == {} and far.manifest(f"step-{STEP:012d}") is None
    with pytest.raises(NotCommitted):
        bring(far, cluster)


def test_a_copy_does_where_a_root_is_gone_or_damaged(cluster: Cluster) -> None:
    copy, whole = cluster.folder / "copy", bring(joined(*map(cluster.root, range(3))), cluster)
    shutil.rmtree(cluster.folder / "brought")
    shutil.copytree(cluster.root(2), copy)
    flip(step_path(cluster.root(2), STEP) / "rank-00002.json", 5)
    places = [*(cluster.root(n) for n in range(3)), copy]
    assert bring(joined(*places), cluster) == whole
    shutil.rmtree(cluster.folder / "brought")
    cluster.lose(2)
    assert joined(*places).steps() == {STEP: ATTEMPT}
    assert bring(joined(*places), cluster) == whole


def damage(shard: Path, how: str) -> None:
    """Bytes of it are others, or it ends too early, or is gone."""
    if how == "flipped":
        flip(shard, shard.stat().st_size // 2)
    elif how == "cut":
        os.truncate(shard, 5)
    else:
        shard.unlink()


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_where_a_shard_is_damaged_in_a_root_its_bytes_come_from_the_copy(
    cluster: Cluster, how: str
) -> None:
    copy, whole = cluster.folder / "copy", bring(joined(*map(cluster.root, range(3))), cluster)
    shutil.rmtree(cluster.folder / "brought")
    shutil.copytree(cluster.root(2), copy)
    (shard,) = step_path(cluster.root(2), STEP).glob("shard-*")
    damage(shard, how)
    places = [*(cluster.root(n) for n in range(3)), copy]
    assert bring(joined(*places), cluster) == whole
    shutil.rmtree(cluster.folder / "brought")
    (shard,) = step_path(copy, STEP).glob("shard-*")
    damage(shard, "flipped")
    if how == "flipped":
        with pytest.raises(CorruptCheckpoint, match="shard-00002"):
            bring(joined(*places), cluster)
    else:
        with pytest.raises((Away, CorruptCheckpoint)):
            bring(joined(*places), cluster)


@pytest.mark.parametrize("name", ["shard-00001-0.safetensors", "rank-00001.json"])
def test_where_a_root_is_damaged_parity_gives_back_what_it_should_have(
    cluster: Cluster, name: str
) -> None:
    cluster.encode()
    whole = bring(joined(*map(cluster.root, range(3))), cluster)
    shutil.rmtree(cluster.folder / "brought")
    flip(step_path(cluster.root(1), STEP) / name, 70)
    roots = [DirectoryFar(cluster.root(n), files=QuickFiles()) for n in range(3)]
    made = ParityFar("peers:///run", "node-00001", [node(cluster, n) for n in (0, 2)])
    found = bring(JoinedFar("peers:///run", roots, rest=[made]), cluster)
    del found["manifest.json"], whole["manifest.json"]  # it has the time at one of the nodes
    assert found == whole


def node(cluster: Cluster, n: int) -> Node:
    root, kept = cluster.root(n), cluster.kept(n)
    fars = [DirectoryFar(path, files=QuickFiles()) for path in (root, kept)]
    return Node(f"node-{n:05d}", *fars)


def test_parity_gives_back_the_part_of_a_root_that_is_gone(cluster: Cluster) -> None:
    cluster.encode()
    whole = bring(joined(*map(cluster.root, range(3))), cluster)
    shutil.rmtree(cluster.folder / "brought")
    cluster.lose(1)
    roots = [DirectoryFar(cluster.root(n), files=QuickFiles()) for n in (0, 2)]
    nodes = [
        Node(part, roots[at], DirectoryFar(cluster.kept(n), files=QuickFiles()))
        for at, (part, n) in enumerate([("node-00000", 0), ("node-00002", 2)])
    ]
    lost = ParityFar("peers:///run", "node-00001", [*nodes, Node("node-00009", None, None)])
    far = JoinedFar("peers:///run", [roots[0], lost, roots[1]])
    assert far.steps() == {STEP: ATTEMPT}
    assert bring(far, cluster) == whole


def test_parts_of_different_saves_are_no_step(cluster: Cluster) -> None:
    shutil.rmtree(cluster.root(2))
    other = Cluster(cluster.folder / "other", Shape(2, 1))
    manifest = step_path(other.root(2), STEP) / "manifest.json"
    manifest.write_text(manifest.read_text().replace(ATTEMPT, f"{STEP:012d}-ffffffff"))
    assert joined(cluster.root(0), cluster.root(1), other.root(2)).steps() == {}


@pytest.mark.parametrize("later", ["00000000", "ffffffff"])
def test_of_two_saves_of_a_step_the_one_made_last_counts(cluster: Cluster, later: str) -> None:
    attempt = f"{STEP:012d}-{later}"
    copies = [cluster.folder / f"copy-{n}" for n in range(3)]
    for n, copy in enumerate(copies):
        shutil.copytree(cluster.root(n), copy)
        path = step_path(cluster.root(n), STEP) / "manifest.json"
        before = Manifest.decode(path.read_bytes(), path=path)
        again = replace(before, attempt=attempt, created_unix_s=before.created_unix_s + 1.0)
        path.write_bytes(again.encode())
    roots = [cluster.root(n) for n in range(3)]
    assert joined(*roots, *copies).steps() == {STEP: attempt} == joined(*copies, *roots).steps()


@needs_store
def test_a_place_that_does_not_answer_is_not_taken_for_one_that_has_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpt_core.levels.far.plain import PlainFar

    monkeypatch.setenv(TOKEN_VARIABLE, str(cluster.folder / "token"))
    (cluster.folder / "token").touch(mode=0o600)
    (cluster.folder / "token").write_text(TOKEN)
    away = PlainFar("peer://127.0.0.1:1/run/root-of-node-00002", request_s=0.5)
    here = [DirectoryFar(cluster.root(n), files=QuickFiles()) for n in range(3)]
    assert JoinedFar("peers:///run", [*here, away]).steps() == {STEP: ATTEMPT}
    with pytest.raises(Away):
        JoinedFar("peers:///run", [*here[:2], away]).steps()
