"""What `verify` reports."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckpt_core
from ckpt_core.errors import ConfigError, NotCommitted
from ckpt_core.restore import verify
from tests.restore.harness import (
    SHARD,
    Cold,
    FailingReads,
    Recipe,
    flip,
    small_state,
    write_step,
)


def test_a_sound_step_is_ok_and_every_byte_was_compared(root: Path) -> None:
    path = write_step(root, 5, small_state())
    report = verify(path)
    assert report.ok
    (step,) = report.steps
    assert (step.step, step.path, step.problems, step.bad_chunks) == (5, path, (), ())
    assert report.checked_bytes == (path / SHARD).stat().st_size
    assert report.unchecked_bytes == 0


def test_every_step_of_a_root_is_reported_in_order(root: Path) -> None:
    paths = [write_step(root, step, small_state(step)) for step in (5, 6, 7)]
    flip(paths[1] / SHARD, 5000)
    report = verify(root)
    assert [(step.step, step.ok) for step in report.steps] == [(5, True), (6, False), (7, True)]
    assert not report.ok
    assert report.problems == ()


def test_every_bad_chunk_is_listed(root: Path) -> None:
    path = write_step(root, 5, small_state(), Recipe(files=2))
    for index, offset in ((1, 4100), (0, 9000), (0, 4100)):
        flip(path / f"shard-00000-{index}.safetensors", offset)
    found = [(bad.file, bad.index, bad.offset, bad.nbytes) for bad in verify(path).bad_chunks]
    assert found == [
        ("shard-00000-0.safetensors", 1, 4096, 4096),
        ("shard-00000-0.safetensors", 2, 8192, 4096),
        ("shard-00000-1.safetensors", 1, 4096, 4096),
    ]


def test_a_bad_chunk_reads_as_a_sentence(root: Path) -> None:
    path = write_step(root, 5, small_state())
    flip(path / SHARD, 5000)
    (bad,) = verify(path).bad_chunks
    text = (
        f"{path / SHARD}: chunk 1 (bytes 4096..8192): expected xxh3 {bad.expected}, got {bad.got}"
    )
    assert str(bad) == text


def test_bytes_without_a_checksum_are_counted_apart(root: Path) -> None:
    path = write_step(root, 5, small_state(), Recipe(checksum=False))
    report = verify(path)
    assert report.ok
    assert report.checked_bytes == 0
    assert report.unchecked_bytes == (path / SHARD).stat().st_size


def test_a_missing_file_does_not_hide_damage_in_another(root: Path) -> None:
    path = write_step(root, 5, small_state(), Recipe(files=3))
    (path / "shard-00000-0.safetensors").unlink()
    flip(path / "shard-00000-2.safetensors", 4100)
    report = verify(path)
    assert any("shard-00000-0" in problem for problem in report.problems)
    assert [bad.file for bad in report.bad_chunks] == ["shard-00000-2.safetensors"]


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_file_that_cannot_be_read_is_a_problem_and_no_exception(root: Path, code: int) -> None:
    path = write_step(root, 5, small_state())
    report = verify(path, files=FailingReads(SHARD, code))
    assert any("cannot be read" in problem for problem in report.problems)
    assert not report.ok


@pytest.mark.parametrize(("code", "unread"), [(errno.EIO, False), (errno.EACCES, True)])
@pytest.mark.parametrize("part", [SHARD, "manifest.json", "rank-00000"])
def test_what_this_process_may_not_read_is_told_from_what_is_wrong(
    root: Path, part: str, code: int, unread: bool
) -> None:
    write_step(root, 5, small_state())
    write_step(root, 6, small_state())
    refused = verify(root, files=FailingReads(part, code)).steps[0]
    assert refused.is_unread is unread
    assert refused.unread == (refused.problems if unread else ())
    flip(refused.path / SHARD, 4100)
    assert not verify(refused.path).steps[0].is_unread


def test_progress_ends_at_the_whole(root: Path) -> None:
    path = write_step(root, 5, small_state())
    seen: list[tuple[int, int]] = []
    verify(path, progress=lambda done, total: seen.append((done, total)), files=Cold())
    size = (path / SHARD).stat().st_size
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)


@pytest.mark.parametrize("readers", [0, -1, "8", True, 2.5, None])
@pytest.mark.parametrize("where", ["", "s3://bucket/run"])
@pytest.mark.parametrize("look", [ckpt_core.load, ckpt_core.verify])
def test_a_wrong_number_of_readers_is_refused(
    root: Path, look: Callable[..., Any], where: str, readers: Any
) -> None:
    path = write_step(root, 5, small_state())
    with pytest.raises(ConfigError, match=r"readers=.* must be an int of at least 1"):
        look(where or path, readers=readers)


def test_a_place_without_steps_is_said_to_have_none(root: Path) -> None:
    with pytest.raises(NotCommitted):
        verify(root)
    with pytest.raises(NotCommitted):
        verify(root / "step-000000000001")


def test_verify_changes_nothing(root: Path) -> None:
    path = write_step(root, 5, small_state())
    before = {item.name: (item.stat().st_mtime_ns, item.read_bytes()) for item in path.iterdir()}
    verify(root)
    after = {item.name: (item.stat().st_mtime_ns, item.read_bytes()) for item in path.iterdir()}
    assert after == before
    assert [item.name for item in root.iterdir()] == [path.name]
