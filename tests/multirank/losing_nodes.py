"""Nodes that keep one another's steps, and lose one after the other with its disk, at moments of chance.

    python -m tests.multirank.losing_nodes SEED LOSSES [--nodes 4] [--parity k+m] [--place DIR]

Each loss ends the whole job: SIGKILL for the node's trainer and agent, its directory is deleted, and the
other trainers are killed; their agents live on. A fresh node with another name takes its place. With parity
one node of each group is lost, or two at once where there is parity for two. One loss in three is that of
nodes that are being filled, and one in three comes while no save waits for copies. Each line says what was
lost when, the step that the job went on from, and the newest one before that had reached its peers on all
ranks (or was agreed on, where no save waited). What is older, or not bit-identical, ends it with an error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckpt_core.levels.parity.groups import Shape
from tests.crash.warm import Warm
from tests.levels.trainers import processes, until
from tests.multirank.crew import all_well
from tests.multirank.peer_jobs import TOKEN

HOWS = ("behind", "waiting", "filling")
"""No save waits for copies; each save waits; those lost last are lost again while they are filled."""


@contextmanager
def a_place(folder: Path) -> Iterator[None]:
    """A directory with a token in it and one for each node; all that runs there ends with it."""
    (folder / TOKEN).touch(mode=0o600)
    (folder / TOKEN).write_text("0123456789" * 4)
    try:
        yield
    finally:
        for home in folder.iterdir():
            end(home)


def end(home: Path) -> None:
    """All that runs on a node."""
    for pid in processes(home / "root"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not processes(home / "root"), "the end of the agent")


def run(warm: Warm, name: str, place: Path, nodes: list[str], **more: Any) -> list[Any]:
    """What each rank of a job says, one rank on each node; of `peer_jobs` where no module is named."""
    module, _, function = name.rpartition(":")
    return warm.call(
        "tests.multirank.crew:run_ranks",
        call=f"tests.multirank.{module or 'peer_jobs'}:{function}",
        world_size=len(nodes),
        nodes=nodes,
        arguments={"place": str(place), **more},
    )


def lose_nodes(
    warm: Warm, place: Path, seed: str, *, nodes: int, losses: int, shape: str = ""
) -> Iterator[dict[str, Any]]:
    """Lose nodes so many times, one after the other, and go on; what became of each.

    Args:
        shape: of the parity that they keep; "": copies.

    Raises:
        AssertionError: something was lost that must not be, or came back with other bytes.
    """
    chance = random.Random(f"{seed} {nodes} {shape}".strip())
    names, least, lost = [f"node{n}" for n in range(nodes)], 0, [0]
    groups = groups_of(nodes, shape)
    for number in range(losses):
        how = HOWS[number % len(HOWS)]
        victims = _again(chance, lost, groups) if how == "filling" else _some(chance, groups)
        for left in place.glob("rank-*.pid"):
            left.unlink()
        told = {"victims": victims, "early": how == "filling", "waits": how != "behind"}
        told |= {"seed": chance.randrange(1 << 30), "pause_s": chance.choice([0.0, 0.3])}
        loss = {"nodes": names, **told}
        outcomes = run(warm, "train_until_lost", place, names, shape=shape, loss=loss)
        assert not any(one["problem"] for one in outcomes), f"{told}: {outcomes}"
        begun = [_number(place / f"begun-{rank}") for rank in range(nodes)]
        if how != "filling":
            assert min(begun) == max(begun) >= least, f"{told}: from {begun}, and not from {least}"
        gone = [names[victim] for victim in victims]
        yield {"how": how, "lost": gone, "begun": min(begun), "least": least}
        least = min(_number(place / f"reached-{rank}") for rank in range(nodes))
        lost = victims
        for victim in victims:
            names[victim] = f"fresh-{number}-{victim}"
    found = all_well(run(warm, "save_and_reach", place, names, shape=shape, steps=[]))
    begun = sorted({one["begun"] for one in found})
    assert len(begun) == 1 and begun[0] >= least > 0, f"from {begun}, and not from {least}"


def groups_of(nodes: int, shape: str) -> list[tuple[list[int], int]]:
    """The ranks of each group of which some may be lost together, and how many."""
    if not shape:
        return [([*range(nodes)], 1)]
    found = Shape.parse(shape)
    count = nodes // found.nodes
    return [([*range(nodes)[number::count]], found.m) for number in range(count)]


def _some(chance: random.Random, groups: list[tuple[list[int], int]]) -> list[int]:
    """Those that are lost: of each group as many as may be, or fewer, and at least one in all."""
    while True:
        found = [
            chance.sample(ranks, chance.choice([most, most, most - 1])) for ranks, most in groups
        ]
        if lost := [rank for some in found for rank in some]:
            return lost


def _again(
    chance: random.Random, lost: list[int], groups: list[tuple[list[int], int]]
) -> list[int]:
    """The same once more, and of each group one that was not lost, as long as it may be."""
    found: list[int] = []
    for ranks, most in groups:
        again = [rank for rank in ranks if rank in lost]
        others = [rank for rank in ranks if rank not in lost]
        found += again + chance.sample(others, chance.randint(0, most - len(again)))
    return found


def _number(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


def main(arguments: list[str]) -> int:
    """See above; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.multirank.losing_nodes")
    parser.add_argument("seed")
    parser.add_argument("losses", type=int)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--parity", default="", help="as Level(parity=) takes it; else copies")
    parser.add_argument("--place", help="directory in which that of this run is made")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=given.place) as name, Warm() as warm, a_place(Path(name)):
        told = {"nodes": given.nodes, "losses": given.losses, "shape": given.parity}
        for one in lose_nodes(warm, Path(name), given.seed, **told):
            print(json.dumps({"seed": given.seed, "nodes": given.nodes, **one}), flush=True)
    print(f"{given.losses} losses among {given.nodes} nodes: none of what had reached its peers")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
