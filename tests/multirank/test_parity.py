"""Nodes that keep parity of one another's steps: any of them are lost with their disks, at any moment."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import verify
from ckpt_core.store import committed_steps, step_path
from tests.crash.warm import Warm
from tests.levels.named_making import damage
from tests.levels.servers.moto import needs_store
from tests.multirank.crew import all_well
from tests.multirank.losing_nodes import a_place, end, lose_nodes, run

pytestmark = needs_store

ROUNDS = 3


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    with a_place(tmp_path):
        yield tmp_path


def test_a_lost_node_is_rebuilt_from_the_others_and_keeps_its_part_of_parity_again(
    warm: Warm, place: Path
) -> None:
    nodes = ["a", "b", "c"]
    first = all_well(run(warm, "save_and_reach", place, nodes, shape="2+1", steps=[1, 2]))
    assert [one["begun"] for one in first] == [0, 0, 0]
    assert [one["url"] for one in first] == [f"parity://{place / name / 'root'}" for name in nodes]
    assert said_of(place / "a", 2) == "any 1 of 3 nodes, when made"
    assert said_of(place / "a", 2, "--ask") == "any 1 of 3 nodes"
    kept = {path.parts[-4]: path for path in place.glob("*/kept/*/parity-of-node-*")}
    assert len(kept) == 3 and all(verify(path / "parity-000000000002").ok for path in kept.values())
    held = {path.name for path in (place / "a" / "root" / ".levels" / "holds").iterdir()}
    assert held == {"000000000001", "000000000002"}

    end(place / "b")
    shutil.rmtree(place / "b")
    assert said_of(place / "a", 2, "--ask") is None, "what b does not say is not counted"
    nodes[1] = "fresh"
    # Other domains make the same group, and a level behind it changes nothing.
    more = {"steps": [], "behind": [str(place / "far")]}
    again = all_well(run(warm, "save_and_reach", place, nodes, shape="2+1", **more))
    assert [one["begun"] for one in again] == [2, 2, 2]
    assert committed_steps(place / "fresh" / "root") == (2,)
    assert verify(place / "fresh" / "root").ok
    (path,) = place.glob("fresh/kept/*/parity-of-node-00001/parity-000000000002")
    assert verify(path).ok, "and the parity that the lost one kept is there again"

    damage(next(path.glob("stripe-*")))
    damage(next((place / "fresh" / "root").glob("step-*2/shard-*")))
    command = [sys.executable, "-m", "ckpt_core", "scrub", "--levels", place / "fresh" / "root"]
    told = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    assert told.count("repaired from parity://") == 1 == told.count("the steps of its 3 nodes")
    assert verify(path).ok and verify(place / "fresh" / "root").ok


@pytest.mark.parametrize("cut", [False, True], ids=["replicated", "sharded"])
def test_more_nodes_and_fewer_go_on_from_what_others_have_saved(
    warm: Warm, place: Path, cut: bool
) -> None:
    def go_on(shape: str, nodes: str, *steps: int) -> list[int]:
        told = {"shape": shape, "steps": [*steps], "cut": cut}
        begun: list[int] = all_well(run(warm, "go_on_cut", place, [*nodes], **told))
        return begun

    def lose(name: str) -> None:
        end(place / name)
        shutil.rmtree(place / name)

    assert go_on("2+1", "abc", 1, 2) == [0, 0, 0]
    lose("b")
    assert go_on("3+1", "acde", 3) == [2] * 4, (
        "b is made of what a and c have, beside two more nodes"
    )
    assert all(verify(step_path(place / name / "root", 3)).ok for name in "acde")
    lose("d")
    assert go_on("2+1", "ace", 4) == [3] * 3, "and with one node less"
    lose("a")
    assert go_on("2+1", "fce") == [4] * 3, "and a loss is survived as ever"
    assert all(verify(place / name / "root").ok for name in "fce")


def test_groups_that_are_others_after_a_loss_leave_what_the_lost_one_is_made_of(
    warm: Warm, place: Path
) -> None:
    nodes = [*"abcdef"]
    all_well(run(warm, "save_and_reach", place, nodes, shape="2+1", steps=[1, 2]))
    end(place / "c")
    shutil.rmtree(place / "c")
    nodes[2] = "fresh"
    # Nodes a, d and e are a group now, and all of them have step 2 before "fresh" has it.
    told = {"domains": {"0": "x", "2": "x", "4": "x", "1": "y", "3": "y", "5": "y"}, "pause_s": 2.0}
    again = all_well(run(warm, "save_and_reach", place, nodes, shape="2+1", steps=[], **told))
    assert [one["begun"] for one in again] == [2] * 6
    end(place / "a")
    shutil.rmtree(place / "a")
    nodes[0] = "another"
    again = all_well(run(warm, "save_and_reach", place, nodes, shape="2+1", steps=[], **told))
    assert [one["begun"] for one in again] == [2] * 6


def test_fewer_nodes_that_lack_what_two_had_say_so_and_change_nothing(
    warm: Warm, place: Path
) -> None:
    told = {"shape": "2+1", "cut": True}
    all_well(run(warm, "go_on_cut", place, [*"abcdef"], steps=[1], **told))
    for name in "bdf":
        end(place / name)
        shutil.rmtree(place / name)
    for one in run(warm, "go_on_cut", place, [*"ace"], steps=[2], **told):
        assert "restore on the nodes and with the number of ranks that saved it" in one["problem"]
    assert all(committed_steps(place / name / "root") == (1,) for name in "ace")


@pytest.mark.parametrize("shape", ["2+1", ""])
def test_what_a_pinned_step_rests_on_stays_with_the_others_when_a_root_is_lost(
    warm: Warm, place: Path, shape: str
) -> None:
    nodes = ["a", "b", "c"]
    all_well(run(warm, "save_and_reach", place, nodes, shape=shape, steps=[1, 2], pins=[1]))
    end(place / "a")
    shutil.rmtree(place / "a")
    nodes[0] = "fresh"
    all_well(run(warm, "save_and_reach", place, nodes, shape=shape, steps=[3, 4, 5, 6]))
    names = "parity-of-node-*/parity-*1" if shape else "node-00000/step-*1"
    found = [path for home in "bc" for path in (place / home).glob(f"kept/*/{names}")]
    assert len(found) == (2 if shape else 1) and all(verify(path).ok for path in found)
    assert all(1 in committed_steps(place / home / "root") for home in "bc")


@pytest.mark.parametrize("shape", ["2+1", ""])
def test_the_last_step_is_with_the_other_nodes_once_all_ranks_have_waited_for_it(
    warm: Warm, place: Path, shape: str
) -> None:
    far = place / "far"
    more = {"shape": shape, "steps": [10, 13], "behind": str(far)}
    told = all_well(run(warm, "save_and_end", place, ["a", "b", "c"], **more))
    assert told == [[13, 13]] * 3


@pytest.mark.parametrize("shape", ["2+1", ""])
def test_after_going_back_in_the_same_process_what_is_due_is_waited_for(
    warm: Warm, place: Path, shape: str
) -> None:
    found = all_well(run(warm, "go_back", place, ["a", "b", "c"], shape=shape))
    assert all({2, 3} <= {*steps} for steps in found)


def test_what_an_agent_said_before_training_went_back_is_not_taken_for_what_comes_then(
    warm: Warm, place: Path
) -> None:
    found = all_well(run(warm, "go_back_unseen", place, ["a", "b", "c"], shape="2+1"))
    assert found == [True] * 3


def said_of(home: Path, step: int, *more: str) -> str | None:
    """What `ls` says can be lost without losing a step; None: that it does not know."""
    command = [sys.executable, "-m", "ckpt_core", "ls", str(home / "root"), "--json", *more]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return {one["step"]: one["what"] for one in found["can_lose"]}.get(step)


def test_what_cannot_be_is_said_on_all_ranks(warm: Warm, place: Path) -> None:
    one: dict[str, Any] = {}
    for shape, wrong, said in (
        ("2+1", {"dir": str(place / "b" / "root" / "in")}, "or lies inside it or above it"),
        ("2+2", one, "makes groups of 4 nodes, and of 3 some are left over"),
    ):
        nodes = ["a", "b", "c"]
        each = [one, wrong, one]
        told = all_well(run(warm, "opens", place, nodes, shape=shape, each=each))
        assert all(said in text for text in told), told
    (text,) = all_well(run(warm, "opens", place, ["a"], shape="2+1", each=[one]))
    assert text.startswith("ConfigError") and "needs at least 3 nodes" in text


def test_agents_that_are_killed_go_on_and_the_newest_step_gets_its_parity(
    warm: Warm, place: Path
) -> None:
    nodes, steps = ["a", "b", "c"], list(range(1, 21))
    seed = random.Random(os.environ.get("CKPT_PLACES")).randrange(1 << 30)
    all_well(run(warm, "save_fast", place, nodes, shape="2+1", steps=steps, seed=seed))
    for home in nodes:
        (kept,) = (place / home).glob("kept/*/parity-of-node-*")
        names = {path.name for path in kept.glob("parity-*")}
        assert f"parity-{steps[-1]:012d}" in names
        assert all(verify(kept / name).ok for name in names)


@pytest.mark.parametrize(("shape", "nodes"), [("2+1", 3), ("2+2", 4)])
def test_whichever_nodes_are_lost_at_whatever_moment_nothing_that_had_its_parity_is(
    warm: Warm, place: Path, shape: str, nodes: int
) -> None:
    seed = os.environ.get("CKPT_PLACES", "parity")
    told = {"nodes": nodes, "losses": ROUNDS, "shape": shape}
    assert len([*lose_nodes(warm, place, seed, **told)]) == ROUNDS


def test_a_group_that_lags_leaves_a_step_that_all_nodes_go_on_from(warm: Warm, place: Path) -> None:
    nodes = [*"abcdef"]
    told = {"shape": "2+1", "sleepers": [1, 3, 5], "steps": 10}
    found = all_well(run(warm, "fall_behind", place, nodes, **told))
    assert len({str(one["kept"]) + str(one["sought"]) for one in found}) == 1
    ((sure, _),) = found[0]["kept"]
    assert 1 <= sure <= 3 and found[0]["sought"][0] == 4
    assert all({sure, 4, 13} <= {*one["steps"]} for one in found)
    for name in nodes:
        end(place / name)
    for name in "bc":
        shutil.rmtree(place / name)
    nodes[1:3] = ["fresh", "another"]
    again = all_well(run(warm, "save_and_reach", place, nodes, shape="2+1", steps=[]))
    (begun,) = {one["begun"] for one in again}
    assert begun in (sure, 4)
    again = all_well(run(warm, "save_and_reach", place, nodes, shape="2+1", steps=[5, 6]))
    assert [one["begun"] for one in again] == [begun] * 6


def test_one_node_of_each_of_two_groups_is_lost_and_all_go_on_from_one_step(
    warm: Warm, place: Path
) -> None:
    told = {"nodes": 6, "losses": 1, "shape": "2+1"}
    (one,) = lose_nodes(warm, place, "groups", **told)
    assert len(one["lost"]) == 2
