"""What is read from outside a process, and what becomes of a contender that fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_core.bench import Report, Settings, cache, proc
from ckpt_core.bench.core import LAUNCH
from ckpt_core.bench.crew import Crew
from ckpt_core.bench.remote import ContenderFailed, Remote
from ckpt_core.bench.run import Run
from ckpt_core.system.machine import describe

MIB = 2**20
# The kernel charges a process for the pages of the directories and inodes that it dirties, too.
METADATA = 64 * 2**10

CHILD = """
import os, sys
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def test_peak_memory_sees_what_was_allocated_and_freed_again(
    child: subprocess.Popen[str],
) -> None:
    tell(child, "pass")
    before = proc.memory_bytes(child.pid)
    with proc.PeakMemory(child.pid) as memory:
        tell(child, "data = bytearray(64 * 2**20)")
        deadline = time.monotonic() + 60
        while memory.peak_bytes - before < 60 * MIB and time.monotonic() < deadline:
            time.sleep(0.01)
        tell(child, "del data")
    # A share of what it maps with other processes counts, and those come and go.
    assert 60 * MIB <= memory.peak_bytes - before < 72 * MIB


def test_the_memory_of_a_grandchild_counts(child: subprocess.Popen[str]) -> None:
    tell(child, "import subprocess")
    before = proc.memory_bytes(child.pid)
    code = "data = bytearray(32 * 2**20); print(1, flush=True); input()"
    tell(
        child,
        f"p = subprocess.Popen([sys.executable, '-c', {code!r}], stdin=-1, stdout=-1); "
        "p.stdout.readline()",
    )
    assert len(proc.tree(child.pid)) == 2
    assert proc.memory_bytes(child.pid) - before >= 32 * MIB
    tell(child, "p.communicate(b'x')")


BUSY = "import time\nwhile time.process_time() < 0.2: pass\nprint(1, flush=True)\ninput()"


def test_a_child_counts_as_processor_time_while_it_lives_and_once_it_has_ended(
    child: subprocess.Popen[str],
) -> None:
    tell(child, "import subprocess")
    before = proc.processor_s(child.pid)
    tell(
        child,
        f"p = subprocess.Popen([sys.executable, '-c', {BUSY!r}], stdin=-1, stdout=-1); "
        "p.stdout.readline()",
    )
    living = proc.processor_s(child.pid) - before
    tell(child, "p.communicate(b'x')")
    ended = proc.processor_s(child.pid) - before
    assert living >= 0.2
    assert ended >= living - 0.02  # the kernel tells of those that have ended in ticks


def test_threads_count_as_processor_time_and_waiting_does_not(
    child: subprocess.Popen[str],
) -> None:
    tell(child, "import threading, time")
    before = proc.processor_s(child.pid)
    tell(child, "time.sleep(0.5)")
    waited = proc.processor_s(child.pid) - before
    loop = "while time.thread_time() < 0.2: pass"
    tell(
        child, f"t = threading.Thread(target=exec, args=({loop!r}, globals())); t.start(); t.join()"
    )
    assert waited < 0.4
    assert proc.processor_s(child.pid) - before - waited >= 0.2


def test_a_process_that_has_ended_has_no_processor_time() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert proc.processor_s(process.pid) == 0


def test_every_byte_written_is_counted(child: subprocess.Popen[str], tmp_path: Path) -> None:
    tell(child, "pass")
    before = proc.io_bytes(child.pid)
    tell(child, f"open({str(tmp_path / 'x')!r}, 'wb').write(bytes(8 * 2**20))")
    written = proc.io_bytes(child.pid).since(before).written
    if written == 0:
        pytest.skip("this filesystem does not count what is written")
    assert 8 * MIB <= written < 8 * MIB + METADATA


def test_a_dropped_file_is_read_from_storage_again(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    path = tmp_path / "below" / "x"
    path.write_bytes(os.urandom(4 * MIB))
    cache.warm(tmp_path)
    before = proc.io_bytes(os.getpid())
    path.read_bytes()
    assert proc.io_bytes(os.getpid()).since(before).read < METADATA
    cache.drop(tmp_path)
    path.read_bytes()
    read = proc.io_bytes(os.getpid()).since(before).read
    if read < METADATA:
        pytest.skip("this filesystem keeps its pages")
    assert 4 * MIB <= read < 4 * MIB + METADATA


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Remote]:
    (tmp_path / "torch_save").mkdir()
    remote = Remote("torch_save", tmp_path / "torch_save", timeout_s=60.0, worker=LAUNCH.worker)
    yield remote
    remote.close()


def test_an_error_in_a_contender_is_reported_and_leaves_it_usable(remote: Remote) -> None:
    with pytest.raises(ContenderFailed, match="torch_save: save failed: AssertionError"):
        remote.call("save")
    assert remote.call("hello")["reason"] is None


def test_a_contender_that_dies_is_noticed(remote: Remote) -> None:
    remote.call("hello")
    os.kill(remote.pid, signal.SIGKILL)
    with pytest.raises(ContenderFailed, match="its process ended"):
        remote.call("hello")


def test_a_contender_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "torch_save").mkdir()
    remote = Remote("torch_save", tmp_path / "torch_save", timeout_s=0.0, worker=LAUNCH.worker)
    try:
        with pytest.raises(ContenderFailed, match="no answer to hello"):
            remote.call("hello")
    finally:
        remote.close()


def test_closing_twice_is_harmless(remote: Remote) -> None:
    remote.close()
    remote.close()


def test_who_fails_sits_out_until_the_next_workload(tmp_path: Path) -> None:
    settings = Settings(root=tmp_path, contenders=("torch_save", "torch_save_fsync")).quick()
    report = Report("core", {}, describe(tmp_path))
    with Crew(Run(settings, report, tmp_path, lambda message: None), LAUNCH) as crew:
        crew.enter(settings.contenders)
        os.kill(crew.team("torch_save").pids[0], signal.SIGKILL)
        assert crew.ask("torch_save", "hello") is None
        assert crew.names() == ["torch_save_fsync"]
        assert crew.ask("torch_save", "hello") is None
        crew.readmit()
        assert set(crew.names()) == {"torch_save", "torch_save_fsync"}
        assert crew.ask("torch_save", "hello") is not None
    assert report.entrants["torch_save"].failed
    assert not report.entrants["torch_save_fsync"].failed
