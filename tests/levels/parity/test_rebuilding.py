"""Parity: what any m nodes held comes back bit for bit, from sound bytes alone, or not at all."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from ckpt_core.errors import CorruptCheckpoint
from ckpt_core.levels.bring.fetching import Wanted, fetch
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.levels.far.door import Away, Readable
from ckpt_core.levels.parity.groups import Shape
from ckpt_core.levels.parity.objects import Group, Kept, directory_name, groups_kept
from ckpt_core.levels.parity.rebuilding import Node, ParityFar
from ckpt_core.store import step_path
from ckpt_core.system.files import Files
from tests.levels.making import CHUNK_BYTES
from tests.levels.parity.clusters import ATTEMPT, STEP, Cluster, contents, flip, others
from tests.store.harness import QuickFiles

SHAPES = [Shape(2, 1), Shape(3, 1), Shape(2, 2), Shape(3, 2)]


def parity_files(cluster: Cluster, n: int) -> list[Path]:
    return sorted((cluster.kept(n) / directory_name(STEP)).iterdir())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_nodes_that_are_lost_together_come_back_as_they_were(
    tmp_path: Path, shape: Shape
) -> None:
    cluster = Cluster(tmp_path / "all", shape)
    cluster.encode()
    whole = {n: cluster.contents(n) for n in range(shape.nodes)}
    for lost in combinations(range(shape.nodes), shape.m):
        here = Cluster(tmp_path / f"lost-{lost}", shape)
        for n in range(shape.nodes):
            cluster.kept(n).rename(here.kept(n))
        kept = {n: here.kept(n) for n in lost}
        for n in lost:
            kept[n].rename(tmp_path / f"aside-{n}")
        here.lose(*lost)
        for n in lost:
            assert here.far(n).steps() == {STEP: ATTEMPT}
            here.bring(n, tmp_path / f"back-{lost}-{n}")
            assert contents(tmp_path / f"back-{lost}-{n}") == whole[n]
        for n in lost:
            (tmp_path / f"aside-{n}").rename(kept[n])
        for n in range(shape.nodes):
            here.kept(n).rename(cluster.kept(n))


@pytest.mark.parametrize(
    "sizes", [(0, 0, 0), (0, 9 * CHUNK_BYTES, 1), (1, 1, 1), (CHUNK_BYTES, 5, 7 * CHUNK_BYTES + 3)]
)
def test_parts_of_any_length_are_padded(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    cluster = Cluster(tmp_path, Shape(2, 1), sizes=sizes)
    cluster.encode()
    for n in range(3):
        whole = cluster.contents(n)
        cluster.root(n).rename(tmp_path / "aside")
        cluster.bring(n, tmp_path / f"back-{n}")
        assert contents(tmp_path / f"back-{n}") == whole
        (tmp_path / "aside").rename(cluster.root(n))


def test_more_lost_nodes_than_there_is_parity_for_are_said_to_be_lost(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, Shape(3, 1))
    cluster.encode()
    cluster.lose(0, 2)
    assert cluster.far(0).steps() == {}


def test_what_not_all_have_made_parity_of_is_rebuilt_only_where_enough_is_left(
    tmp_path: Path,
) -> None:
    cluster = Cluster(tmp_path, Shape(2, 1))
    cluster.encode(1)
    # Node 1 keeps the parity of one stripe: the other block of node 0 is in that of node 2.
    cluster.lose(0)
    assert cluster.far(0).steps() == {}
    assert cluster.far(2).steps() == {}


@pytest.mark.parametrize("where", ["root", "stripe", "sums", "parts", "rank", "manifest"])
def test_damage_at_one_node_is_found_and_made_good_by_another(tmp_path: Path, where: str) -> None:
    cluster = Cluster(tmp_path, Shape(2, 2))
    cluster.encode()
    whole = cluster.contents(0)
    cluster.lose(0)
    for bad in others(cluster, [0]):
        if where == "root":
            (path,) = step_path(cluster.root(bad), STEP).glob("shard*")
            paths = [path]
        else:
            paths = [one for one in parity_files(cluster, bad) if one.name.startswith(where)]
        before = {path: path.read_bytes() for path in paths}
        for path in paths:
            for at in range(0, path.stat().st_size, 1500):
                flip(path, at)
        cluster.bring(0, tmp_path / f"back-{where}-{bad}")
        assert contents(tmp_path / f"back-{where}-{bad}") == whole
        for path, data in before.items():
            path.write_bytes(data)


def test_damage_that_nothing_makes_good_is_an_error_and_nothing_is_a_step(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, Shape(2, 1))
    cluster.encode()
    cluster.lose(0)
    (path,) = step_path(cluster.root(2), STEP).glob("shard*")
    for at in range(0, path.stat().st_size, 1500):
        flip(path, at)
    with pytest.raises(CorruptCheckpoint, match="root-2"):
        cluster.bring(0, tmp_path / "back")
    assert not (tmp_path / "back" / "manifest.json").exists()


def test_a_save_that_is_damaged_gets_no_parity(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, Shape(2, 1))
    (path,) = step_path(cluster.root(1), STEP).glob("shard*")
    flip(path, 5000)
    with pytest.raises(CorruptCheckpoint, match="root-1"):
        cluster.encode()
    assert not any(directory_name(STEP) in str(path) for path in cluster.kept(0).glob("par*"))


def test_parity_that_does_not_read_back_is_not_published(tmp_path: Path) -> None:
    class Bad(QuickFiles):
        def create(self, path: Path, *, direct: bool = False) -> int:
            self.bad = ".stripe" in path.name
            return super().create(path, direct=direct)

        def sync(self, fd: int) -> None:
            if self.bad:
                self.pwrite(fd, b"\xff\x00\xff", 5)
            super().sync(fd)

    cluster = Cluster(tmp_path, Shape(2, 1))
    with pytest.raises(Away, match="Look for a disk that damages bytes"):
        cluster.encode(0, files=Bad())
    assert DirectoryFar(cluster.kept(0), files=Files()).directories() == {}


def test_a_node_that_is_away_with_what_may_be_newer_is_waited_for(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, Shape(2, 1))
    cluster.encode(1)
    with cluster.far(0) as far:
        _away(far._nodes[1])
        with pytest.raises(Away, match="gone"):
            far.steps()
    cluster.encode()
    with Cluster(tmp_path / "2", Shape(2, 2)).far(0) as far:
        assert far.steps() == {}


def _away(node: object) -> None:
    class Gone:
        url = "peer://gone"

        def steps(self) -> dict[int, str]:
            raise Away("gone")

        def close(self) -> None:
            pass

    node.root = Gone()  # type: ignore[attr-defined]


def test_parity_of_another_save_or_of_another_group_is_not_taken_for_it(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, Shape(2, 1))
    cluster.encode()
    cluster.lose(0)
    (name,) = DirectoryFar(cluster.kept(1), files=Files()).directories().values()
    about = Kept.read(DirectoryFar(cluster.kept(1), files=Files()), name).about
    assert groups_kept(cluster.kept(1)) == {cluster.group.parts} == {about.parts}
    other = Cluster(tmp_path / "other", Shape(2, 1))
    assert other.group.copy(cluster.save) == name
    swapped = type(cluster.group)(Shape(2, 1), cluster.group.parts[::-1])
    assert swapped.copy(cluster.save) != name
    # Another save of the step has taken the place at a node.
    step_path(cluster.root(1), STEP).rename(tmp_path / "aside")
    found: Readable = cluster.far(0)
    assert found.steps() == {}


def test_parity_that_lies_in_several_places_is_found_in_the_right_one(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, Shape(2, 1))
    cluster.encode()
    before = cluster.contents(2)
    cluster.lose(2)
    nodes = []
    for n, part in enumerate(cluster.group.parts[:2]):
        nodes.append(Node(part, DirectoryFar(cluster.root(n), files=QuickFiles()), None))
        nodes.append(Node(part, None, DirectoryFar(cluster.kept(n), files=QuickFiles())))
    # What a machine kept in another place of the ring, under a name that is another one's now.
    other = Cluster(tmp_path / "other", Shape(2, 1))
    other.group = Group(other.group.shape, ("node-00000", "node-00002", "node-00003"))
    other.encode(0)
    nodes.append(Node("node-00000", None, DirectoryFar(other.kept(0), files=QuickFiles())))
    with ParityFar("peers:///run", "node-00002", nodes) as far:
        assert far.steps() == {STEP: ATTEMPT}
        into = tmp_path / "into"
        into.mkdir()
        fetch(far, Wanted(cluster.save, into, (2,), 3, 1.0), lambda *_: None, files=QuickFiles())
    assert contents(into) == before
