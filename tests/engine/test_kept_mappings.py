"""Files in memory that stay mapped from the save that wrote them to the one that overwrites them."""

from __future__ import annotations

import hashlib
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_core
from ckpt_core import Checkpointer, Options, PersistError, verify
from ckpt_core.system.files import Files
from tests.engine.in_memory import CHUNK, CountingFiles, state, until_warm
from tests.faults.mounts import mounted, remount

KEEP_ONE = Options(chunk_bytes=CHUNK, in_flight=1, keep_last=1, on_error="warn")
FILE_BYTES = 5 * CHUNK
SHARD = "shard-00000-0.safetensors"


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    with mounted("tmpfs", tmp_path) as where:
        yield where


@contextmanager
def warm(root: Path, options: Options = KEEP_ONE, **more: Any) -> Iterator[Checkpointer]:
    """A Checkpointer all of whose files have come round, and are mapped; its newest step is 9."""
    with Checkpointer(root, options, **more) as ck:
        for step in range(10):
            save(ck, step)
        yield ck


def save(ck: Checkpointer, step: int, tree: dict[str, torch.Tensor] | None = None) -> None:
    ck.save(step, tree or state(step)).committed.result()
    until_warm(ck)


def used_bytes(where: Path) -> int:
    found = os.statvfs(where)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def test_files_that_come_round_again_are_the_staging_memory_themselves(memory: Path) -> None:
    files = CountingFiles()
    with warm(memory / "root", files=files) as ck:
        assert ck.gauges.mode == "direct"
        before = files.of_leaves
        for step in range(10, 15):
            save(ck, step)
            assert ck.gauges.mode == "direct"
        assert files.of_leaves == before, "written by calls"
    verify(memory / "root")
    for name, tensor in state(14).items():
        assert torch.equal(ckpt_core.load(memory / "root")[name], tensor)


def test_writers_write_through_what_is_mapped_already(memory: Path) -> None:
    """As leaves of devices are, or with two phases."""
    files = CountingFiles()
    options = Options(chunk_bytes=CHUNK, in_flight=1, keep_last=1, pipelined=False)
    with warm(memory / "root", options, files=files) as ck:
        assert ck.gauges.mode == "host"
        before = files.of_leaves
        save(ck, 10)
        assert files.of_leaves == before, "written by calls"
    verify(memory / "root")
    assert torch.equal(ckpt_core.load(memory / "root")["w2"], state(10)["w2"])


@pytest.mark.parametrize("reader", ["opened", "mapped", "another process"])
def test_whoever_reads_a_step_keeps_its_bytes(memory: Path, reader: str) -> None:
    with warm(memory / "root") as ck:
        path = memory / "root" / "step-000000000009" / SHARD
        before = hashlib.sha256(path.read_bytes()).hexdigest()
        with _reading(path, reader) as read:
            for step in range(10, 16):
                save(ck, step)
            assert hashlib.sha256(read()).hexdigest() == before
        assert ck.steps() == (15,)
    verify(memory / "root")


@contextmanager
def _reading(path: Path, how: str) -> Iterator[Any]:
    if how == "another process":
        code = "import sys; f = open(sys.argv[1], 'rb'); print(flush=True); input()"
        code += "; sys.stdout.buffer.write(f.read())"
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", code, str(path)], **pipes) as child:
            assert child.stdout is not None
            child.stdout.readline()
            yield lambda: child.communicate(b"\n", timeout=60)[0]
        return
    with path.open("rb") as file:
        if how == "opened":
            yield file.read
            return
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    yield lambda: mapping[:]


def test_what_is_kept_is_bounded_and_goes_with_its_files(memory: Path) -> None:
    root, larger = memory / "root", {"w": torch.zeros(12 * CHUNK // 4)}
    with warm(root) as ck:
        assert len(ck._engine.pipeline.kept._kept) <= 3
        for step in range(10, 16):
            save(ck, step, larger)
        assert used_bytes(memory) <= 2 * 13 * CHUNK + CHUNK, "memory of files that are gone"
        for path in root.glob("step-*/*"):
            path.unlink()
        save(ck, 16, larger)
        save(ck, 17, larger)
        assert used_bytes(memory) <= 2 * 13 * CHUNK + CHUNK
    assert ckpt_core.load(root)["w"].shape == larger["w"].shape


def test_a_smaller_state_and_a_larger_one_again(memory: Path) -> None:
    with warm(memory / "root") as ck:
        for step in range(10, 22):
            tree = {"w": torch.full((CHUNK // 4 * (1 + step % 3),), float(step))}
            save(ck, step, tree)
            assert torch.equal(ckpt_core.load(memory / "root")["w"], tree["w"])
    verify(memory / "root")


@pytest.mark.parametrize("nbytes", [0, CHUNK, 2 * FILE_BYTES])
def test_a_file_that_somebody_has_cut_is_written_anew(memory: Path, nbytes: int) -> None:
    """Whoever wrote behind its end would be killed (SIGBUS)."""
    with warm(memory / "root") as ck:
        for path in (memory / "root").glob(".slots/*"):
            os.truncate(path, nbytes)
        for path in (memory / "root").glob("step-*/shard*"):
            os.truncate(path, nbytes)
        for step in range(10, 16):
            save(ck, step)
    verify(memory / "root")
    assert torch.equal(ckpt_core.load(memory / "root")["w1"], state(15)["w1"])


def test_a_hole_that_cannot_be_filled_fails_the_save_and_not_the_process(memory: Path) -> None:
    with warm(memory / "root") as ck:
        slots = list((memory / "root").glob(".slots/*"))
        assert slots
        for path in slots:
            size = path.stat().st_size
            os.truncate(path, 0)
            os.truncate(path, size)
        free = os.statvfs(memory).f_bavail * os.statvfs(memory).f_frsize
        filler = memory / "filler"
        filler.write_bytes(bytes(free - 64 * 1024))
        with pytest.raises(PersistError, match="free"):
            ck.save(10, state(10)).committed.result()
        assert ck.steps() == (9,)
        filler.unlink()
        save(ck, 11)
    verify(memory / "root")


def test_slots_that_cannot_be_looked_at_fail_the_save_and_not_the_call(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> list[Any]:
        raise PermissionError(13, "refused", str(path))

    with warm(memory / "root") as ck:
        monkeypatch.setattr("ckpt_core.store.slots.entries", refuse)
        with pytest.raises(PersistError, match="refused"):
            ck.save(10, state(10)).committed.result()
        assert ck.gauges.mode == "host"
        monkeypatch.undo()
        for step in (11, 12, 13, 14):
            save(ck, step)
        assert ck.gauges.mode == "direct"
    verify(memory / "root")


class FailingSync(Files):
    """The n-th sync of a file fails."""

    left = -1

    def sync(self, fd: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(5, "a sync that fails")
        super().sync(fd)


@pytest.mark.parametrize("nth", [1, 2])
def test_what_a_failed_save_has_written_is_not_kept(memory: Path, nth: int) -> None:
    files = FailingSync()
    with warm(memory / "root", files=files) as ck:
        files.left = nth
        with pytest.raises(ckpt_core.CkptError, match="a sync that fails"):
            ck.save(10, state(10)).committed.result()
        files.left = -1
        kept = ck._engine.pipeline.kept._kept.values()
        assert all(os.fstat(one.fd).st_nlink for one in kept)
        for step in range(11, 16):
            save(ck, step)
    verify(memory / "root")
    assert torch.equal(ckpt_core.load(memory / "root")["w3"], state(15)["w3"])


def test_a_forked_child_holds_no_memory_of_files_that_are_gone(memory: Path) -> None:
    code = """
import os, sys, time
from pathlib import Path
from ckpt_core import Checkpointer
from tests.engine.test_kept_mappings import KEEP_ONE, used_bytes, warm
memory = Path(sys.argv[1])
told, tells = os.pipe()
with warm(memory / "root"):
    pid = os.fork()
    if pid == 0:
        os.write(tells, b"x")
        time.sleep(60)
        os._exit(0)
os.read(told, 1)  # it runs
for path in (memory / "root").rglob("*"):
    if path.is_file():
        path.unlink()
print(used_bytes(memory))
os.kill(pid, 9)
os.waitpid(pid, 0)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(memory)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < CHUNK


@pytest.mark.parametrize("why", ["a disk", "huge pages", "nothing is retired"])
def test_nothing_is_kept_where_it_does_not_pay(memory: Path, tmp_path: Path, why: str) -> None:
    root = (tmp_path if why == "a disk" else memory) / "root"
    if why == "huge pages":
        remount(memory, "huge=always")
    keep_last = None if why == "nothing is retired" else 1
    with Checkpointer(root, Options(chunk_bytes=CHUNK, keep_last=keep_last)) as ck:
        for step in range(5):
            ck.save(step, {"w": torch.ones(CHUNK // 4)}).committed.result()
        assert not ck._engine.pipeline.kept._kept


def test_closing_lets_go_of_all(memory: Path) -> None:
    with warm(memory / "root") as ck:
        kept = [one.fd for one in ck._engine.pipeline.kept._kept.values()]
        assert kept
    for fd in kept:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    maps = Path("/proc/self/maps").read_text()
    assert str(memory / "root") not in maps
