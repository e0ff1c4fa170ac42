"""Layer-wise saves: what `seal` brings and has not changed is a link to the file of an earlier step."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import ConfigError
from tests import places
from tests.engine.test_unchanged import Job, held, shards


class Layers(Job):
    """The adapter is staged layer by layer; the base comes with the rest, as frozen parameters do."""

    def start(self, step: int) -> Any:
        save = self.ck.begin(step, {"adapter": self.adapter})
        save.stage(["adapter"])
        try:
            handle = save.seal(self.state)
        except BaseException:
            save.abort()
            raise
        self.expected[step] = torch.cat([*map(torch.flatten, self.base), self.adapter])
        return handle

    def save(self, step: int) -> Path:
        self.adapter += 1
        path: Path = self.start(step).committed.result(60)
        return path

    def still(self, step: int) -> Path:
        return shards(self.root, step)[-1]

    def generations(self) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for step in self.ck.steps():
            found.setdefault(self.still(step).stat().st_ino, []).append(step)
        return list(found.values())


def test_leaves_that_stay_get_a_file_of_their_own_which_later_steps_link(tmp_path: Path) -> None:
    with Layers(tmp_path) as job:
        job.save_all(range(1, 9))
        assert job.generations() == [[1], [2], [3], [4, 5, 6, 7, 8]]
        written = sum(path.stat().st_size for path in shards(tmp_path, 8)[:-1])
        assert written < job.still(8).stat().st_size / 5
        job.check()
    assert not held(tmp_path), "a file is open after close"


@pytest.mark.parametrize("frozen", [["base"], ["base", "adapter"]])
def test_declared_leaves_are_shared_from_the_second_step_on(
    tmp_path: Path, frozen: list[str]
) -> None:
    """Those that are staged layer by layer are written all the same."""
    with Layers(tmp_path, frozen=frozen, rebase_every=5) as job:
        job.save_all(range(1, 9))
        assert job.generations() == [[1, 2, 3, 4, 5], [6, 7, 8]]
        job.check()


def test_a_declared_leaf_that_changes_is_named_and_the_next_save_is_whole(tmp_path: Path) -> None:
    with Layers(tmp_path, frozen=["base"], on_error="warn") as job:
        job.save_all(range(1, 4))
        for leaf in job.base:
            leaf.mul_(1.001)
        with pytest.raises(ConfigError, match=r"frozen: 6 leaves changed .*: base\.0, base\.1, "):
            job.save(4)
        job.save(5)
        assert job.generations() == [[1, 2, 3], [5]]
        job.check(1, 2, 3, 5)


def test_a_path_that_is_not_in_the_state_is_told(tmp_path: Path) -> None:
    with (
        Layers(tmp_path, frozen=["bass"]) as job,
        pytest.raises(ConfigError, match=r"frozen: the state has no leaf 'bass'"),
    ):
        job.save(1)


def test_a_leaf_that_changes_after_all_is_written_and_moves_back(tmp_path: Path) -> None:
    with Layers(tmp_path) as job:
        job.save_all(range(1, 7))
        for step in range(7, 10):
            job.base[2].view(-1)[7] += 1
            job.save(step)
        assert job.generations()[3:] == [[4, 5, 6], [7], [8, 9]]
        job.check()


def test_a_base_that_is_one_leaf_leaves_nothing_else_for_the_end(tmp_path: Path) -> None:
    with Layers(tmp_path, frozen=["base"], eager_leaf_bytes=0) as job:
        job.base = job.base[:1]
        job.save_all(range(1, 4))
        assert [len(shards(tmp_path, step)) for step in (1, 2, 3)] == [2, 2, 2]
        assert job.generations() == [[1, 2, 3]]
        job.check()


def test_saves_that_overlap_and_plain_ones_between_them_are_whole(tmp_path: Path) -> None:
    dice = random.Random(f"{places.run_number()} unchanged layers")
    with Layers(tmp_path, in_flight=3, staging_bytes="64KiB") as job:
        for step in range(1, 30):
            job.ck.wait_staged()
            job.adapter += 1
            if dice.random() < 0.1:
                job.base[dice.randrange(6)].view(-1)[dice.randrange(2000)] += 1
            if dice.random() < 0.2:
                job.expected[step] = torch.cat([*map(torch.flatten, job.base), job.adapter])
                job.ck.save(step, job.state)
            else:
                job.start(step)
        job.ck.wait()
        job.check()
        paths = [path for step in job.ck.steps() for path in shards(tmp_path, step)]
        assert max(path.stat().st_nlink for path in paths) > 1, "nothing was shared"
    assert not held(tmp_path)
