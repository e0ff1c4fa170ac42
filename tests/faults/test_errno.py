"""The operating system refuses an operation: the save fails as a whole, and nothing else does."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import Checkpointer, CkptError, CommitError, PersistError
from tests import places
from tests.crash.layers import CHANGES
from tests.crash.promises import QuickFiles, check_clean, check_restart, check_visible
from tests.crash.states import make_state, options
from tests.faults.layers import FaultAt

BEFORE = (5, 10, 20)
KNOWN = {(step, 0) for step in (*BEFORE, 30, 40, 1000)}
_NEVER = 1_000_000
_MOST = 10
"""So many operations of a save fail in one run, but for `CKPT_PLACES=all`."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with two steps and one slot; tests work on copies."""
    root = tmp_path_factory.mktemp("prepared") / "root"
    with Checkpointer(root, options(), files=QuickFiles()) as ck:
        for step in BEFORE:
            ck.save(step, make_state(step)).committed.result(60)
    return root


def try_save(ck: Checkpointer, step: int) -> CkptError | None:
    """Save one step; the error of its future, which has to say where and when."""
    handle = ck.save(step, make_state(step))
    error = handle.committed.exception(60)
    if error is None:
        return None
    assert isinstance(error, PersistError | CommitError), repr(error)
    assert error.step == step, repr(error)
    assert error.path is not None, repr(error)
    assert error.__cause__ is not None, repr(error)
    assert handle.staged.done()
    return error


def run_with_fault(root: Path, fault: FaultAt, *, mode: str = "host") -> bool:
    """Open, save with the fault, mend it, save again; whether the fault struck at all."""
    try:
        ck = Checkpointer(root, options(on_error="warn", mode=mode), files=fault.files())
    except PersistError:
        return True
    with ck:
        error = try_save(ck, 30)
        if error is not None:
            assert fault.struck
            check_visible(root)
            assert set(ck.steps()) >= {10, 20} - ({10} if 30 in ck.steps() else set())
        fault.mend()
        assert try_save(ck, 40) is None
        assert ck.latest_step() == 40
    return bool(fault.struck)


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_any_operation_may_fail_and_the_next_save_works(
    code: int, lasting: bool, prepared: Path, tmp_path: Path
) -> None:
    def fault_at(n: int) -> FaultAt:
        root = tmp_path / str(n)
        shutil.copytree(prepared, root)
        fault = FaultAt(n, code, lasting=lasting)
        run_with_fault(root, fault)
        check_restart(root, least={(20, 0)}, started=KNOWN)
        shutil.rmtree(root)
        return fault

    count = fault_at(_NEVER).mended_at
    assert count > 20
    drawn = places.some(range(count), _MOST, of=f"{code} {lasting}")
    # Writers do not always come to the same number of operations.
    assert sum(bool(fault_at(n).struck) for n in drawn) >= len(drawn) - 1


@pytest.mark.parametrize("name", CHANGES)
def test_a_fault_of_one_kind_of_operation_in_direct_mode_is_no_crash(
    name: str, prepared: Path, tmp_path: Path
) -> None:
    for n in range(4):
        root = tmp_path / str(n)
        shutil.copytree(prepared, root)
        run_with_fault(root, FaultAt(n, errno.EIO, names=(name,)), mode="direct")
        check_restart(root, least={(20, 0)}, started=KNOWN)


def test_the_next_save_raises_the_error_once_with_on_error_raise(
    prepared: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(prepared, root)
    fault = FaultAt(None, errno.ENOSPC, lasting=True, names=("pwrite",))
    with Checkpointer(root, options(on_error="raise"), files=fault.files()) as ck:
        fault.n = 0
        error = try_save(ck, 30)
        assert isinstance(error, PersistError)
        with pytest.raises(PersistError, match="step 30 was not saved") as caught:
            ck.save(40, make_state(40))
        assert caught.value is error
        fault.mend()
        assert try_save(ck, 40) is None
    check_clean(root)


def test_the_next_save_only_logs_the_error_with_on_error_warn(
    prepared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    shutil.copytree(prepared, root)
    fault = FaultAt(None, errno.EIO, lasting=True, names=("sync",))
    with (
        caplog.at_level("ERROR", logger="ckpt_core"),
        Checkpointer(root, options(on_error="warn"), files=fault.files()) as ck,
    ):
        fault.n = 0
        assert try_save(ck, 30) is not None
        fault.mend()
        assert try_save(ck, 40) is None
    said = [record for record in caplog.records if "save of step 30 failed" in record.message]
    assert len(said) == 1, "a failure is logged once"


def test_close_raises_an_error_that_no_save_has_reported(prepared: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(prepared, root)
    fault = FaultAt(None, errno.EIO, lasting=True, names=("sync",))
    ck = Checkpointer(root, options(), files=fault.files())
    fault.n = 0
    ck.save(30, make_state(30))
    with pytest.raises(PersistError, match="step 30"):
        ck.close()
    fault.mend()
    check_restart(root, least={(20, 0)}, started=KNOWN)


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_a_writer_that_raises_anything_fails_only_its_save(
    kind: type[BaseException], prepared: Path, tmp_path: Path
) -> None:
    class Broken(QuickFiles):
        armed = True

        def start_writeback(self, fd: int, offset: int, size: int) -> None:
            if self.armed:
                raise kind("a bug in a writer")

    root = tmp_path / "root"
    shutil.copytree(prepared, root)
    files = Broken()
    with Checkpointer(root, options(on_error="warn", direct_io="off"), files=files) as ck:
        error = try_save(ck, 30)
        assert isinstance(error, PersistError) and "a bug in a writer" in str(error)
        assert isinstance(error.__cause__, kind)
        files.armed = False
        assert try_save(ck, 40) is None
        assert ck.steps() == (20, 40)
    check_clean(root)


def test_a_root_that_is_removed_under_a_save_fails_it_and_is_made_anew(
    prepared: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(prepared, root)

    class Remover(QuickFiles):
        armed = True

        def sync(self, fd: int) -> None:
            if self.armed:
                self.armed = False
                shutil.rmtree(root)

    with Checkpointer(root, options(on_error="warn"), files=Remover()) as ck:
        assert try_save(ck, 30) is not None
        assert try_save(ck, 40) is None
        assert ck.steps() == (40,)
    check_clean(root)


def test_a_failed_save_leaves_nothing_behind(prepared: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(prepared, root)
    fault = FaultAt(None, errno.EIO, names=("pwrite",))
    with Checkpointer(root, options(on_error="warn", writers=3), files=fault.files()) as ck:
        fault.n = 2
        assert try_save(ck, 30) is not None
        ck.wait()
        assert not list((root / ".inflight").iterdir())
        assert ck.steps() == (10, 20)


class FullServer(QuickFiles):
    """A network filesystem whose quota is used up: it says so at a write, and again as the file is closed."""

    full = False

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        self._check(fd)
        super().pwrite(fd, data, offset)

    def close(self, fd: int) -> None:
        try:
            self._check(fd)
        finally:
            super().close(fd)

    def _check(self, fd: int) -> None:
        if self.full and "/shard-" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def test_an_error_at_close_leaves_nothing_behind_either(prepared: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(prepared, root)
    files = FullServer()
    with Checkpointer(root, options(on_error="warn"), files=files) as ck:
        files.full = True
        error = try_save(ck, 30)
        assert error is not None and "quota" in str(error)
        ck.wait()
        assert not list((root / ".inflight").iterdir())
        files.full = False
        assert try_save(ck, 40) is None
