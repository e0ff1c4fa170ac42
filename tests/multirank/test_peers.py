"""Nodes that keep one another's steps: any one of them is lost with its disk, at any moment."""

from __future__ import annotations

import json
import os
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
from tests.levels.servers.moto import needs_store
from tests.levels.trainers import processes
from tests.multirank.crew import all_well
from tests.multirank.losing_nodes import a_place, end, lose_nodes, run
from tests.restore.harness import flip

pytestmark = needs_store

NODES = ["a", "b", "c"]
ROUNDS = 3


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    with a_place(tmp_path):
        yield tmp_path


def test_each_node_keeps_the_steps_of_one_other_and_a_lost_one_is_filled_again(
    warm: Warm, place: Path
) -> None:
    first = all_well(run(warm, "save_and_reach", place, NODES, steps=[1, 2, 3]))
    assert [one["begun"] for one in first] == [0, 0, 0]
    copies = {path.name: path for path in place.glob("*/kept/*/node-*")}
    assert sorted(copies) == ["node-00000", "node-00001", "node-00002"]
    assert [copies[name].parts[-4] for name in sorted(copies)] == ["b", "c", "a"]
    for copy in copies.values():
        assert 3 in committed_steps(copy) and verify(step_path(copy, 3)).ok
    assert said_of(place, 3) == "this node" and said_of(place, 3, "--ask") == "any 1 of 3 nodes"

    (shard,) = step_path(copies["node-00000"], 3).glob("*/shard-00000-0.safetensors")
    flip(shard, shard.stat().st_size // 2)
    scrub = [sys.executable, "-m", "ckpt_core", "scrub", "--levels", str(place / "b" / "root")]
    text = subprocess.run(scrub, stdout=subprocess.PIPE, check=True, text=True).stdout
    assert f"step 3 of {copies['node-00000']}: repaired from node-00000 at " in text, text
    assert verify(step_path(copies["node-00000"], 3)).ok

    end(place / "b")
    shutil.rmtree(place / "b")
    assert said_of(place, 3, "--ask") is None, "the copy at b was all that node a had elsewhere"
    again = all_well(run(warm, "save_and_reach", place, ["a", "fresh", "c"], steps=[4]))
    assert [one["begun"] for one in again] == [3, 3, 3]
    assert committed_steps(place / "fresh" / "root") == (3, 4)
    (kept,) = (place / "fresh" / "kept").glob("*/node-*")
    assert kept.name == "node-00000" and 4 in committed_steps(kept), "and does its part for others"


def said_of(place: Path, step: int, *options: str) -> str | None:
    """What `ls` says on node a can be lost without losing a step; None: that it does not know."""
    command = [sys.executable, "-m", "ckpt_core", "ls", str(place / "a" / "root"), "--json"]
    found = json.loads(
        subprocess.run([*command, *options], stdout=subprocess.PIPE, check=True).stdout
    )
    return {one["step"]: one["what"] for one in found["can_lose"]}.get(step)


def test_whichever_node_is_lost_at_whatever_moment_nothing_that_had_reached_its_peers_is(
    warm: Warm, place: Path
) -> None:
    seed = os.environ.get("CKPT_PLACES", "peers")
    assert len([*lose_nodes(warm, place, seed, nodes=4, losses=ROUNDS)]) == ROUNDS


def test_a_copy_that_lags_by_more_than_roots_keep_leaves_a_step_that_all_nodes_can_bring(
    warm: Warm, place: Path
) -> None:
    found = all_well(run(warm, "fall_behind", place, NODES, sleepers=[2], steps=10))
    assert len({str(one["kept"]) + str(one["sought"]) for one in found}) == 1
    ((sure, _),) = found[0]["kept"]
    assert 1 <= sure <= 3 and found[0]["sought"][0] == 4
    for one in found:
        assert {sure, 4, 12, 13} <= {*one["steps"]}
        assert len(one["steps"]) <= 6, "and no more than these and what a level still wants"
    end(place / "c")
    shutil.rmtree(place / "c")
    (copy,) = (place / "a" / "kept").glob("*/node-00002")
    assert sure in committed_steps(copy) and max(committed_steps(copy)) < 12
    again = all_well(run(warm, "save_and_reach", place, ["a", "b", "fresh"], steps=[20, 21]))
    (begun,) = {one["begun"] for one in again}
    assert begun in (sure, 4)


@pytest.mark.parametrize("cut", [False, True], ids=["replicated", "sharded"])
def test_more_nodes_and_fewer_go_on_from_what_others_have_saved(
    warm: Warm, place: Path, cut: bool
) -> None:
    def go_on(nodes: list[str], *steps: int) -> list[int]:
        begun: list[int] = all_well(run(warm, "go_on_cut", place, nodes, steps=[*steps], cut=cut))
        return begun

    assert go_on(["a", "b"], 1, 2) == [0, 0]
    assert go_on(["a", "b", "c"], 3) == [2, 2, 2]
    for name in ("a", "b", "c"):
        assert verify(step_path(place / name / "root", 3)).ok
    end(place / "c")
    shutil.rmtree(place / "c")
    assert go_on(["a", "b"], 4) == [3, 3], "what node c had is at the node that kept its copy"
    end(place / "b")
    shutil.rmtree(place / "b")
    assert go_on(["a", "fresh"]) == [4, 4], "and a loss is survived as ever"


@pytest.mark.parametrize(
    ("nodes", "shape"), [("bac", ""), ("aac", ""), ("bac", "2+1")], ids=["copies", "two", "parity"]
)
def test_ranks_on_other_nodes_than_before_go_on_with_what_was_their_own(
    warm: Warm, place: Path, nodes: str, shape: str
) -> None:
    all_well(run(warm, "save_and_reach", place, NODES, steps=[1, 2], shape=shape))
    again = all_well(run(warm, "save_and_reach", place, [*nodes], steps=[3], shape=shape))
    assert [one["begun"] for one in again] == [2] * 3


@pytest.mark.parametrize(
    ("before", "now", "shape"),
    [("aab", "acb", ""), ("aab", "add", ""), ("aabc", "addc", "2+1")],
    ids=["more", "lost", "parity"],
)
def test_as_many_ranks_go_on_on_nodes_of_which_a_fresh_one_has_nobodys_part(
    warm: Warm, place: Path, before: str, now: str, shape: str
) -> None:
    told = {"cut": True, "shape": shape}
    all_well(run(warm, "go_on_cut", place, [*before], steps=[1, 2], **told))
    if "b" not in now:
        end(place / "b")
        shutil.rmtree(place / "b")
    begun = all_well(run(warm, "go_on_cut", place, [*now], steps=[3], **told))
    assert begun == [2] * len(now)


@pytest.mark.parametrize("shape", ["", "2+1"], ids=["copies", "parity"])
def test_other_nodes_go_on_from_the_newest_step_though_bytes_in_one_root_are_damaged(
    warm: Warm, place: Path, shape: str
) -> None:
    all_well(run(warm, "go_on_cut", place, NODES, steps=[1, 2], cut=True, shape=shape))
    (shard,) = step_path(place / "a" / "root", 2).glob("shard-*")
    flip(shard, shard.stat().st_size // 2)
    if not shape:
        end(place / "c")
        shutil.rmtree(place / "c")  # whose part is at a, as a's is at b
    nodes, shape = ([*NODES, "d"], "3+1") if shape else (NODES[:2], "")
    begun = all_well(run(warm, "go_on_cut", place, nodes, steps=[3], cut=True, shape=shape))
    assert begun == [2] * len(nodes)


def test_another_token_is_taken_by_the_next_job_though_agents_of_the_one_before_live(
    warm: Warm, place: Path
) -> None:
    all_well(run(warm, "save_and_reach", place, NODES[:2], steps=[1]))
    (place / "token").write_text("9876543210" * 4)
    again = all_well(run(warm, "save_and_reach", place, NODES[:2], steps=[2]))
    assert [one["begun"] for one in again] == [1, 1]


def test_fewer_nodes_that_lack_what_one_had_say_so_and_change_nothing(
    warm: Warm, place: Path
) -> None:
    all_well(run(warm, "go_on_cut", place, NODES, steps=[1], cut=True))
    end(place / "c")
    for lost in (place / "c", *(place / "a" / "kept").glob("*/node-00002")):
        shutil.rmtree(lost)
    for one in run(warm, "go_on_cut", place, NODES[:2], steps=[2], cut=True):
        assert "restore on the nodes and with the number of ranks that saved it" in one["problem"]
    assert all(committed_steps(place / name / "root") == (1,) for name in NODES[:2])


def test_what_cannot_be_is_said_on_all_ranks_before_anything_listens(
    warm: Warm, place: Path
) -> None:
    one: dict[str, Any] = {}
    (place / "open").write_text("0123456789" * 4)
    for wrong, said in (
        ({"bind": "all:7070"}, "the other nodes reach this one at one address"),
        ({"bind": "203.0.113.1:0"}, "cannot listen at 203.0.113.1:0"),
        ({"dir": str(place / "b" / "root" / "in")}, "or lies inside it or above it"),
        ({"token": "open"}, "others can read the token's file"),
        ({"token": "none"}, "cannot be read"),
    ):
        told = run_one(warm, "opens", place, each=[one, wrong])
        assert said in told[1] and told[1].startswith("ConfigError"), told
        assert "rank 1 could not use the levels" in told[0] and said in told[0]
    told = run_one(warm, "opens", place, each=[{"domain": "x"}, {"every": 2}])
    assert all("give all ranks the same" in text for text in told)
    near = {"behind": [str(place / "near")]}
    for inside in (place / "near", place / "near" / "copies"):
        told = run_one(warm, "opens", place, each=[near, {**near, "dir": str(inside)}])
        assert told[1].startswith("ConfigError") and f"is the level {place / 'near'}" in told[1]
        assert f"is the level {place / 'near'}, or lies inside it or above it" in told[0]
    assert not processes(place / "a" / "root") and not processes(place / "b" / "root")
    assert run_one(warm, "opens", place, each=[one, one]) == ["opened", "opened"]


def run_one(warm: Warm, name: str, place: Path, **more: Any) -> list[Any]:
    return all_well(run(warm, name, place, ["a", "b"], **more))
