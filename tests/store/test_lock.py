"""One writer per root, whatever happens to the writer."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ckpt_core
from ckpt_core.cli.listing import survey
from ckpt_core.errors import PersistError, RootBusy
from ckpt_core.store import RootLock
from ckpt_core.store.lock import owner_of
from ckpt_core.system.files import Files
from tests.crash.layers import hooked
from tests.store.harness import make_store, save

HOME = Path(ckpt_core.__file__).parents[1]


@contextmanager
def running(code: str, root: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `code` with `root` at hand; its first line of output has been read."""
    head = "import os, sys, time\nfrom pathlib import Path\nfrom ckpt_core.store import RootLock\n"
    head += "root = Path(sys.argv[1])\n"
    process = subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(code), str(root)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(HOME)},
        text=True,
    )
    assert process.stdout is not None
    try:
        process.first = process.stdout.readline().strip()  # type: ignore[attr-defined]
        yield process
    finally:
        process.kill()
        process.wait(timeout=60)
        process.stdout.close()


OWNER = """
RootLock(root).acquire()
print("ready", flush=True)
time.sleep(60)
"""

OWNER_THAT_FORKS = """
lock = RootLock(root)
lock.acquire()
child = os.fork()
if child == 0:
    sys.stdout.close()
    os.close(1)
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


@pytest.fixture
def made_root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    return root


def acquire_soon(root: Path) -> RootLock:
    lock, deadline = RootLock(root), time.monotonic() + 10
    while True:
        try:
            lock.acquire()
            return lock
        except RootBusy:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def test_another_process_keeps_the_root_and_is_named(made_root: Path) -> None:
    with running(OWNER, made_root) as owner:
        with pytest.raises(RootBusy) as caught:
            RootLock(made_root).acquire()
        text = str(caught.value)
        assert f"pid {owner.pid} on host" in text
        assert "since 20" in text and "time.sleep(60)" in text and "use another root" in text
        assert caught.value.path == made_root


def test_a_writer_that_is_killed_leaves_the_root_free(made_root: Path) -> None:
    with running(OWNER, made_root) as owner:
        owner.send_signal(signal.SIGKILL)
        owner.wait(timeout=60)
        acquire_soon(made_root).release()


def test_a_forked_child_does_not_keep_the_lock_of_its_dead_parent(made_root: Path) -> None:
    with running(OWNER_THAT_FORKS, made_root) as owner:
        child = int(owner.first)  # type: ignore[attr-defined]
        try:
            with pytest.raises(RootBusy):
                RootLock(made_root).acquire()
            owner.send_signal(signal.SIGKILL)
            owner.wait(timeout=60)
            os.kill(child, 0)
            acquire_soon(made_root).release()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_cannot_write_and_does_not_free_the_root(made_root: Path) -> None:
    code = """
    from ckpt_core.errors import RootBusy
    lock = RootLock(root)
    lock.acquire()
    child = os.fork()
    if child == 0:
        assert not lock.held()
        try:
            RootLock(root).acquire()
        except RootBusy as busy:
            lock.release()
            os._exit(0 if str(os.getppid()) in str(busy) else 1)
        os._exit(2)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), lock.held(), flush=True)
    time.sleep(60)
    """
    with running(code, made_root) as owner:
        assert owner.first == "0 True"  # type: ignore[attr-defined]
        with pytest.raises(RootBusy):
            RootLock(made_root).acquire()


def test_a_second_lock_of_this_process_is_refused_and_harms_nothing(made_root: Path) -> None:
    with RootLock(made_root) as lock:
        for other in (RootLock(made_root), RootLock(made_root / "." / ".." / "root"), lock):
            with pytest.raises(RootBusy, match=r"in this process.*close\(\) it first"):
                other.acquire()
        code = """
        try:
            RootLock(root).acquire()
            print("free")
        except Exception as error:
            print(type(error).__name__)
        """
        with running(code, made_root) as other_process:
            assert other_process.first == "RootBusy"  # type: ignore[attr-defined]
    RootLock(made_root).acquire()


def test_a_root_reached_by_a_link_is_the_same_root(made_root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(made_root)
    with RootLock(made_root), pytest.raises(RootBusy):
        RootLock(tmp_path / "link").acquire()


def test_release_is_idempotent_and_the_lock_can_be_taken_again(made_root: Path) -> None:
    lock = RootLock(made_root)
    for _ in range(3):
        lock.acquire()
        assert lock.held()
        lock.release()
        lock.release()
        assert not lock.held()


TRY = """
try:
    RootLock(root).acquire()
    print("free")
except Exception as error:
    print(type(error).__name__, error)
"""


def second_job(root: Path) -> str:
    """What another process hears that wants to write: the name of the error and its text, or "free"."""
    with running(TRY, root) as other:
        first: str = other.first  # type: ignore[attr-defined]
        return first


def copy_whole_root(root: Path) -> None:
    shutil.copytree(root, root.with_name("copy"))


def read_the_lock_file(root: Path) -> None:
    (root / ".lock").read_text()


def list_the_root(root: Path) -> None:
    assert survey(root).writer is not None


def try_to_lock_it(root: Path) -> None:
    with open(root / ".lock", "r+b") as file, contextlib.suppress(OSError):
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    "read", [copy_whole_root, read_the_lock_file, list_the_root, owner_of, try_to_lock_it]
)
def test_nothing_that_reads_the_root_in_the_training_process_lets_a_second_job_in(
    made_root: Path, read: Callable[[Path], object]
) -> None:
    with RootLock(made_root) as lock:
        read(made_root)
        assert "RootBusy" in second_job(made_root)
        assert lock.held()


class NoFileLocks(Files):
    """A kernel or a filesystem that has record locks only."""

    code = errno.EINVAL

    def lock(self, fd: int) -> None:
        raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_record_lock_stands_in_and_says_so_once(
    made_root: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    files = NoFileLocks()
    files.code = code
    with RootLock(made_root, files=files) as lock:
        assert lock.is_record and lock.held() and lock.held()
        assert "RootBusy" in second_job(made_root)
    assert caplog.text.count("a POSIX record lock stands in") == 1
    assert second_job(made_root) == "free"


def test_a_filesystem_without_any_locks_is_refused(made_root: Path) -> None:
    class NoLocks(NoFileLocks):
        code = errno.ENOLCK

        def lock_record(self, fd: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with pytest.raises(PersistError, match="This filesystem has no locks"):
        RootLock(made_root, files=NoLocks()).acquire()


def test_an_older_release_with_its_record_lock_and_this_one_keep_each_other_out(
    made_root: Path,
) -> None:
    older = """
    import fcntl, json
    file = open(root / ".lock", "a+b")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print("locked", flush=True)
    except OSError:
        print("busy", flush=True)
    time.sleep(60)
    """
    with RootLock(made_root), running(older, made_root) as other:
        assert other.first == "busy"  # type: ignore[attr-defined]
    with running(older, made_root) as other:
        assert other.first == "locked"  # type: ignore[attr-defined]
        with pytest.raises(RootBusy):
            RootLock(made_root).acquire()
    RootLock(made_root).acquire()


CHILD_BY_OTHER_MEANS = """
import ctypes
RootLock(root).acquire()
child = ctypes.PyDLL(None).fork()
if child == 0:
    sys.stdout.close()
    os.close(1)
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


def test_a_child_that_python_did_not_fork_keeps_the_lock_and_the_refusal_says_how_to_find_it(
    made_root: Path,
) -> None:
    with running(CHILD_BY_OTHER_MEANS, made_root) as owner:
        child = int(owner.first)  # type: ignore[attr-defined]
        try:
            owner.kill()
            owner.wait(timeout=60)
            with pytest.raises(RootBusy, match=r"That process is gone: .*`fuser "):
                RootLock(made_root).acquire()
        finally:
            os.kill(child, signal.SIGKILL)
        acquire_soon(made_root).release()


WORKERS_THAT_OUTLIVE_IT = """
import multiprocessing
lock = RootLock(root)
lock.acquire()
context = multiprocessing.get_context("fork")
workers = [context.Process(target=time.sleep, args=(60,), daemon=True) for _ in range(2)]
for worker in workers:
    worker.start()
print(" ".join(str(worker.pid) for worker in workers), flush=True)
time.sleep(60)
"""


def test_data_loader_workers_that_outlive_a_killed_trainer_let_the_next_job_in(
    made_root: Path,
) -> None:
    with running(WORKERS_THAT_OUTLIVE_IT, made_root) as owner:
        workers = [int(pid) for pid in owner.first.split()]  # type: ignore[attr-defined]
        try:
            owner.kill()
            owner.wait(timeout=60)
            for pid in workers:
                os.kill(pid, 0)
            acquire_soon(made_root).release()
        finally:
            for pid in workers:
                os.kill(pid, signal.SIGKILL)


def test_a_child_that_ends_does_not_free_the_root(made_root: Path) -> None:
    with RootLock(made_root) as lock:
        child = os.fork()
        if child == 0:
            lock.release()
            os._exit(0)
        os.waitpid(child, 0)
        assert "RootBusy" in second_job(made_root)
        assert lock.held()


def test_a_lock_dropped_by_other_code_is_taken_again(made_root: Path) -> None:
    with RootLock(made_root, files=NoFileLocks()) as lock:
        (made_root / ".lock").read_text()  # Opening and closing the file drops a record lock.
        assert lock.held()
        code = """
        try:
            RootLock(root).acquire()
            print("free")
        except Exception as error:
            print(type(error).__name__)
        """
        with running(code, made_root) as other:
            assert other.first == "RootBusy"  # type: ignore[attr-defined]


def test_a_lock_file_that_was_removed_is_no_lock(made_root: Path) -> None:
    with RootLock(made_root) as lock:
        (made_root / ".lock").unlink()
        assert not lock.held()


@pytest.mark.parametrize("asked", ["stat", "lock"])
def test_an_error_that_passes_lets_no_second_job_in(
    made_root: Path, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a server that is away for a moment."""
    home = os if asked == "stat" else Files
    real = getattr(home, asked)

    def away(*args: Any, **options: Any) -> Any:
        if asked == "lock" or str(args[0]).startswith(str(made_root)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args, **options)

    store = make_store(made_root)
    store.open()
    with monkeypatch.context() as patch:
        patch.setattr(home, asked, away)
        with pytest.raises(PersistError, match="look at the lock"):
            store.begin(1)
    assert "RootBusy" in second_job(made_root)
    save(store, 1)
    store.close()
    assert second_job(made_root) == "free"


def test_a_lock_file_that_is_a_link_is_refused(made_root: Path, tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (made_root / ".lock").symlink_to(tmp_path / "target")
    with pytest.raises(PersistError, match="could not lock"):
        RootLock(made_root).acquire()
    assert (tmp_path / "target").read_text() == "precious"
    (made_root / ".lock").unlink()
    RootLock(made_root).acquire()


@pytest.mark.parametrize("text", ["", "garbage", "[1, 2]", "\0" * 100])
def test_an_owner_that_cannot_be_read_is_unknown(made_root: Path, text: str) -> None:
    code = f"""
    RootLock(root).acquire()
    fd = os.open(root / ".lock", os.O_WRONLY | os.O_TRUNC)
    os.write(fd, {text!r}.encode())
    print("ready", flush=True)
    time.sleep(60)
    """
    with running(code, made_root), pytest.raises(RootBusy, match="pid unknown on host unknown"):
        RootLock(made_root).acquire()


def test_a_full_disk_does_not_keep_the_owner_out(
    made_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(Files):
        def pwrite(self, fd: int, data: object, offset: int) -> None:
            raise OSError(28, "No space left on device")

    with RootLock(made_root, files=Full()) as lock:
        assert lock.held()
    assert "could not note the owner" in caplog.text


def test_the_owner_is_at_the_server_before_other_ranks_are_told(made_root: Path) -> None:
    """Other machines look for it, and a client of NFS sends what was written before it asks for a lock."""
    done: list[str] = []

    def note(name: str, args: tuple[Any, ...], act: Callable[[], Any]) -> Any:
        done.append(name)
        return act()

    with RootLock(made_root, files=hooked(Files, note, ("pwrite", "lock"))) as lock:
        assert done == ["lock", "pwrite"]
        assert lock.owner()["pid"] == os.getpid()
        assert done == ["lock", "pwrite", "lock"]


def test_the_store_takes_the_lock_and_gives_it_back(made_root: Path) -> None:
    store = make_store(made_root)
    store.open()
    with pytest.raises(RootBusy):
        make_store(made_root).open()
    save(store, 1)
    store.close()
    other = make_store(made_root)
    other.open()
    other.close()
