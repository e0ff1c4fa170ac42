"""A root in memory: in huge pages the file is the staging memory, and every promise holds as on a disk."""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckpt_core
from ckpt_core import Checkpointer, Options, verify
from ckpt_core.system.files import Files
from tests.engine.in_memory import CHUNK, CountingFiles, state
from tests.faults.mounts import mounted, remount

OPTIONS = Options(chunk_bytes=CHUNK, in_flight=2, keep_last=1)


@pytest.fixture
def huge(tmp_path: Path) -> Iterator[Path]:
    with mounted("tmpfs", tmp_path) as where:
        remount(where, "huge=within_size")
        yield where / "root"


def test_in_huge_pages_leaves_are_copied_once_and_take_no_staging_memory(huge: Path) -> None:
    files = CountingFiles()
    with Checkpointer(huge, OPTIONS, files=files) as ck:
        for step in range(1, 5):
            ck.save(step, state(step))
            assert ck.gauges.mode == "direct"
        ck.wait()
        plan = ck._engine.pipeline.memory._pool.plan
    assert plan.stream_chunks == 0 and plan.total_bytes == 2 * CHUNK
    assert files.of_leaves == 4 * CHUNK, "the front of each file, and nothing else"
    verify(huge)
    assert torch.equal(ckpt_core.load(huge)["w3"], state(4)["w3"])


@pytest.mark.parametrize("option", [None, "huge=never", "huge=advise"])
def test_in_small_pages_leaves_go_through_staging_memory(
    tmp_path: Path, option: str | None
) -> None:
    with mounted("tmpfs", tmp_path) as where:
        if option is not None:
            remount(where, option)
        with Checkpointer(where / "root", OPTIONS) as ck:
            ck.save(1, state(1)).committed.result()
            assert ck.gauges.mode == "host"


def test_a_disk_is_no_memory(tmp_path: Path) -> None:
    assert not Files().in_huge_pages(Path("/proc"))
    assert not Files().in_huge_pages(tmp_path / "nothing")


@pytest.mark.parametrize("mode", ["host", "direct"])
def test_a_mode_that_is_named_is_used(tmp_path: Path, mode: str) -> None:
    files = CountingFiles(huge=mode == "host")
    with Checkpointer(tmp_path, Options(chunk_bytes=CHUNK, mode=mode), files=files) as ck:
        ck.save(1, state(1)).committed.result()
        assert ck.gauges.mode == mode


def test_two_phases_never_map_a_file(tmp_path: Path) -> None:
    options = Options(chunk_bytes=CHUNK, pipelined=False)
    with Checkpointer(tmp_path, options, files=CountingFiles(huge=True)) as ck:
        ck.save(1, state(1)).committed.result()
        assert ck.gauges.mode == "host"


def test_where_nothing_can_be_reserved_no_file_is_mapped(root: Path) -> None:
    """On zfs, a full disk would end the process with SIGBUS."""

    class Unreserved(Files):
        def reserves(self, path: Path) -> bool:
            return False

        def map_shared(self, fd: int, size: int) -> mmap.mmap:
            raise AssertionError("mapped")

    with Checkpointer(root, Options(mode="direct"), files=Unreserved()) as ck:
        ck.save(1, state(1)).committed.result(60)


def test_no_save_asks_the_storage_on_the_thread_of_training(root: Path) -> None:
    """It would wait there for storage that hangs."""
    asked: list[threading.Thread] = []

    class Watched(Files):
        def in_huge_pages(self, path: Path) -> bool:
            asked.append(threading.current_thread())
            return super().in_huge_pages(path)

        def in_memory(self, path: Path) -> bool:
            asked.append(threading.current_thread())
            return super().in_memory(path)

    with Checkpointer(root, OPTIONS, files=Watched()) as ck:
        asked.clear()
        ck.save(1, state(1)).committed.result(60)
        assert threading.main_thread() not in asked


def test_a_step_that_somebody_reads_keeps_its_bytes_while_later_ones_are_saved(huge: Path) -> None:
    with Checkpointer(huge, OPTIONS) as ck:
        ck.save(1, state(1)).committed.result()
        with (huge / "step-000000000001" / "shard-00000-0.safetensors").open("rb") as reader:
            before = hashlib.sha256(reader.read()).hexdigest()
            for step in range(2, 7):
                ck.save(step, state(step)).committed.result()
            reader.seek(0)
            assert hashlib.sha256(reader.read()).hexdigest() == before
        assert ck.steps() == (6,)


def test_memory_that_was_enough_for_mapped_files_grows_for_other_saves(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, OPTIONS, files=CountingFiles(huge=True)) as ck:
        ck.save(1, state(1)).committed.result()
        save = ck.begin(2, state(2))
        save.stage(state(2))
        save.seal().committed.result()
        ck.save(3, state(3)).committed.result()
        assert ck.gauges.mode == "direct"
    assert torch.equal(ckpt_core.load(tmp_path)["w1"], state(3)["w1"])
    verify(tmp_path)


def test_a_larger_state_gets_larger_pieces(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, OPTIONS, files=CountingFiles(huge=True)) as ck:
        ck.save(1, {"w": torch.ones(8192)}).committed.result()
        assert ck._engine.pipeline.memory._pool.plan.chunk_bytes < CHUNK
        ck.save(2, state(2)).committed.result()
        assert ck._engine.pipeline.memory._pool.plan.chunk_bytes == CHUNK


def test_a_state_larger_than_staging_bytes_needs_no_wait_for_storage(tmp_path: Path) -> None:
    options = Options(chunk_bytes=CHUNK, staging_bytes=2 * CHUNK, in_flight=2)
    with Checkpointer(tmp_path, options, files=CountingFiles(huge=True)) as ck:
        ck.save(1, state(1)).committed.result()
        assert ck.gauges.mode == "direct"
        plan = ck._engine.pipeline.memory._pool.plan
    assert plan.total_bytes <= 2 * CHUNK
