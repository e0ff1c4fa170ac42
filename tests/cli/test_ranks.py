"""Steps of several ranks: the commands that look at them, and all of them on what real ranks saved."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import ckpt_core
from ckpt_core.layout import RankManifest
from tests.cli.several import GOLDEN, JOB, diff, flat, same
from tests.cli.test_app import _WITHOUT_TORCH
from tests.crash.warm import Warm
from tests.multirank.crew import all_well
from tests.restore.ranks import edit_ranks

Cli = Callable[..., Any]
Damage = Callable[[Path, int], None]
TOP = Path(__file__).parents[2]


# -- ls and show -------------------------------------------------------------------------------


def test_ls_counts_ranks_and_names_those_of_a_node(cli: Cli, four_ranks: Path, node: Path) -> None:
    assert cli("ls", four_ranks.parent).out.splitlines()[2].split("KiB")[1].split()[0] == "4"
    assert " 2-3 of 4 " in cli("ls", node.parent).out
    (row,) = json.loads(cli("ls", node.parent, "--json").out)["steps"]
    assert (row["ranks"], row["ranks_here"]) == (4, [2, 3])


def test_show_has_one_row_for_what_ranks_store_together(cli: Cli, four_ranks: Path) -> None:
    out = cli("show", four_ranks).out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert rows["shared.weight"][1:] == [*"float32 [200, 200] 156.2 KiB 4 0-3".split()]
    assert rows["boxed.cube"][1:3] == ["float64", "[6,"]
    own = [line.split() for line in out.splitlines() if " own.order " in line]
    assert [row[0] for row in own] == ["0", "1", "2", "3"]
    assert "missing" not in out


def test_show_lists_every_slice_with_its_place(cli: Cli, four_ranks: Path) -> None:
    out = cli("show", four_ranks, "--offsets").out
    found = json.loads(cli("show", four_ranks, "--json").out)
    shared = {row["name"]: row for row in found["shared"]}
    for part in shared["shared.weight"]["slices"]:
        line = f"bytes {part['begin']}..{part['begin'] + part['nbytes']}"
        assert any(
            line in row and part["file"] in row and row.rstrip().endswith(str(part["offset"]))
            for row in out.splitlines()
        )
    assert "of [0:6, 2:4, 0:9]" in out
    assert sum(part["nbytes"] for part in shared["shared.weight"]["slices"]) == 160_000
    assert [part["block"] for part in shared["boxed.cube"]["slices"]][1] == [[0, 2, 0], [6, 2, 9]]
    assert shared["shared.bias"]["paths"] == ["shared.bias"]
    assert {row["missing"] for row in found["shared"]} == {None}
    assert [[leaf["name"] for leaf in rank["leaves"]] for rank in found["ranks"]] == [
        ["own.order"]
    ] * 4
    assert [rank["values"][1]["value"] for rank in found["ranks"]] == [10, 11, 12, 13]


def test_show_of_one_rank_is_its_whole_tree(cli: Cli, four_ranks: Path) -> None:
    out = cli("show", four_ranks, "--rank", 2, "--depth", 2).out
    lines = [line.strip("│├└─ ") for line in out.splitlines()]
    assert "seen  12" in lines
    assert "weight  float32 [200, 200]  156.2 KiB  4 slices, ranks 0-3" in lines
    (rank,) = json.loads(cli("show", four_ranks, "--rank", 2, "--json").out)["ranks"]
    assert rank["rank"] == 2
    assert cli("show", four_ranks, "--depth", 2).code == 2
    answer = cli("show", four_ranks, "--rank", 4)
    assert answer.code == 2
    assert "it holds ranks 0-3\n" in answer.err


def test_show_of_a_node_says_what_is_not_there(cli: Cli, node: Path) -> None:
    out = cli("show", node).out
    assert "the root of one node: what ranks 0-1 wrote lies in other roots" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert "elements [0:6, 0:4, 0:9] of [6, 5, 9]" in lines["boxed.cube"]
    assert lines["shared.weight"].rstrip().endswith("2-3")
    assert "it holds ranks 2-3 of 4\n" in cli("show", node, "--rank", 0).err
    assert "seen  13" in cli("show", node, "--rank", 3).out


# -- verify ------------------------------------------------------------------------------------


def test_verify_reads_the_files_of_all_ranks(cli: Cli, four: Path, damage: Damage) -> None:
    answer = cli("verify", four)
    assert answer.code == 0
    assert answer.out.rstrip().endswith("checked, ranks 0-3")
    found = json.loads(cli("show", four, "--json").out)["shared"]
    part = next(row for row in found if row["name"] == "shared.weight")["slices"][2]
    damage(four / part["file"], part["offset"] + 5000)
    answer = cli("verify", four)
    assert answer.code == 1
    assert f"  {part['file']}: chunk " in answer.out
    assert "1 leaf hit: shared.weight\n" in answer.out


def test_verify_finds_a_leaf_that_is_not_stored_to_its_end(cli: Cli, four: Path) -> None:
    def lose(rank: RankManifest) -> RankManifest:
        kept = [e for e in rank.slices if rank.rank != 1 or e.spec.name != "shared.weight"]
        return replace(rank, slices=tuple(kept))

    edit_ranks(four, 7, JOB, lose)
    answer = cli("verify", four)
    assert answer.code == 1
    assert "expected every byte of it, got nothing of " in answer.out
    lines = cli("show", four).out.splitlines()
    assert any("missing" in line for line in lines)
    (row,) = [line for line in lines if line.startswith("shared.weight ")]
    assert re.search(r"bytes \d+ to \d+ of 160000$", row.rstrip())


def test_verify_of_a_node_says_what_it_cannot_know(cli: Cli, node: Path) -> None:
    answer = cli("verify", node)
    assert answer.code == 0
    assert "checked, ranks 2-3 of 4\n" in answer.out
    assert "the root of one node: whether what ranks 0-1 wrote is sound, only other" in answer.out
    assert "2 leaves in part in other roots: boxed.columns, boxed.cube\n" in answer.out
    (step,) = json.loads(cli("verify", node, "--json").out)["steps"]
    assert (step["ranks"], step["world_size"]) == ([2, 3], 4)
    assert step["elsewhere"] == ["boxed.columns", "boxed.cube"]


# -- all of them -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", GOLDEN.parent],
        ["show", GOLDEN],
        ["show", GOLDEN, "--rank", "1"],
        ["show", GOLDEN, "--json"],
        ["verify", GOLDEN],
        ["diff", GOLDEN, GOLDEN],
        ["export", GOLDEN, "OUT.safetensors"],
    ],
)
def test_looking_at_several_ranks_works_without_torch(arguments: list[Any], tmp_path: Path) -> None:
    given = [str(tmp_path / part) if part == "OUT.safetensors" else str(part) for part in arguments]
    command = [sys.executable, "-c", _WITHOUT_TORCH, *given]
    made = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=False, timeout=60)
    assert made.returncode == 0, made.stderr


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """A process with torch imported, whose children are the ranks."""
    with Warm() as process:
        yield process


def _train(warm: Warm, root: Path, world: int, nodes: list[str] | None = None) -> None:
    outcomes = warm.call(
        "tests.multirank.crew:run_ranks",
        call="tests.multirank.jobs:save_steps",
        world_size=world,
        nodes=nodes,
        arguments={"root": str(root), "steps": [1, 2]},
    )
    all_well(outcomes)


@pytest.mark.timeout(200)
def test_every_command_reads_what_real_ranks_saved(cli: Cli, warm: Warm, tmp_path: Path) -> None:
    four, one, nodes = tmp_path / "four", tmp_path / "one", tmp_path / "nodes"
    _train(warm, four, 4)
    _train(warm, one, 1)
    _train(warm, nodes, 4, ["a", "a", "b", "b"])
    for root in (four, one, nodes / "a", nodes / "b"):
        assert cli("verify", root).code == 0
        assert cli("show", root).code == 0
    assert " 2-3 of 4 " in cli("ls", nodes / "b").out
    private = {f"rank {n}:sampler.{key}" for n in (1, 2, 3) for key in ("order", "seen")}
    assert set(diff(cli, one, four)["only_b"]) == private
    assert diff(cli, nodes / "a", four)["only_b"] == sorted(
        (path for path in private if path[5] in "23"), key=lambda path: (path[7:], path[5])
    )
    step = "step-000000000002"
    for root, rank in ((four, 2), (nodes / "b", 2)):
        path = tmp_path / "out.safetensors"
        assert cli("export", root, path, "--rank", rank, "--force").code == 0
        found = load_file(path)
        for name, tensor in flat(ckpt_core.load(root / step, rank=rank)):
            assert same(found[name], tensor), name
