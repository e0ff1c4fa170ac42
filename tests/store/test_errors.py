"""What fails, what stays as it was, and what the error says."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.errors import CommitError, ConfigError, PersistError
from ckpt_core.store import RootLock, step_path
from ckpt_core.system.files import Files
from tests.store.harness import (
    Fault,
    NoExchange,
    QuickFiles,
    faulty,
    fill,
    interrupted,
    left,
    make_store,
    mark_of,
    save,
    save_quiet,
)


@pytest.mark.parametrize("base", [QuickFiles, NoExchange])
@pytest.mark.parametrize("name", ["sync_dir", "rename", "exchange"])
@pytest.mark.parametrize("step", [20, 30])
@pytest.mark.parametrize("times", [1, 10**9])
def test_a_publish_that_fails_leaves_every_step_as_it_was(
    root: Path, base: type[Files], name: str, step: int, times: int
) -> None:
    fault = Fault(name, errno.EIO, times=times)
    store = faulty(root, fault, base)
    attempt = store.begin(step)
    fault.armed = False
    fill(store, attempt, mark=99)
    fault.armed = True
    exchanged = step == 20 and base is QuickFiles
    failed = {"sync_dir": True, "rename": not exchanged, "exchange": step == 20}[name]
    if failed:
        with pytest.raises(CommitError, match=r"Committed steps are safe\. The device") as e:
            store.publish(attempt)
        assert e.value.step == step
        assert isinstance(e.value.__cause__, OSError)
        fault.armed = False
        store.abandon(attempt)
        assert left(root) == []
    else:
        store.publish(attempt)
        fault.armed = False
    wanted = {10: 10, 20: 20} if failed else {10: 10, 20: 20} | {step: 99}
    if times == 1 or name != "sync_dir":
        assert {s: mark_of(step_path(root, s)) for s in store.steps()} == wanted
    save(store, 40)
    assert store.latest() == 40
    store.close()


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("base", [QuickFiles, NoExchange])
def test_a_sync_of_the_root_that_fails_late_is_rolled_back(
    root: Path, base: type[Files], at: int
) -> None:
    count = -1

    def fail(name: str, args: tuple[object, ...]) -> None:
        nonlocal count
        if name == "sync_dir" and armed:
            count += 1
            if count == at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    armed = False
    store = make_store(root, interrupted(base, fail))
    store.open()
    save(store, 20)
    attempt = store.begin(20)
    fill(store, attempt, mark=99)
    armed = True
    try:
        store.publish(attempt)
        committed = 99
    except CommitError:
        committed = 20
        store.abandon(attempt)
    assert count >= at or committed == 99
    assert mark_of(step_path(root, 20)) == committed
    assert left(root) == []
    store.close()


def test_bytes_of_a_publish_that_may_have_lasted_stay_until_its_name_is_gone(root: Path) -> None:
    failing = False

    def fail(name: str, args: tuple[object, ...]) -> None:
        if failing and name == "sync_dir" and args[0] in (root, root / ".inflight"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = make_store(root, interrupted(QuickFiles, fail))
    store.open()
    attempt = store.begin(30)
    fill(store, attempt, mark=30)
    failing = True
    with pytest.raises(CommitError):
        store.publish(attempt)
    assert store.steps() == ()
    store.abandon(attempt)
    assert len(os.listdir(attempt.path)) == 3
    failing = False
    store.abandon(attempt)
    assert left(root) == []
    store.close()


def test_a_failed_abandon_is_logged_and_cleared_at_the_next_open(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = faulty(root, Fault("unlink", errno.EIO))
    attempt = store.begin(30)
    fill(store, attempt, mark=1)
    store.abandon(attempt)
    assert "could not delete" in caplog.text
    store.close()
    store = make_store(root)
    store.open()
    assert left(root) == []
    store.close()


def test_steps_that_cannot_be_unpublished_durably_keep_their_bytes(root: Path) -> None:
    fault = Fault("sync_dir", errno.EIO)
    store = faulty(root, fault)
    save_quiet(store, fault, 30)
    with pytest.raises(PersistError, match="could not retire"):
        store.retire()
    (gone,) = left(root)
    assert len(left(root, f".inflight/{gone}")) == 3
    fault.armed = False
    assert store.retire() == ()
    assert left(root) == []
    assert store.steps() == (20, 30)
    store.close()


def test_a_step_that_cannot_be_renamed_keeps_no_other_from_going(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = faulty(root, Fault("rename", errno.EXDEV, part=step_path(root, 10).name))
    save(store, 30)
    with pytest.raises(PersistError, match="could not retire"):
        store.retire()
    for step in (40, 50):
        save(store, step)
        assert store.retire() == (step - 20,)
    assert store.steps() == (10, 40, 50)
    assert mark_of(step_path(root, 10)) == 10
    assert caplog.text.count("step 10 cannot be retired") == 1
    store.close()


def test_a_corrupt_step_that_cannot_be_moved_keeps_no_other_from_it(root: Path) -> None:
    fault = Fault("rename", errno.EXDEV, part=step_path(root, 10).name)
    store = faulty(root, fault)
    for step in (10, 20):
        store.suspect(step)
    with pytest.raises(PersistError, match="move corrupt steps aside"):
        store.quarantine_suspects()
    assert store.steps() == (10,)
    fault.armed = False
    store.quarantine_suspects()
    assert store.steps() == ()
    assert len(os.listdir(root / ".corrupt")) == 2
    store.close()


def test_a_retired_step_that_cannot_be_deleted_is_tried_again(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fault = Fault("unlink", errno.EBUSY)
    store = faulty(root, fault)
    save(store, 30)
    assert store.retire() == (10,)
    assert len(left(root)) == 1
    assert "trying again later" in caplog.text
    fault.armed = False
    save(store, 40)
    assert left(root) == []
    store.close()


def test_a_step_that_was_replaced_and_cannot_be_moved_stays_replaced(root: Path) -> None:
    fault = Fault("rename", errno.EIO, part=".retired")
    store = faulty(root, fault, NoExchange)
    save(store, 20, mark=99)
    assert [name.partition(".")[2] for name in left(root)] == ["replaced"]
    store.close()
    store = make_store(root)
    store.open()
    assert mark_of(step_path(root, 20)) == 99
    assert left(root) == []
    store.close()


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (errno.ENOSPC, "keep fewer steps"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permissions"),
        (errno.EIO, "device reports"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EXDEV, "a root on a volume"),
        (errno.ENAMETOOLONG, "shorter path"),
        (errno.EBUSY, "kernel log"),
    ],
)
def test_an_error_says_what_is_safe_and_what_to_do(root: Path, code: int, hint: str) -> None:
    store = faulty(root, Fault("mkdir", code))
    with pytest.raises(PersistError, match=hint) as caught:
        store.begin(30)
    assert "Committed steps are safe" in str(caught.value)
    assert os.strerror(code) in str(caught.value)
    assert (caught.value.step, caught.value.path) == (30, root)
    store.close()


def test_a_root_that_cannot_be_listed_begins_no_save(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.scandir

    def scandir(path: str | Path = ".") -> Any:
        if Path(path) == root:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return real(path)

    store = make_store(root)
    store.open()
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        with pytest.raises(PersistError, match="Too many open files"):
            store.begin(30)
    assert left(root) == []
    store.begin(30)
    store.close()


def test_pins_and_quarantine_report_a_failing_disk(root: Path) -> None:
    store = faulty(root, Fault("sync_dir", errno.EIO))
    with pytest.raises(PersistError, match="pin a step"):
        store.pin(10)
    store.suspect(10)
    with pytest.raises(PersistError, match="move corrupt steps aside"):
        store.quarantine_suspects()
    store.close()


def test_a_root_that_cannot_be_made_or_locked_says_so(root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="no directory"):
        make_store(tmp_path / "file").open()
    with pytest.raises(PersistError, match="open the checkpoint root"):
        make_store(tmp_path / "file" / "below").open()
    for name in ("mkdir", "create"):
        with pytest.raises(PersistError, match="read-only"):
            make_store(root, interrupted(QuickFiles, Fault(name, errno.EROFS))).open()
    with RootLock(root):
        pass


def test_an_open_that_fails_gives_the_lock_back(root: Path) -> None:
    fault = Fault("sync_dir", errno.EIO, part="ckpts")
    store = make_store(root, interrupted(QuickFiles, fault))
    (root / ".inflight" / "junk").mkdir(parents=True)
    with pytest.raises(PersistError, match="repair"):
        store.open()
    assert (root / ".inflight" / "junk").exists()
    with RootLock(root):
        pass


def test_a_filesystem_without_new_directories_is_not_called_removed() -> None:
    with pytest.raises(PersistError, match=r"/proc takes no new directories.*another one") as found:
        make_store(Path("/proc/nope/run")).open()
    assert "removed" not in str(found.value)


@pytest.mark.parametrize("held", ["000000000030-00000000", "slot"])
def test_a_leftover_that_cannot_be_deleted_keeps_no_other_one(
    root: Path, held: str, caplog: pytest.LogCaptureFixture
) -> None:
    fault = Fault("unlink", errno.EBUSY, part=f"{held}/")
    faulty(root, fault).close()
    attempts = [f"0000000000{step}-00000000" for step in (30, 40, 50)]
    # A directory is no file to be recycled.
    for path in (*(root / ".inflight" / name for name in attempts), root / ".slots" / "slot"):
        path.mkdir(parents=True)
        (path / "file").write_bytes(b"x")
    for number in range(4):
        (root / ".slots" / f"z{number}").write_bytes(b"x" * (number + 1))
    store = make_store(root, interrupted(QuickFiles, fault))
    store.open()
    store.close()
    slots = {"z2", "z3"}  # as many as are kept
    assert {*left(root), *left(root, ".slots")} == {held, *slots}
    assert caplog.text.count("could not clear leftovers") == 1 and f"{held}/file" in caplog.text
    fault.armed = False
    store.open()
    store.close()
    assert {*left(root), *left(root, ".slots")} == slots


def test_a_replaced_save_that_cannot_be_deleted_does_not_come_back_when_its_successor_goes(
    root: Path,
) -> None:
    fault = Fault("unlink", errno.EBUSY, part=".inflight/")
    faulty(root, fault).close()
    shutil.copytree(step_path(root, 20), root / ".inflight" / "000000000020-00000000.replaced")
    store = make_store(root, interrupted(QuickFiles, fault))
    store.open()
    store.remove([20])
    store.close()
    store.open()
    assert store.steps() == (10,)
    store.close()


@pytest.mark.parametrize("link", [False, True])
def test_what_is_no_step_and_has_the_name_of_one_is_to_be_moved_away(
    root: Path, link: bool
) -> None:
    store = make_store(root)
    store.open()
    target = step_path(root, 8)
    if link:
        target.symlink_to(root)
    else:
        target.write_text("mine")
    with pytest.raises(CommitError, match=r"no step has that name\. .* safe\. .*: move it away\.$"):
        save(store, 8)
    assert target.is_symlink() if link else target.read_text() == "mine"
    target.unlink()
    save(store, 8)
    store.close()
