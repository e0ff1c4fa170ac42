"""How much memory may be taken: made-up trees of control groups, and the limits of this process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ckpt_core.system.memory_limit import free_memory, room_left


def _group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_the_tightest_limit_of_a_control_group_counts(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("0::/job/step\n")
    _group(tmp_path / "fs" / "job" / "step", memory__max="max", memory__current=5)
    assert room_left(groups, tmp_path / "fs") is None
    (tmp_path / "fs" / "job" / "memory.max").write_text("1000\n")
    (tmp_path / "fs" / "job" / "memory.current").write_text("700\n")
    (tmp_path / "fs" / "job" / "memory.stat").write_text("anon 500\ninactive_file 200\n")
    assert room_left(groups, tmp_path / "fs") == 500


def test_version_1_and_a_container_that_sees_its_own_group_only(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("5:cpu:/x\n4:memory:/docker/0123abcd\n0::/\n")
    files = {"memory__limit_in_bytes": 1000, "memory__usage_in_bytes": 1200}
    _group(tmp_path / "fs" / "memory", **files)
    assert room_left(groups, tmp_path / "fs") == 0
    assert room_left(tmp_path / "missing", tmp_path / "fs") is None


def test_cache_that_can_be_dropped_is_room_and_what_lies_in_tmpfs_is_not(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("0::/job\n")
    job = tmp_path / "fs" / "job"
    _group(job, memory__max=1000, memory__current=900)
    stat = "anon 100\nfile 800\nshmem 400\ninactive_anon 400\ninactive_file 300\nactive_file 100\n"
    (job / "memory.stat").write_text(stat)
    assert room_left(groups, tmp_path / "fs") == 450
    (job / "memory.stat").write_text(stat + "file_dirty 120\nfile_writeback 30\n")
    assert room_left(groups, tmp_path / "fs") == 300


def test_a_limit_at_which_everything_stands_still_counts_as_one_that_kills(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("0::/job\n")
    _group(tmp_path / "fs" / "job", memory__max=1000, memory__high=800, memory__current=500)
    assert room_left(groups, tmp_path / "fs") == 300


def test_version_1_counts_the_groups_below_too_and_swap_with_memory(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("4:memory:/job\n")
    job = tmp_path / "fs" / "memory" / "job"
    files = {"memory__limit_in_bytes": 1000, "memory__usage_in_bytes": 900}
    _group(job, **files)
    (job / "memory.stat").write_text("inactive_file 0\ntotal_inactive_file 500\ntotal_dirty 100\n")
    assert room_left(groups, tmp_path / "fs") == 500
    (job / "memory.memsw.limit_in_bytes").write_text("1100\n")
    (job / "memory.memsw.usage_in_bytes").write_text("1050\n")
    assert room_left(groups, tmp_path / "fs") == 450


def test_the_host_has_the_last_word(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_text("0::/job\n")
    _group(tmp_path / "fs" / "job", memory__max=2**60, memory__current=0)
    assert free_memory(groups, tmp_path / "fs") <= psutil.virtual_memory().total
    (tmp_path / "fs" / "job" / "memory.max").write_text(f"{2**20}\n")
    assert free_memory(groups, tmp_path / "fs") == 2**20


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_limits_of_the_process_count(limit: str) -> None:
    text = f"""
import resource
from ckpt_core.system.memory_limit import free_memory
resource.setrlimit(resource.{limit}, (2**36, 2**36))
free = free_memory()
resource.setrlimit(resource.{limit}, (2**36 - free + 2**20, 2**36))
assert abs(free_memory() - 2**20) < 2**19 or free < 2**35, (free, free_memory())
resource.setrlimit(resource.{limit}, (2**20, 2**36))
assert free_memory() == 0
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
