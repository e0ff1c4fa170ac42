"""Steps of several ranks: `diff` and `export`, which put leaves together."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import ckpt_core
from ckpt_core.restore import LeafReader, read_manifests, streaming
from ckpt_core.restore.windows import windows
from ckpt_core.system.files import Files
from tests.cli.several import ALIKE, BOXED, GOLDEN, JOB, diff, flat, same
from tests.restore.ranks import write_ranks

Cli = Callable[..., Any]
Save = Callable[..., Path]
Damage = Callable[[Path, int], None]


# -- diff --------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [64, 1 << 18])
def test_the_same_state_is_equal_whatever_the_number_of_ranks(
    cli: Cli, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(streaming, "WINDOW_BYTES", window)
    monkeypatch.setattr(streaming, "MAX_OPEN", 1)
    paths = [save(ALIKE.state(0))]
    for world, dim in ((2, 0), (3, 1), (4, 1)):
        job = replace(ALIKE, world=world, dim=dim)
        paths.append(write_ranks(tmp_path / f"of {world}", 7, job))
    for a in paths:
        for b in paths:
            assert diff(cli, a, b)["same"]


def test_private_leaves_and_values_are_compared_by_rank(cli: Cli, four: Path, save: Save) -> None:
    found = diff(cli, save(JOB.state(0)), four)
    assert found["tensors"] == found["values"] == found["only_a"] == []
    ranks = [f"rank {n}:own.{key}" for n in (1, 2, 3) for key in ("order", "seen")]
    assert sorted(found["only_b"]) == ranks
    assert {"shared.weight", "boxed.cube", "rank 0:own.order"} <= set(found["equal"])
    found = diff(cli, four, save(JOB.state(0), "b"))
    assert (sorted(found["only_a"]), found["only_b"]) == (ranks, [])


def test_what_ranks_share_is_told_once(cli: Cli, four: Path, tmp_path: Path) -> None:
    shared = {**JOB.replicated, "weight": JOB.replicated["weight"] + 1, "epoch": 4, "new": 5}
    cube = BOXED["cube"].clone()
    cube[5, 4, 8] = 0
    changed = replace(
        JOB,
        world=3,
        replicated=shared,
        boxed={**BOXED, "cube": cube},
        private=lambda rank: {"order": torch.arange(500) * (5 if rank == 1 else rank + 1)},
    )
    found = diff(cli, four, write_ranks(tmp_path / "b", 7, changed))
    assert [(row["path"], row["differing"]) for row in found["tensors"]] == [
        ("shared.weight", 40_000),
        ("boxed.cube", 1),
        ("rank 1:own.order", 499),
    ]
    assert [(row["path"], row["a"], row["b"]) for row in found["values"]] == [
        ("shared.epoch", "3", "4")
    ]
    assert found["only_b"] == ["shared.new"]
    assert found["only_a"] == ["own.seen", "rank 3:own.order"]


def test_nodes_are_compared_by_what_each_holds_whole(
    cli: Cli, node: Path, tmp_path: Path, damage: Damage
) -> None:
    plain = replace(JOB, boxed={}, private=lambda rank: {})
    a = write_ranks(tmp_path / "a", 7, plain, members=[0, 1])
    b = write_ranks(tmp_path / "b", 7, plain, members=[2, 3])
    assert diff(cli, a, b)["same"]
    answer = cli("diff", node, node)
    assert answer.code == 2
    assert "boxed.columns were written by other ranks, to another root" in answer.err
    damage(b / "shard-00003-0.safetensors", 30_000)
    answer = cli("diff", a, b)
    assert answer.code == 2
    assert "shard-00003-0.safetensors: chunk 7 " in answer.err


# -- export ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("window", [256, 1 << 18])
def test_whole_leaves_are_exported_with_the_private_values_of_a_rank(
    cli: Cli,
    four_ranks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: int | None,
    window: int,
) -> None:
    monkeypatch.setattr(streaming, "WINDOW_BYTES", window)
    expected = dict(flat(JOB.state(rank or 0)))
    chosen = [] if rank is None else ["--rank", rank]
    for name in ("out.safetensors", "out.pt"):
        answer = cli("export", four_ranks, tmp_path / name, *chosen, "--json")
        assert answer.code == 0
        assert json.loads(answer.out)["rank"] == (rank or 0)
    tree = torch.load(tmp_path / "out.pt", weights_only=True)
    assert tree["own"]["seen"] == 10 + (rank or 0)
    for found in (load_file(tmp_path / "out.safetensors"), dict(flat(tree))):
        assert set(found) == set(expected)
        assert all(same(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt"])
def test_the_golden_step_of_two_ranks_is_exported_as_load_gives_it(
    cli: Cli, tmp_path: Path, name: str
) -> None:
    # torch warns of its own complex32.
    keys = ("model", "shapes", "after it", "boxed", "own")
    tree = ckpt_core.load(GOLDEN, rank=1)
    for key in keys:
        answer = cli("export", GOLDEN, tmp_path / name, "--only", key, "--rank", 1, "--force")
        assert answer.code == 0, answer.err
        path = tmp_path / name
        found = load_file(path) if "safe" in name else dict(flat(torch.load(path)))
        for leaf, tensor in flat({key: tree[key]}):
            assert same(found[leaf], tensor), leaf


@pytest.mark.parametrize("name", ["out.safetensors", "out.pt"])
def test_a_node_exports_what_it_holds_whole_and_nothing_else(
    cli: Cli, node: Path, tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    answer = cli("export", node, path)
    assert answer.code == 2
    assert "boxed.columns, boxed.cube were written by other ranks, to another root" in answer.err
    assert not path.exists()
    assert cli("export", node, path, "--only", "shared", "--strip").code == 0
    found = load_file(path) if "safe" in name else torch.load(path)
    assert same(found["weight"], JOB.replicated["weight"])
    assert cli("export", node, path, "--only", "own", "--force", "--rank", 1).code == 2
    assert cli("export", node, path, "--only", "own", "--force", "--rank", 3).code == 0
    found = load_file(path) if "safe" in name else dict(flat(torch.load(path)))
    assert same(found["own.order"], torch.arange(500) * 4)


@pytest.mark.parametrize("leaf", ["shared.weight", "boxed.cube", "own.order"])
@pytest.mark.parametrize("name", ["out.safetensors", "out.pt"])
def test_no_byte_of_any_rank_is_exported_unchecked(
    cli: Cli, four: Path, tmp_path: Path, damage: Damage, name: str, leaf: str
) -> None:
    found = json.loads(cli("show", four, "--json").out)
    rows = {row["name"]: [p for p in row["slices"] if p["nbytes"]][-1:] for row in found["shared"]}
    (row,) = rows.get(leaf) or found["ranks"][0]["leaves"]
    damage(four / row["file"], row["offset"] + row["nbytes"] - 1)
    answer = cli("export", four, tmp_path / name)
    assert answer.code == 2
    assert f"{row['file']}: chunk " in answer.err
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("window", [256, 1 << 18])
def test_a_part_of_a_leaf_is_what_the_whole_has_there(
    four: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(streaming, "WINDOW_BYTES", window)
    with LeafReader(read_manifests(four, files=Files())) as reader:
        leaves = [*reader.leaves.shared.values(), *reader.leaves.private[1].values()]
        for leaf in leaves:
            whole = b"".join(map(bytes, reader.blocks(leaf)))
            edges = sorted({at * leaf.nbytes // 7 + shift for at in range(8) for shift in (0, 3)})
            for wanted in [range(leaf.nbytes)[a:b] for a in edges for b in edges]:
                part = b"".join(map(bytes, reader.blocks(leaf, wanted)))
                assert part == whole[wanted.start : wanted.stop], (leaf.spec.name, wanted)


@given(
    st.lists(st.integers(1, 7), max_size=4),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(16, 300),
)
def test_windows_follow_one_another_and_are_never_too_large(
    shape: list[int], unit: int, most: int
) -> None:
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    seen = []
    for box, nbytes in windows(shape, unit, most):
        part = numbers
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        assert part.numel() * unit == nbytes <= most
        seen += part.flatten().tolist()
    assert seen == list(range(numbers.numel()))
