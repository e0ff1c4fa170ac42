"""Named files whose bytes stay the same are links to those of an earlier directory."""

from __future__ import annotations

import errno
import os
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, CkptError, Options, verify
from ckpt_core.system.files import Files
from tests import places
from tests.engine.files_trees import assert_directory
from tests.engine.test_unchanged import Elsewhere, NoLinks, NoMoreFiles, flip

STILL, MOVES = "layers/layer_01-model_states.pt", "mp_rank_00_model_states.pt"
FIRST_SHARED = 3
"""Two saves to see that a file stays, of which the second one is held open; then this one."""


class Job:
    """Two files, one of which stays the same, and what each directory must hold."""

    def __init__(self, root: Path, files: Files | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.root = root
        self.base = torch.randn(9000)
        self.small = torch.randn(20)
        self.head = torch.zeros(5000)
        self.expected: dict[int, dict[str, Any]] = {}
        settings: dict[str, Any] = {"eager_leaf_bytes": 256, "chunk_bytes": 4096, "timeout": 60}
        settings |= {"share_unchanged": True, "staging_bytes": "64KiB"} | options
        self.ck = Checkpointer(root, Options(**settings), files=files or Files())

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.ck.close()

    def start(self, step: int) -> Any:
        trees = {
            STILL: {"weight": self.base.view(90, 100), "tied": self.base, "bias": self.small},
            MOVES: {"module": {"base": self.base, "head": self.head}, "global_steps": step},
        }
        save = self.ck.begin_files(step, f"tag{step}", pointer="latest")
        save.add_all(trees)
        self.expected[step] = {
            STILL: {
                "weight": (kept := self.base.clone()).view(90, 100),
                "tied": kept,
                "bias": self.small.clone(),
            },
            MOVES: {
                "module": {"base": self.base.clone(), "head": self.head.clone()},
                "global_steps": step,
            },
        }
        return save.seal()

    def save(self, step: int) -> Path:
        self.head += 1
        path: Path = self.start(step).committed.result(60)
        return path

    def save_all(self, steps: range) -> None:
        for step in steps:
            self.save(step)

    def check(self, *steps: int) -> None:
        for step in steps or self.expected:
            assert_directory(self.root / f"tag{step}", self.expected[step])

    def generations(self, name: str = STILL) -> list[list[int]]:
        """Which directories have the same file."""
        found: dict[int, list[int]] = {}
        for step in sorted(self.expected):
            path = self.root / f"tag{step}" / name
            if path.exists():
                found.setdefault(path.stat().st_ino, []).append(step)
        return list(found.values())


def test_a_file_that_stays_the_same_is_linked_and_others_are_written(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.save_all(range(1, 7))
        assert job.generations() == [[1], [2, 3, 4, 5, 6]]
        assert job.generations(MOVES) == [[step] for step in range(1, 7)]
        job.check()
    assert not held_files(tmp_path), "a file is open after close"


def held_files(root: Path) -> list[str]:
    found = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    names = [os.readlink(path) for path in found if path.is_symlink()]
    return [name for name in names if name.startswith(f"{root}/")]


@pytest.mark.parametrize("where", [0, 4321, 8999])
def test_a_file_that_changes_after_all_is_written_whole_and_left_alone_for_a_while(
    tmp_path: Path, where: int
) -> None:
    with Job(tmp_path) as job:
        job.save_all(range(1, 6))
        job.base[where] += 1
        job.save_all(range(6, 15))
        first, shared, *others = job.generations()
        assert (first, shared) == ([1], [2, 3, 4, 5])
        assert others[0] == [6] and len(others[-1]) > 1, others
        job.check()


def test_a_file_belongs_to_so_many_directories_and_is_then_written_anew(tmp_path: Path) -> None:
    with Job(tmp_path, rebase_every=3) as job:
        job.save_all(range(1, 9))
        assert job.generations() == [[1], [2, 3, 4], [5, 6, 7], [8]]
        job.check()


def test_what_becomes_of_other_directories_takes_nothing_from_the_next(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.save_all(range(1, 5))
        for step in (1, 2, 3, 4):
            shutil.rmtree(tmp_path / f"tag{step}")
        job.save_all(range(5, 7))
        assert job.generations() == [[5, 6]]
        # The same tag again takes the place of a directory that has the file too.
        job.save(6)
        job.check(5, 6)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EMLINK])
def test_where_nothing_can_be_linked_the_file_is_copied(tmp_path: Path, code: int) -> None:
    with Job(tmp_path, NoLinks(code)) as job:
        job.save_all(range(1, 5))
        assert job.generations() == [[1], [2], [3], [4]]
        job.check()


@pytest.mark.parametrize("files", [Elsewhere, NoMoreFiles])
def test_where_a_file_cannot_be_held_every_directory_is_written(
    tmp_path: Path, files: type[Files]
) -> None:
    with Job(tmp_path, files()) as job:
        job.save_all(range(1, 6))
        assert len(job.generations()) == 5
        job.check()


def test_damage_is_told_for_each_directory_and_shared_no_further_after_a_restart(
    tmp_path: Path,
) -> None:
    with Job(tmp_path) as job:
        job.save_all(range(1, 6))
        flip(tmp_path / "tag4" / STILL)
        assert [verify(tmp_path / f"tag{step}").ok for step in range(1, 6)] == [True] + [False] * 4
    with Job(tmp_path) as job:
        job.save_all(range(6, 10))
        assert job.generations() == [[6], [7, 8, 9]]
        job.check()


def test_a_part_of_what_is_damaged_is_not_copied_and_the_next_save_is_whole(tmp_path: Path) -> None:
    with Job(tmp_path, on_error="warn") as job:
        job.save_all(range(1, 4))
        flip(tmp_path / "tag3" / STILL)
        # So that some pieces are those of the earlier file, and one is not.
        job.base[700] += 1
        with pytest.raises(CkptError, match="is damaged on storage"):
            job.save(4)
        del job.expected[4]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job.save_all(range(5, 7))
        job.check(5, 6)


def test_saves_that_overlap_are_whole(tmp_path: Path) -> None:
    dice = random.Random(f"{places.run_number()} unchanged files")
    with Job(tmp_path, in_flight=3, writers=3, direct_io=dice.choice(("auto", "off"))) as job:
        for step in range(1, 40):
            job.ck.wait_staged()
            job.head += 1
            if dice.random() < 0.1:
                dice.choice((job.base, job.small))[dice.randrange(20)] += 1
            job.start(step)
            if step > 5 and dice.random() < 0.2:
                shutil.rmtree(tmp_path / f"tag{step - 5}", ignore_errors=True)
                del job.expected[step - 5]
        job.ck.wait()
        # What has changed so often is left alone for a while.
        job.save_all(range(40, 80))
        job.check()
        assert len(job.generations()) < len(job.expected), "nothing was shared"


def test_only_so_many_files_are_held_open_and_none_that_comes_no_more(tmp_path: Path) -> None:
    tree = {"weight": torch.ones(600)}
    with Checkpointer(tmp_path, Options(share_unchanged=True, eager_leaf_bytes=64)) as ck:
        for step, names in enumerate([range(200)] * 3 + [range(5)] * 2):
            save = ck.begin_files(step, f"tag{step}")
            save.add_all({f"{name}.pt": tree for name in names})
            save.seal().committed.result(60)
            assert len(held_files(tmp_path)) <= 128 + 1  # and the lock
        assert len(held_files(tmp_path)) <= 5 + 1
        assert (tmp_path / "tag4" / "3.pt").stat().st_nlink == 4
        assert (tmp_path / "tag2" / "199.pt").stat().st_nlink == 1
