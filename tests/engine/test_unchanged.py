"""Files of leaves that have not changed are links, and every step is whole by itself all the same."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, ConfigError, Options, load, verify
from ckpt_core.restore import RestoreWarning
from ckpt_core.save.still_group import Rebase
from ckpt_core.store import step_path
from ckpt_core.system.files import Files

FIRST_SHARED = 5
"""Three saves to see that leaves stay, one that gives them a file of their own, then this one."""


class Job:
    """A state of which a little changes, its saves, and what each of them must hold."""

    def __init__(self, root: Path, files: Files | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.root = root
        self.base = [torch.randn(40, 50) for _ in range(6)]
        self.adapter = torch.zeros(300)
        self.expected: dict[int, torch.Tensor] = {}
        settings: dict[str, Any] = {"eager_leaf_bytes": 256, "chunk_bytes": 8192, "keep_last": None}
        settings |= {"share_unchanged": True, "timeout": 60} | options
        self.ck = Checkpointer(root, Options(**settings), files=files or Files())

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.ck.close()

    @property
    def state(self) -> dict[str, Any]:
        return {"base": list(self.base), "adapter": self.adapter}

    def save(self, step: int) -> Path:
        self.adapter += 1
        self.expected[step] = torch.cat([*map(torch.flatten, self.base), self.adapter])
        path: Path = self.ck.save(step, self.state).committed.result(60)
        return path

    def save_all(self, steps: range) -> None:
        for step in steps:
            self.save(step)

    def check(self, *steps: int) -> None:
        for step in steps or self.ck.steps():
            got = load(step_path(self.root, step))
            flat = torch.cat([*map(torch.flatten, got["base"]), got["adapter"]])
            assert torch.equal(flat, self.expected[step]), f"step {step}"
            assert verify(step_path(self.root, step)).ok

    def still(self, step: int) -> Path:
        """The file of what does not change."""
        (path,) = [
            path for path in shards(self.root, step) if not path.name.endswith("-0.safetensors")
        ]
        return path

    def generations(self) -> list[list[int]]:
        """Which steps have the same still file."""
        found: dict[int, list[int]] = {}
        for step in self.ck.steps():
            if len(shards(self.root, step)) > 1:
                found.setdefault(self.still(step).stat().st_ino, []).append(step)
        return list(found.values())


def shards(root: Path, step: int) -> list[Path]:
    return sorted(step_path(root, step).glob("shard-*"))


def held(root: Path) -> list[str]:
    """Shard files of a root that this process has open."""
    found = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    names = [os.readlink(path) for path in found if path.is_symlink()]
    mine = [name for name in names if name.startswith(f"{root}/")]
    return [name for name in mine if "shard-" in name or ".slots" in name]


def test_leaves_that_stay_get_a_file_of_their_own_which_later_steps_link(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.save_all(range(1, 9))
        assert [len(shards(tmp_path, step)) for step in range(1, 9)] == [1, 1, 1, 2, 2, 2, 2, 2]
        assert job.generations() == [[4, 5, 6, 7, 8]]
        written = shards(tmp_path, FIRST_SHARED)[0].stat().st_size
        assert written < job.still(FIRST_SHARED).stat().st_size / 5
        job.check()
    assert not held(tmp_path), "a file is open after close"


def test_declared_leaves_are_shared_from_the_second_step_on(tmp_path: Path) -> None:
    with Job(tmp_path, frozen=["base"]) as job:
        job.save_all(range(1, 13))
        assert job.generations() == [list(range(1, 13))]
        job.check()


def test_a_declared_leaf_that_changes_fails_the_save_that_looks_and_is_named(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, frozen=["base"], on_error="warn") as job:
        job.save_all(range(1, 10))
        job.base[3][2, 2] += 1
        with pytest.raises(ConfigError, match=r"frozen: 1 leaf changed since .*: base\.3\. "):
            job.save_all(range(10, 20))
        at = max(job.expected)
        assert at < 20, "nobody has looked"
        assert at not in job.ck.steps()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job.save(30)
        job.check(9, 30)


def test_declared_leaves_that_somebody_trains_are_found_by_the_next_save(tmp_path: Path) -> None:
    with Job(tmp_path, frozen=["base"]) as job:
        job.save_all(range(1, 4))
        for leaf in job.base:
            leaf.mul_(1.001)
        with pytest.raises(ConfigError, match=r"frozen: 6 leaves changed .*: base\.0, base\.1, "):
            job.save(4)
        job.save(5)
        assert job.generations() == [[1, 2, 3], [5]]
        job.check(1, 2, 3, 5)


def test_a_leaf_that_changes_after_all_is_written_and_moves_back(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.save_all(range(1, 7))
        for step in range(7, 10):
            job.base[2].view(-1)[7] += 1
            job.save(step)
        # It goes with what changes, and the others stay together.
        assert job.generations() == [[4, 5, 6], [7], [8, 9]]
        assert "base.2" in header_of(shards(tmp_path, 9)[0])
        job.check()


def header_of(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little")).decode()


def test_a_file_belongs_to_so_many_steps_and_is_then_written_anew(tmp_path: Path) -> None:
    with Job(tmp_path, frozen=["base"], rebase_every=3) as job:
        job.save_all(range(1, 9))
        assert job.generations() == [[1, 2, 3], [4, 5, 6], [7, 8]]
        job.check()


@pytest.mark.parametrize(
    ("frozen", "found"),
    [(["base"], [[1, 2, 3], [4, 5, 6], [7, 8]]), ([], [[4, 5, 6], [7, 8]])],
)
def test_a_file_is_shared_for_so_long_and_is_then_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen: list[str], found: list[list[int]]
) -> None:
    now_s = 0.0
    wound = Rebase(steps=50, seconds=3, clock=lambda: now_s)
    monkeypatch.setattr(Rebase, "of", lambda options: wound)
    with Job(tmp_path, frozen=frozen) as job:
        for step in range(1, 9):
            job.save(step)
            now_s += 1
        assert job.generations() == found
        job.check()


@pytest.mark.parametrize(("after", "files"), [(timedelta(microseconds=1), 4), (1e6, 1)])
def test_the_time_is_an_option(tmp_path: Path, after: timedelta | float, files: int) -> None:
    with Job(tmp_path, frozen=["base"], rebase_after=after) as job:
        job.save_all(range(1, 5))
        assert len(job.generations()) == files


def test_steps_may_be_deleted_in_any_order(tmp_path: Path) -> None:
    with Job(tmp_path / "root", frozen=["base"]) as job:
        job.save_all(range(1, 4))
        for order in itertools.permutations((1, 2, 3)):
            copy = tmp_path / "-".join(map(str, order))
            shutil.copytree(tmp_path / "root", copy, copy_function=os.link)
            for number, step in enumerate(order):
                shutil.rmtree(step_path(copy, step))
                for left in order[number + 1 :]:
                    assert verify(step_path(copy, left)).ok
                    assert torch.equal(load(step_path(copy, left))["base"][0], job.base[0])


@pytest.mark.parametrize("keep_last", [1, 2])
def test_retention_recycles_no_file_that_another_step_has(tmp_path: Path, keep_last: int) -> None:
    with Job(tmp_path, keep_last=keep_last, rebase_every=4) as job:
        for step in range(1, 25):
            job.save(step)
            slots = {path.stat().st_ino for path in (tmp_path / ".slots").glob("*")}
            here = {path.stat().st_ino for one in job.ck.steps() for path in shards(tmp_path, one)}
            assert not slots & here
            job.check()


def test_a_step_that_is_replaced_and_one_that_is_removed_leave_the_others_whole(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, frozen=["base"], keep_last=3) as job:
        job.save_all(range(10, 15))
        for step in (14, 12, 14, 13):
            job.save(step)
            job.check()


def test_a_damaged_file_is_told_for_each_step_and_an_older_generation_is_restored(
    tmp_path: Path,
) -> None:
    with Job(tmp_path, frozen=["base"], rebase_every=3) as job:
        job.save_all(range(1, 7))
        flip(job.still(5))
        bad = [report.step for report in verify(tmp_path).steps if not report.ok]
        assert bad == [4, 5, 6]
        expected = job.expected[3]
        with pytest.warns(RestoreWarning):
            restored = job.ck.restore(job.state)
        assert restored is not None and restored.step == 3
        assert torch.equal(torch.cat([*map(torch.flatten, job.base), job.adapter]), expected)
        # Nothing that was there before is shared after that.
        job.save(7)
        job.check(1, 2, 3, 7)


def flip(path: Path) -> None:
    """As a device does it that goes bad: nobody has changed the file."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(-5000, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


class NoLinks(Files):
    """A filesystem without them, or one where a file has all that it may have."""

    def __init__(self, code: int) -> None:
        self._code = code

    def link(self, source: Path, target: Path) -> None:
        raise OSError(self._code, os.strerror(self._code), str(source))


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_where_nothing_can_be_linked_the_file_is_written(tmp_path: Path, code: int) -> None:
    with Job(tmp_path, NoLinks(code), frozen=["base"]) as job:
        job.save_all(range(1, 4))
        assert job.generations() == [[1], [2], [3]]
        job.check()


class Elsewhere(Files):
    """A filesystem that other machines write to as well."""

    def is_local(self, path: Path) -> bool:
        return False


def test_nothing_is_shared_where_other_machines_change_files_too(tmp_path: Path) -> None:
    with Job(tmp_path, Elsewhere(), frozen=["base"]) as job:
        job.save_all(range(1, 4))
        assert job.generations() == [[1], [2], [3]]
        assert not held(tmp_path)
        job.check()


class NoMoreFiles(Files):
    """A process that may open no file to read."""

    def open_read(self, path: Path, *, direct: bool = False) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))


def test_a_file_that_cannot_be_held_is_not_shared_and_the_save_goes_on(tmp_path: Path) -> None:
    with Job(tmp_path, NoMoreFiles(), frozen=["base"]) as job:
        job.save_all(range(1, 4))
        assert job.generations() == [[1], [2], [3]]
        job.check()


def test_a_step_that_somebody_deletes_takes_nothing_from_the_next(tmp_path: Path) -> None:
    with Job(tmp_path, frozen=["base"]) as job:
        job.save_all(range(1, 3))
        for step in (1, 2):
            shutil.rmtree(step_path(tmp_path, step))
        job.save_all(range(3, 5))
        assert job.generations() == [[3, 4]]
        job.check()


def test_another_file_in_the_place_of_the_one_that_is_shared_is_not_taken(tmp_path: Path) -> None:
    with Job(tmp_path, frozen=["base"]) as job:
        path = job.save(1)
        still = job.still(1)
        still.unlink()
        still.write_bytes(b"x" * 20480)
        assert path == step_path(tmp_path, 1)
        job.save(2)
        job.check(2)


def test_a_copy_of_what_is_damaged_is_refused_and_the_next_save_is_whole(tmp_path: Path) -> None:
    with Job(tmp_path, NoLinks(errno.EPERM), frozen=["base"], on_error="warn") as job:
        job.save(1)
        flip(job.still(1))
        with pytest.raises(Exception, match="is damaged on storage"):
            job.save(2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            job.save(3)
        job.check(3)


def test_saves_that_overlap_are_whole(tmp_path: Path) -> None:
    with Job(tmp_path, in_flight=3) as job:
        for step in range(1, 20):
            job.ck.wait_staged()
            job.adapter += 1
            if step % 6 == 0:
                job.base[step % 5] += 1
            job.expected[step] = torch.cat([*map(torch.flatten, job.base), job.adapter])
            job.ck.save(step, job.state)
        job.ck.wait()
        job.check()
        paths = [path for step in job.ck.steps() for path in shards(tmp_path, step)]
        assert max(path.stat().st_nlink for path in paths) > 1, "nothing was shared"
    assert not held(tmp_path)


def test_what_stays_is_shared_also_where_the_structure_changes(tmp_path: Path) -> None:
    """As at the end of each epoch, where a loader has no state."""
    with Job(tmp_path) as job:
        job.save_all(range(1, 6))
        for step in range(6, 12):
            if step % 2:
                job.base.append(torch.full((900,), float(step)))
            else:
                job.base = job.base[:6]
            job.save(step)
        assert job.generations() == [list(range(4, 12))]
        job.check()
    assert not held(tmp_path)


@pytest.mark.parametrize("frozen", [[], ["base"]])
def test_leaves_of_another_shape_or_order_are_written_anew(
    tmp_path: Path, frozen: list[str]
) -> None:
    with Job(tmp_path, frozen=frozen, keep_last=None) as job:
        job.save_all(range(1, 6))
        job.base = [leaf.view(50, 40) for leaf in job.base]
        job.save(6)
        got = load(step_path(tmp_path, 6))["base"]
        assert [leaf.shape for leaf in got] == [(50, 40)] * 6
        job.base = [job.base[0], job.base[1].to(torch.float64), *job.base[:1:-1]]
        job.save(7)
        job.check()
        if frozen:
            assert job.generations() == [[1, 2, 3, 4, 5], [6], [7]]
    assert not held(tmp_path)


def test_strided_and_empty_leaves_and_views_are_shared_too(tmp_path: Path) -> None:
    state = {
        "strided": torch.arange(6000.0).view(60, 100).t(),
        "empty": torch.empty(0, 7),
        "half": torch.arange(3000, dtype=torch.int16)[1:],
        "bool": torch.ones(1001, dtype=torch.bool),
        "moves": torch.zeros(400),
    }
    frozen = ["strided", "empty", "half", "bool"]
    settings = Options(
        share_unchanged=True, frozen=frozen, eager_leaf_bytes=256, chunk_bytes=4096, keep_last=None
    )
    with Checkpointer(tmp_path, settings) as ck:
        for step in range(1, 12):
            state["moves"] += 1
            ck.save(step, state).committed.result(60)
        inodes = {shards(tmp_path, step)[1].stat().st_ino for step in ck.steps()}
        assert len(inodes) == 1
        got = load(step_path(tmp_path, 11))
        assert all(torch.equal(got[name], state[name]) for name in state)


def test_a_path_that_is_not_in_the_state_is_told(tmp_path: Path) -> None:
    with (
        Job(tmp_path, frozen=["bass"]) as job,
        pytest.raises(ConfigError, match=r"frozen: the state has no leaf 'bass'"),
    ):
        job.save(1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"frozen": ["a"]},
        {"rebase_after": 3600},
        {"share_unchanged": True, "frozen": "a"},
        {"share_unchanged": True, "frozen": [""]},
        {"share_unchanged": True, "pipelined": False},
        {"share_unchanged": True, "mode": "direct"},
        {"share_unchanged": True, "rebase_every": 0},
        {"share_unchanged": True, "rebase_after": 0},
        {"share_unchanged": True, "rebase_after": "7d"},
    ],
)
def test_settings_that_exclude_each_other_are_told(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Options(**wrong)


def test_the_environment_may_ask_for_it() -> None:
    settings = {"SHARE_UNCHANGED": "1", "FROZEN": "a.b, c", "REBASE_AFTER": "3600"}
    found = Options.from_env({f"CKPT_CORE_{name}": text for name, text in settings.items()})
    assert found.share_unchanged and found.frozen == ("a.b", "c")
    assert found.rebase_after_s == 3600
    assert Options.from_env({"CKPT_CORE_REBASE_AFTER": "none"}).rebase_after_s is None
