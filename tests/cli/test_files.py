"""A root in which directories of files lie beside the steps."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ckpt_core import Checkpointer, Options
from ckpt_core.units import size_text
from tests.cli.conftest import Answer
from tests.cli.far_places import Place


def test_commands_tell_directories_of_files_from_steps(
    tmp_path: Path, cli: Callable[..., Answer]
) -> None:
    with Checkpointer(tmp_path, Options(chunk_bytes=4096)) as ck:
        save = ck.begin_files(7, "global_step7", pointer="latest")
        save.add("a.pt", {"w": torch.ones(3000)})
        path = save.seal().committed.result(60)
        ck.save(3, {"w": torch.ones(3)}).committed.result(60)
    listing = cli("ls", tmp_path)
    assert (listing.code, "global_step7" in listing.out) == (0, False)
    assert "step 3: ok" in cli("verify", tmp_path).out
    whole = cli("verify", path)
    assert (whole.code, "global_step7: ok" in whole.out) == (0, True)
    shown = cli("show", path)
    assert shown.code != 0
    assert "torch.load" in shown.err
    (path / "a.pt").write_bytes((path / "a.pt").read_bytes()[:-1])
    damaged = cli("verify", path)
    assert damaged.code != 0
    assert "global_step7: DAMAGED" in damaged.out
    assert "a.pt" in damaged.out


def test_rm_says_that_directories_of_files_are_no_steps_and_leaves_them(
    tmp_path: Path, cli: Callable[..., Answer]
) -> None:
    _with_tags(tmp_path)
    for choice in (("--after", 1), ("--keep-last", 1), ("--after", 1, "--dry-run", "--json")):
        answer = cli("rm", tmp_path, *choice, "--yes")
        assert (answer.code, answer.out) == (2, "")
        assert "no steps but 2 directories of files (tag2, ...)" in answer.err
    assert {"tag1", "tag2"} <= set(os.listdir(tmp_path))


# -- ls, watch and report ----------------------------------------------------------------------------


def _with_tags(root: Path, *, step: int | None = None) -> Path:
    """Two directories of files with a file in common, below a folder; and a step."""
    with Checkpointer(root, Options(keep_last=None)) as ck:
        for number in (1, 2):
            save = ck.begin_files(number, f"tag{number}", pointer="latest")
            save.add("model/same.pt", {"w": torch.zeros(50_000)})
            save.add("own.pt", {"w": torch.full((10_000 * number,), 1.0)})
            save.seal().committed.result(60)
        if step is not None:
            ck.save(step, {"w": torch.ones(3)}).committed.result(60)
    same = root / "tag2" / "model" / "same.pt"
    same.unlink()
    os.link(root / "tag1" / "model" / "same.pt", same)
    return root


def _bytes_below(folder: Path) -> int:
    """Of its files; one of several names counts once."""
    found = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum({one.st_ino: one.st_size for one in found}.values())


def _answer(answer: Answer) -> Any:
    assert answer.code == 0, answer.err
    return json.loads(answer.out)


def test_what_directories_of_files_take_is_in_the_sum_and_said(
    tmp_path: Path, cli: Callable[..., Answer]
) -> None:
    root = _with_tags(tmp_path / "mixed", step=3)
    (root / "mine").mkdir()
    (root / "mine" / "manifest.json").write_text("{}")
    (root / "again").symlink_to(root / "tag2")
    found = _answer(cli("ls", root, "--json"))
    first, second = found["directories"]
    assert (first["name"], first["step"], first["path"]) == ("tag1", 1, str(root / "tag1"))
    assert first["file_bytes"] == first["added_bytes"] == _bytes_below(root / "tag1")
    assert second["file_bytes"] == _bytes_below(root / "tag2")
    both = first["added_bytes"] + second["added_bytes"]
    assert both == second["file_bytes"] + first["file_bytes"] - _same_bytes(root)
    assert first["created_unix_s"] < second["created_unix_s"]
    assert found["file_bytes"] == both + found["steps"][0]["file_bytes"]
    said = f"2 directories of files ({size_text(both)})"
    text = cli("ls", root).out.splitlines()[-1]
    assert text == f"1 committed step, {size_text(found['file_bytes'])} in all; {said}"
    watched = " ".join(cli("watch", root, "--once").out.split())
    whole = size_text(found["file_bytes"])
    assert f"; 1 step, 2 directories of files, {whole} in the root" in watched
    page = tmp_path / "page.html"
    assert cli("report", root, "--out", page).code == 0
    assert re.search(rf">{whole}<.*in all.*>2<.*directories of files", page.read_text(), re.DOTALL)


def _same_bytes(root: Path) -> int:
    return (root / "tag1" / "model" / "same.pt").stat().st_size


def test_a_root_of_directories_of_files_alone_is_told_as_such(
    tmp_path: Path, cli: Callable[..., Answer]
) -> None:
    root = _with_tags(tmp_path)
    found = _answer(cli("ls", root, "--json"))
    assert found["steps"] == []
    assert [row["name"] for row in found["directories"]] == ["tag1", "tag2"]
    said = size_text(found["file_bytes"])
    told = f"{root} holds no committed step; 2 directories of files ({said})\n"
    assert cli("ls", root).out == told
    watched = " ".join(cli("watch", root, "--once").out.split())
    assert (
        f"newest step none is committed yet; 2 directories of files, {said} in the root" in watched
    )


def test_directories_of_files_at_a_level_are_told_as_in_the_root(
    tmp_path: Path, at_place: Callable[..., Answer], place: Place
) -> None:
    root = _with_tags(tmp_path / "tags")
    here = _answer(at_place("ls", root, "--json"))["directories"]
    for tag in ("tag1", "tag2"):
        assert at_place("push", root, tag, "--to", place.url).code == 0
    there = _answer(at_place("ls", place.url, "--json"))
    for row, told in zip(here, there["directories"], strict=True):
        for name in ("name", "step", "file_bytes", "created_unix_s"):
            assert told[name] == row[name]
        assert told["path"] == f"{place.url}/{row['name']}"
    assert "; 2 directories of files (" in at_place("ls", place.url).out


def test_a_save_of_files_in_folders_is_in_flight_with_all_its_bytes(
    tmp_path: Path, cli: Callable[..., Answer]
) -> None:
    begun = tmp_path / ".inflight" / "000000000040-0123abcd" / "model"
    begun.mkdir(parents=True)
    (begun / "mp.pt").write_bytes(bytes(5000))
    found = _answer(cli("ls", tmp_path, "--json"))
    assert [row["file_bytes"] for row in found["in_flight"]] == [found["file_bytes"]] == [5000]
