"""`show`."""

from __future__ import annotations

import argparse
import collections
import datetime
import http
import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_core.layout import RankManifest

Cli = Callable[..., Any]
TOP = Path(__file__).parents[2]


def test_a_root_means_its_newest_step_and_step_chooses(cli: Cli, ckpts: Path) -> None:
    assert cli("show", ckpts).out.startswith("step 30 in ")
    assert cli("show", ckpts, "--step", "10").out.startswith("step 10 in ")
    assert cli("show", ckpts / "step-000000000020").out.startswith("step 20 in ")


def test_a_step_that_is_not_there_names_the_nearest(cli: Cli, ckpts: Path) -> None:
    answer = cli("show", ckpts, "--step", "11")
    assert answer.code == 2
    assert "nearest: 10, 20, 30" in answer.err
    assert cli("show", ckpts / "step-000000000020", "--step", "10").code == 2


def test_leaves_and_plain_values_are_in_one_tree(cli: Cli, ckpts: Path) -> None:
    lines = [line.strip("│├└─ ") for line in cli("show", ckpts).out.splitlines()]
    assert "embed.weight  float32 [50, 16]  3.1 KiB" in lines
    assert "head.weight  same memory as model.embed.weight" in lines
    assert "epoch  3" in lines
    assert "shape  (1, 2)" in lines
    assert "limit  inf" in lines
    assert "3  b'xy'" in lines
    assert "name  'run 1'" in lines


def test_depth_cuts_the_tree(cli: Cli, ckpts: Path) -> None:
    out = cli("show", ckpts, "--depth", "1").out
    assert "optimizer" in out
    assert "embed.weight" not in out


def test_offsets_are_those_of_the_manifest(cli: Cli, ckpts: Path) -> None:
    path = ckpts / "step-000000000030" / "rank-00000.json"
    manifest = RankManifest.decode(path.read_bytes(), path=path)
    out = cli("show", ckpts, "--offsets").out
    for leaf in manifest.leaves:
        assert f"shard-00000-0.safetensors at {leaf.offset}\n" in out


def test_totals_count_shared_memory_once(cli: Cli, ckpts: Path) -> None:
    found = json.loads(cli("show", ckpts, "--json").out)
    totals = {row["key"]: row for row in found["ranks"][0]["totals"]}
    assert list(totals) == ["model", "optimizer", "rng", "epoch", "config"]
    assert sum(row["nbytes"] for row in totals.values()) == found["state_bytes"]
    assert totals["epoch"] == {"key": "epoch", "leaves": 0, "nbytes": 0}


def test_json_lists_leaves_with_all_their_places(cli: Cli, ckpts: Path) -> None:
    rank = json.loads(cli("show", ckpts, "--json").out)["ranks"][0]
    leaves = {row["name"]: row for row in rank["leaves"]}
    assert leaves["model.embed.weight"]["paths"] == ["model.embed.weight", "model.head.weight"]
    assert leaves["model.embed.weight"]["shape"] == [50, 16]
    values = {row["path"]: row for row in rank["values"]}
    assert values["epoch"] == {"path": "epoch", "kind": "int", "value": 3}


class Named(collections.namedtuple("Named", "x y")):
    """A type of our own."""


VALUES: list[tuple[Any, str]] = [
    (None, "None"),
    (True, "True"),
    (-0.0, "-0.0"),
    (float("nan"), "nan"),
    (10**400, "int of 1329 bits"),
    ("a\x1b[2J", "'a\\x1b[2J'"),
    ("\ud800", "'\\ud800'"),
    (1 + 2j, "(1+2j)"),
    ([], "[]"),
    ((1,), "(1,)"),
    ({1}, "{1}"),
    (set(), "set()"),
    ({}, "empty dict"),
    (list(range(1000)), "1000 values]"),
    (collections.deque([1]), "deque[1]"),
    (slice(1, None), "slice(1, None, None)"),
    (torch.Size([2, 3]), "Size[2, 3]"),
    (torch.float32, "torch.float32"),
    (torch.device("cpu"), "device cpu"),
    (range(1, 9, 2), "range(1, 9, 2)"),
    (bytearray(b"ab"), "bytearray(b'ab')"),
    (pathlib.Path("/data"), "path /data"),
    (datetime.date(2020, 1, 2), "date 2020-01-02"),
    (datetime.timedelta(hours=1), "timedelta 3600 s"),
    (http.HTTPStatus.OK, "http:HTTPStatus OK"),
    (argparse.Namespace(a=1), "pickled argparse.Namespace"),
    (np.float64(1.5), "numpy '<f8', 8 bytes"),
    (np.array(["ab"]), "array of '<U2', shape [1]"),
    (np.ones(3, np.int32), "int32 [3]  12 B  numpy"),
    (torch.ones(2, 2).to_sparse(), "coo"),
    (torch.ones(2, 3).expand(4, 2, 3), "view ['float32', 0, [4, 2, 3], [0, 3, 1]]"),
]


@pytest.mark.parametrize(("value", "text"), VALUES, ids=[text[:20] for _, text in VALUES])
def test_every_kind_of_value_has_a_text(
    cli: Cli, save: Callable[..., Path], value: Any, text: str
) -> None:
    answer = cli("show", save({"it": value, "x": torch.ones(2)}))
    assert answer.code == 0
    assert text in answer.out
    assert json.loads(cli("show", save({"it": value}, "other"), "--json").out)


def test_a_state_that_is_one_tensor_is_shown(cli: Cli, save: Callable[..., Path]) -> None:
    assert "(the state itself)  float32 [5]" in cli("show", save(torch.ones(5))).out


def test_a_damaged_manifest_is_one_clear_line(
    cli: Cli, ckpts: Path, damage: Callable[[Path, int], None]
) -> None:
    damage(ckpts / "step-000000000030" / "rank-00000.json", 100)
    answer = cli("show", ckpts)
    assert answer.code == 2
    assert "rank-00000.json: expected xxh3" in answer.err
    assert answer.err.count("\n") == 1


def test_steps_without_checksums_say_so(cli: Cli, save: Callable[..., Path]) -> None:
    assert "without checksum" in cli("show", save({"x": torch.ones(9)}, checksum=False)).out


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_step_that_is_retired_while_it_is_printed_is_shown_whole(
    save: Callable[..., Path], options: list[str]
) -> None:
    step = save({f"leaf {number}": number for number in range(3000)})
    command = [sys.executable, "-m", "ckpt_core", "show", str(step), *options]
    with subprocess.Popen(command, cwd=TOP, stdout=subprocess.PIPE) as made:
        assert made.stdout is not None
        first = made.stdout.read(1)  # more than a pipe takes is yet to come
        shutil.rmtree(step)
        shown = first + made.stdout.read()
    assert made.returncode == 0 and b"leaf 2999" in shown
