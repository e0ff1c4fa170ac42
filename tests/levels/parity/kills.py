"""Kills whoever makes parity, or rebuilds from it, at one file operation after another.

A process of its own without torch, which forks a child for each life: that takes milliseconds.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.levels.parity.groups import Shape
from ckpt_core.levels.parity.objects import directory_name
from ckpt_core.system.files import Files
from tests import places
from tests.levels.killing import KillAt, child
from tests.levels.parity.clusters import Cluster, contents
from tests.store.harness import NoExchange, QuickFiles, interrupted

_NEVER = 1_000_000
SHAPE = Shape(2, 1)


def prepared(folder: Path, scenario: str) -> None:
    """What is there before somebody is killed."""
    cluster = Cluster(folder, SHAPE)
    if scenario == "encode":
        cluster.encode(1, 2)
    else:
        cluster.encode()
        cluster.root(0).rename(folder / "lost")


def act(cluster: Cluster, scenario: str, files: Files) -> None:
    if scenario == "encode":
        cluster.encode(0, files=files)
    else:
        cluster.bring(0, cluster.folder / "back", files=files)


def check(cluster: Cluster, scenario: str, what: str) -> bool:
    """Whether it is there; if it is, it is whole."""
    if scenario == "encode":
        there = DirectoryFar(cluster.kept(0), files=QuickFiles()).directories()
        return there == {directory_name(7): cluster.group.copy(cluster.save)}
    back = cluster.folder / "back"
    if (back / "manifest.json").exists():
        whole = contents(cluster.folder / "lost" / "step-000000000007")
        found = contents(back)
        # Its manifest is written in place: whoever brings it publishes the directory, once it is whole.
        assert {**found, "manifest.json": b""} == {**whole, "manifest.json": b""}, what
        return found == whole
    return False


def rebuilt(cluster: Cluster, scenario: str, what: str) -> None:
    """All goes on after it, and what was lost is as it was."""
    if scenario == "encode":
        cluster.encode(0)
        for n in (1, 2):
            whole = cluster.contents(n)
            cluster.root(n).rename(cluster.folder / "aside")
            cluster.bring(n, cluster.folder / f"back-{n}")
            assert contents(cluster.folder / f"back-{n}") == whole, what
            (cluster.folder / "aside").rename(cluster.root(n))
    else:
        cluster.bring(0, cluster.folder / "again")
        assert contents(cluster.folder / "again") == contents(
            cluster.folder / "lost" / "step-000000000007"
        ), what


def main(place: Path, scenario: str, kind: str, most: int) -> int:
    """How many kills there were."""
    base = {"exchange": QuickFiles, "two": NoExchange}[kind]
    prepared(place / "prepared", scenario)
    here, count_file, kills = place / "now", place / "count", 0

    def cluster() -> Cluster:
        return Cluster(here, SHAPE, fresh=False)

    def lived(n: int) -> int:
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(place / "prepared", here)
        switch = KillAt(n)

        def life() -> None:
            act(cluster(), scenario, interrupted(base, switch))
            count_file.write_text(str(switch.count))

        return child(life)

    assert lived(_NEVER) == 0 and check(cluster(), scenario, "no kill")
    for n in places.some(range(int(count_file.read_text())), most, of=f"parity {scenario} {kind}"):
        what = f"{scenario}, {kind}: killed before operation {n}"
        if lived(n) == 0:
            continue
        kills += 1
        check(cluster(), scenario, what)
        rebuilt(cluster(), scenario, what)
    return kills


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))))
