"""A file of an older step that somebody has cut or written over in place is shared no further."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt_core import verify
from ckpt_core.system.files import Files
from tests.engine import test_unchanged, test_unchanged_files
from tests.engine.test_unchanged_files import STILL

BEHIND = 3
"""Saves after the change; more than are kept."""


def cut(path: Path) -> None:
    os.truncate(path, 100)


def in_another_tick(path: Path) -> None:
    """Wait until what is written now has a later time than a file: those of files are coarse."""
    probe = path.parents[1] / "probe"
    while True:
        probe.touch()
        if probe.stat().st_mtime_ns > path.stat().st_mtime_ns:
            break
        time.sleep(0.001)
    probe.unlink()


def zero(path: Path) -> None:
    in_another_tick(path)
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(bytes(4000))


def touch(path: Path) -> None:
    in_another_tick(path)
    os.utime(path)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.mark.parametrize("change", [cut, zero, touch])
@pytest.mark.parametrize("declared", [False, True])
def test_the_next_step_has_a_file_of_its_own_and_a_warning_names_the_older_one(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Path], None],
    declared: bool,
) -> None:
    frozen = {"frozen": ["base"]} if declared else {}
    with test_unchanged.Job(tmp_path, keep_last=2, **frozen) as job:
        job.save_all(range(1, 7))
        shared = job.still(6)
        assert shared.stat().st_nlink > 1
        change(shared)
        job.save_all(range(7, 7 + BEHIND))
        assert len(job.generations()) == 1
        job.check()
        (text,) = told(caplog)
        assert f"somebody has changed {shared}" in text
        before = [leaf.clone() for leaf in job.base]
        found = job.ck.restore(job.state)
        assert found is not None and found.step == 6 + BEHIND
        assert all(map(torch.equal, before, job.base))


def save_over(path: Path) -> None:
    in_another_tick(path)
    torch.save({"weight": torch.zeros(90, 100)}, path)


@pytest.mark.parametrize("change", [cut, zero, touch, save_over])
def test_so_has_the_next_directory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Path], None]
) -> None:
    with test_unchanged_files.Job(tmp_path) as job:
        job.save_all(range(1, 6))
        shared = tmp_path / "tag5" / STILL
        change(shared)
        job.save_all(range(6, 6 + BEHIND))
        assert job.generations() == [[1], [2, 3, 4, 5], list(range(6, 6 + BEHIND))]
        job.check(*range(6, 6 + BEHIND))
        (text,) = told(caplog)
        assert f"somebody has changed {shared}" in text


class Changing(Files):
    """Somebody changes a file right after it got another name."""

    def __init__(self) -> None:
        self.change: Callable[[Path], None] | None = None

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        if self.change is not None:
            self.change(source)
            self.change = None


@pytest.mark.parametrize("change", [cut, zero])
def test_what_is_changed_while_a_save_links_it_fails_that_save_alone(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    files = Changing()
    with test_unchanged.Job(tmp_path, files, frozen=["base"]) as job:
        job.save_all(range(1, 4))
        files.change = change
        with pytest.raises(Exception, match="is damaged on storage"):
            job.save(4)
        with pytest.raises(Exception, match="step 4 was not saved"):
            job.save(5)
        job.save(6)
        assert job.ck.steps() == (1, 2, 3, 6)
        job.check(6)


def test_what_is_only_touched_meanwhile_is_copied(tmp_path: Path) -> None:
    files = Changing()
    with test_unchanged.Job(tmp_path, files, frozen=["base"]) as job:
        job.save_all(range(1, 4))
        files.change = touch
        job.save_all(range(4, 8))
        assert job.generations() == [[1, 2, 3], [4, 5, 6, 7]]
        job.check()


def test_links_pins_and_retention_are_no_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with test_unchanged.Job(tmp_path, keep_last=2, frozen=["base"]) as job:
        job.save_all(range(1, 4))
        os.link(job.still(3), tmp_path.parent / f"{tmp_path.name}-backup")
        job.still(3).chmod(0o600)
        job.ck.pin(3)
        job.save_all(range(4, 12))
        assert job.generations() == [[3, 10, 11]]
        job.check()
        assert all(report.ok for report in verify(tmp_path).steps)
        assert not told(caplog)
