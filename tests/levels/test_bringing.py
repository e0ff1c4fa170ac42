"""A step is brought whole or not at all, whatever happens meanwhile, and the next try is none the worse."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.errors import CorruptCheckpoint, RestoreError
from ckpt_core.levels import BringsBack
from ckpt_core.levels.bring import fetching
from ckpt_core.restore import RestoreWarning, verify
from ckpt_core.store import committed_steps, step_path
from ckpt_core.system.files import Files
from tests import places
from tests.crash.layers import CHANGES, hooked
from tests.crash.promises import QuickFiles, quietly
from tests.crash.warm import Warm
from tests.faults.layers import FaultAt
from tests.levels.bring_kills import ROOTS
from tests.levels.restoring import (
    brings_back,
    fill,
    opened,
    restore_alone,
    restored_state,
    shard_in,
)
from tests.restore.harness import (
    FailingReads,
    Interrupting,
    assert_same,
    flip,
    small_state,
    zeros_like,
)

__all__ = ["quietly"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def level(tmp_path: Path) -> Path:
    path = tmp_path / "level"
    fill(path, 10, 20)
    return path


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    with Warm() as process:
        yield process


def bring(root: Path, *levels: Path, files: Files, timeout_s: float = 20.0) -> None:
    """Bring step 20 by a file layer."""
    with opened(root, files=files) as store:
        further = brings_back(store, levels, files=files)
        further._timeout_s = timeout_s
        further.bring(20, *further.steps()[20])


def assert_whole(root: Path, *steps: int) -> None:
    assert committed_steps(root) == steps
    assert verify(root).ok
    assert not list((root / ".inflight").iterdir())


# -- kills and interrupts ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ROOTS)
@pytest.mark.parametrize("point", ["before", "after", "torn"])
def test_a_kill_at_any_file_operation_leaves_nothing_in_part_and_a_restart_brings_it(
    kind: str, point: str, warm: Warm, tmp_path: Path
) -> None:
    count = warm.call(
        "tests.levels.bring_kills:kill_everywhere", kind=kind, point=point, place=str(tmp_path)
    )
    assert count >= 3


class InterruptAt:
    """Sends SIGINT as the n-th operation begins."""

    def __init__(self, n: int) -> None:
        self.n, self.count = n, 0
        self._lock = threading.Lock()

    def __call__(self, name: str, args: tuple[Any, ...], act: Callable[[], Any]) -> Any:
        with self._lock:
            due = self.count == self.n
            self.count += 1
        if due:
            os.kill(os.getpid(), signal.SIGINT)
        return act()


@pytest.mark.parametrize("kind", ROOTS)
def test_after_an_interrupt_at_any_file_operation_the_same_process_restores(
    kind: str, level: Path, tmp_path: Path
) -> None:
    counting = InterruptAt(-1)
    ROOTS[kind](tmp_path / "counted")
    bring(tmp_path / "counted", level, files=hooked(QuickFiles, counting, (*CHANGES, "preadv")))
    for n in places.some(range(counting.count), 12, of=f"interrupts of a bring, {kind}"):
        root = tmp_path / str(n)
        ROOTS[kind](root)
        trap = InterruptAt(-1)
        with opened(root, files=hooked(QuickFiles, trap, (*CHANGES, "preadv"))) as store:
            further = brings_back(store, [level], files=store._files)
            trap.n = trap.count + n - min(n, 5)
            with pytest.raises(KeyboardInterrupt):
                further.bring(20, *further.steps()[20])
            trap.n = -1
            live = zeros_like(small_state())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = restore_alone(store, [level], live)
            assert found is not None and found.step == 20
            assert_same(live["weight"], small_state(20)["weight"])
        assert_whole(root, *((20,) if kind == "fresh" else (10, 20)))
        assert not [one for one in threading.enumerate() if one.name.startswith("ckpt-bring")]


# -- storage that fails -----------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("lasting", [False, True])
def test_a_disk_that_fails_at_any_operation_costs_the_newer_step_and_nothing_else(
    code: int, lasting: bool, level: Path, tmp_path: Path
) -> None:
    counting = InterruptAt(-1)
    fill(tmp_path / "counted", 10)
    bring(tmp_path / "counted", level, files=hooked(QuickFiles, counting))
    for n in places.some(range(counting.count), 8, of=f"bring {code} {lasting}"):
        root = tmp_path / str(n)
        fill(root, 10)
        fault = FaultAt(None, code, lasting=lasting)
        with opened(root, files=fault.files()) as store:
            further = brings_back(store, [level], files=store._files)
            (attempt,) = further.steps()[20]
            fault.n = fault._count + n - min(n, 5)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                problem = _problem(further, 20, attempt)
            assert not isinstance(problem, CorruptCheckpoint)
            assert problem is not None or 20 in committed_steps(root)
            fault.mend()
        assert verify(root).ok
        assert restored_state(root, [level])[0] == 20
        assert_whole(root, 10, 20)


def _problem(further: BringsBack, step: int, attempt: str) -> RestoreError | None:
    try:
        further.bring(step, attempt)
    except RestoreError as exc:
        return exc
    return None


def test_a_disk_without_room_is_said_before_a_byte_is_fetched(root: Path, level: Path) -> None:
    class Full(QuickFiles):
        def free_bytes(self, path: Path) -> int:
            return 1000

        def create(self, path: Path, *, direct: bool = False) -> int:
            assert "shard" not in path.name
            return super().create(path, direct=direct)

    fill(root, 10)
    with pytest.raises(RestoreError, match=r"1000 B free and bringing step 20 from .* needs"):
        bring(root, level, files=Full())
    assert committed_steps(root) == (10,)
    assert not list((root / ".inflight").iterdir())


# -- levels that fail -------------------------------------------------------------------------------


class Falters(QuickFiles):
    """Every read of a shard fails the first time that its place is asked for."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, int]] = set()

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        place = os.readlink(f"/proc/self/fd/{fd}"), offset
        if "shard" in place[0] and place not in self._seen:
            self._seen.add(place)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().preadv(fd, buffers, offset)


def test_a_level_that_fails_now_and_then_is_asked_again(root: Path, level: Path) -> None:
    bring(root, level, files=Falters())
    assert_whole(root, 20)


def test_a_level_that_goes_away_is_given_up_for_the_next(
    root: Path, level: Path, tmp_path: Path
) -> None:
    shutil.copytree(level, tmp_path / "next")
    bring(root, level, tmp_path / "next", files=FailingReads("level/step"), timeout_s=2.0)
    assert_whole(root, 20)


def test_a_level_that_goes_away_for_good_costs_the_newer_step(root: Path, level: Path) -> None:
    fill(root, 10)
    with pytest.raises(RestoreError, match="could not be brought"):
        bring(root, level, files=FailingReads("step-000000000020/shard"), timeout_s=2.0)
    assert_whole(root, 10)


def test_a_step_that_vanishes_at_the_level_is_taken_from_the_next(
    root: Path, level: Path, tmp_path: Path
) -> None:
    shutil.copytree(level, tmp_path / "next")
    files = Interrupting(
        "level/step-000000000020/shard", lambda: shutil.rmtree(step_path(level, 20))
    )
    bring(root, level, tmp_path / "next", files=files)
    assert_whole(root, 20)


def test_a_step_that_vanishes_at_the_only_level_is_passed_over(root: Path, level: Path) -> None:
    fill(root, 10)
    files = Interrupting(
        "level/step-000000000020/rank", lambda: shutil.rmtree(step_path(level, 20))
    )
    with pytest.raises(RestoreError, match=r"could not be brought.*retired or replaced there"):
        bring(root, level, files=files)
    assert_whole(root, 10)


def test_bytes_that_are_garbled_on_the_way_are_read_again(root: Path, level: Path) -> None:
    class Garbles(QuickFiles):
        struck = False

        def preadv(self, fd: int, buffers: Any, offset: int) -> int:
            got = super().preadv(fd, buffers, offset)
            if not self.struck and "shard" in os.readlink(f"/proc/self/fd/{fd}"):
                self.struck = True
                buffers[0][100] ^= 1
            return got

    bring(root, level, files=Garbles())
    assert_whole(root, 20)


@pytest.mark.parametrize("name", ["rank-00000.json", "shard-00000-0.safetensors"])
@pytest.mark.parametrize("harm", ["flipped", "cut", "gone"])
def test_damage_at_the_level_names_the_object_and_leaves_nothing(
    root: Path, level: Path, name: str, harm: str
) -> None:
    file = step_path(level, 20) / name
    if harm == "flipped":
        flip(file, file.stat().st_size // 2)
    elif harm == "cut":
        os.truncate(file, file.stat().st_size - 1)
    else:
        file.unlink()
    with pytest.raises(CorruptCheckpoint, match=f"{name} of step 20 at .*level: expected"):
        bring(root, level, files=QuickFiles())
    assert not list((root / ".inflight").iterdir())


def test_a_directory_that_cannot_take_direct_writes_is_written_all_the_same(
    root: Path, level: Path
) -> None:
    class NoDirect(QuickFiles):
        def create(self, path: Path, *, direct: bool = False) -> int:
            fd = super().create(path)
            if direct:
                os.close(fd)
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return fd

    bring(root, level, files=NoDirect())
    assert_whole(root, 20)


def test_a_level_that_is_damaged_warns_and_the_restore_says_which_object(
    root: Path, level: Path
) -> None:
    flip(shard_in(level, 20), 9000)
    with pytest.warns(RestoreWarning, match=r"shard-00000-0.safetensors of step 20 at .*level"):
        assert restored_state(root, [level])[0] == 10


@pytest.mark.parametrize("most", [2048, 8192])
def test_chunks_longer_and_shorter_than_a_range_are_verified_alike(
    most: int, root: Path, level: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "RANGE_BYTES", most)
    bring(root, level, files=QuickFiles())
    assert_whole(root, 20)
    flip(shard_in(level, 10), 9000)
    with opened(root) as store:
        further = brings_back(store, [level])
        (attempt,) = further.steps()[10]
        with pytest.raises(CorruptCheckpoint, match="in bytes 8192 to 12288, got xxh3"):
            further.bring(10, attempt)
    assert_whole(root, 20)
