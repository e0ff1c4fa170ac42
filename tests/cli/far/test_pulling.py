"""What `pull` says of a step or a directory that is there in part, here or at the level."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import NotCommitted
from ckpt_core.layout import MANIFEST_NAME, Manifest
from ckpt_core.levels import open_far
from ckpt_core.levels.by_hand.pulling import _pull_directory
from ckpt_core.store import step_path
from ckpt_core.system.files import Files
from tests.cli.far.test_far import SHARD, _bytes_of, _with_tags
from tests.levels.making import make_store as make_level
from tests.levels.making import save as write_step

Cli = Callable[..., Any]


def _only_rank(folder: Path, world_size: int) -> None:
    """Let a directory be what one of several ranks has written."""
    path = folder / MANIFEST_NAME
    manifest = Manifest.decode(path.read_bytes(), path=path)
    path.write_bytes(dataclasses.replace(manifest, world_size=world_size).encode())


def test_pull_replaces_a_step_of_which_a_file_is_cut_or_gone(
    cli: Cli, ckpts: Path, tmp_path: Path
) -> None:
    level, root = tmp_path / "level", tmp_path / "fresh"
    assert cli("push", ckpts, 30, "--to", level).code == 0
    whole, mine = _bytes_of(step_path(ckpts, 30)), step_path(root, 30)
    harm: list[Callable[[], object]] = [
        lambda: os.truncate(mine / SHARD, 5000),
        (mine / SHARD).unlink,
        lambda: os.truncate(mine / "rank-00000.json", 100),
        (mine / "rank-00000.json").unlink,
    ]
    assert cli("pull", level, "--to", root).code == 0
    for act in harm:
        act()
        assert "verified" in cli("pull", level, "--to", root).out
        assert _bytes_of(mine) == whole
        assert "is there already" in cli("pull", level, "--to", root).out


def test_pull_goes_by_the_files_of_a_step_alone(cli: Cli, ckpts: Path, tmp_path: Path) -> None:
    level, root = tmp_path / "level", tmp_path / "fresh"
    assert cli("push", ckpts, 30, "--to", level).code == 0
    (step_path(level, 30) / "notes.txt").write_text("of somebody else")
    assert "verified" in cli("pull", level, "--to", root).out
    assert _bytes_of(step_path(root, 30)) == _bytes_of(step_path(ckpts, 30))


def test_pull_brings_what_is_there_already_if_it_is_told_to(
    cli: Cli, ckpts: Path, tmp_path: Path, damage: Callable[[Path, int], None]
) -> None:
    level, root = tmp_path / "level", tmp_path / "fresh"
    assert cli("push", ckpts, 30, "--to", level).code == 0
    assert cli("pull", level, "--to", root).code == 0
    damage(step_path(root, 30) / SHARD, 6000)
    assert "is there already" in cli("pull", level, "--to", root).out
    assert "verified" in cli("pull", level, "--to", root, "--force").out
    assert _bytes_of(step_path(root, 30)) == _bytes_of(step_path(ckpts, 30))
    assert os.listdir(root / ".inflight") == []
    assert not (root / ".slots").exists()


def test_pull_replaces_what_one_node_has_of_a_step_or_of_a_directory(
    cli: Cli, tmp_path: Path
) -> None:
    level, root = make_level(tmp_path / "level"), tmp_path / "root"
    attempt = write_step(level, 7, ranks=[0, 1], world=2)
    store = make_level(root)
    write_step(store, 7, ranks=[1], world=2, attempt=attempt)
    level.close()
    store.close()
    assert "verified" in cli("pull", level.root, "--to", root).out
    assert _bytes_of(step_path(root, 7)) == _bytes_of(step_path(level.root, 7))
    tags = _with_tags(tmp_path / "tags")
    assert cli("pull", tags, "tag1", "--to", root).code == 0
    _only_rank(root / "tag1", 2)
    assert "verified" in cli("pull", tags, "tag1", "--to", root).out
    assert _bytes_of(root / "tag1") == _bytes_of(tags / "tag1")
    (root / "tag1" / "model" / "mp.pt").unlink()
    assert "verified" in cli("pull", tags, "tag1", "--to", root).out
    assert "verified" in cli("pull", tags, "tag1", "--to", root, "--force").out
    assert _bytes_of(root / "tag1") == _bytes_of(tags / "tag1")


def test_an_empty_step_is_not_the_newest_one(cli: Cli, ckpts: Path, tmp_path: Path) -> None:
    for command in ("push", "pull"):
        answer = cli(command, ckpts, "", "--to", tmp_path / "there")
        assert (answer.code, answer.out) == (2, "")
        assert "STEP is empty" in answer.err and not (tmp_path / "there").exists()


def test_a_directory_of_which_a_level_has_a_part_is_not_pulled(cli: Cli, tmp_path: Path) -> None:
    level, fresh = _with_tags(tmp_path / "tags"), tmp_path / "fresh"
    _only_rank(level / "tag2", 2)
    (level / "tag1").rename(level / "tag9")
    for tag, why in [
        ("tag2", "is only what some of the ranks wrote: other nodes have the rest"),
        ("tag9", "was not saved under that name"),
    ]:
        answer = cli("pull", level, tag, "--to", fresh)
        assert (answer.code, answer.out) == (2, "")
        assert f"{tag} at {level} {why}" in answer.err
        assert not (fresh / tag).exists()


def test_a_directory_that_was_retired_once_it_was_found_is_said_to_have_gone(
    tmp_path: Path,
) -> None:
    with open_far(str(_with_tags(tmp_path / "tags"))) as far:
        copy = far.directories()["tag1"]
        far.retire(["tag1"])
        with pytest.raises(NotCommitted, match=r"tag1 at .* is not there any more"):
            _pull_directory(far, copy, tmp_path / "fresh", lambda done, total: None)


def test_pull_brings_a_step_beside_one_that_this_user_may_not_read(
    cli: Cli, ckpts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, names, hidden = tmp_path / "fresh", Files.first, {"20"}

    def refusing(files: Files, fd: int, most: int) -> bytes:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if any(path.startswith(str(step_path(ckpts, int(step)))) for step in hidden):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return names(files, fd, most)

    monkeypatch.setattr(Files, "first", refusing)
    assert "verified" in cli("pull", ckpts, 10, "--to", root).out
    assert "step 30 is" in cli("pull", ckpts, "--to", root).out
    refused = cli("pull", ckpts, 20, "--to", root)
    assert refused.code == 2 and "manifest of step-000000000020: Permission denied" in refused.err
    hidden.add("30")
    newest = cli("pull", ckpts, "--to", root)
    assert newest.code == 2 and "manifest of step-000000000030: Permission denied" in newest.err
