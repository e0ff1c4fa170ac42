"""The parallel reader alone: what it owns, what it bounds, and how it ends."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from ckpt_core.errors import ConfigError
from ckpt_core.layout import FileEntry
from ckpt_core.restore.reading import ParallelReader, page_buffer
from ckpt_core.restore.units import (
    READ_BYTES,
    UNIT_BYTES,
    BadChunk,
    ChunkCheck,
    Discard,
    ReadJob,
    Unit,
    cut,
)
from ckpt_core.system.files import Files
from tests.restore.harness import Cold, FailingReads, Recipe, chunk_sums

SIZE = 40 * 1024 * 1024 + 4096


def job(path: Path, data: bytes, chunk_bytes: int, sink: Discard | None = None) -> ReadJob:
    entry = FileEntry(path.name, len(data), chunk_sums(data, Recipe(chunk_bytes=chunk_bytes)))
    return ReadJob(path, entry, sink or Discard())


@pytest.fixture
def data() -> bytes:
    return os.urandom(4096) * (SIZE // 4096)


@pytest.fixture
def file(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "file"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("chunk_bytes", [1000, 4096, 1 << 20, 3 << 20, 1 << 24, 1 << 30])
def test_units_cover_the_file_and_begin_at_whole_pages(
    file: Path, data: bytes, chunk_bytes: int
) -> None:
    work = job(file, data, chunk_bytes)
    end = 0
    for unit in cut(work):
        assert unit.offset == end
        assert unit.offset % 4096 == 0
        assert sum(chunk.nbytes for chunk in work.entry.chunks[: unit.first]) == unit.offset
        end += unit.nbytes
        assert unit.nbytes >= UNIT_BYTES or end == SIZE
    assert end == SIZE


@pytest.mark.parametrize("files", [Files(), Cold()], ids=["cached", "cold"])
def test_memory_is_one_buffer_for_each_reader_however_long_the_chunks(
    file: Path, data: bytes, files: Files
) -> None:
    made: list[int] = []

    def buffer(nbytes: int) -> memoryview:
        made.append(nbytes)
        return page_buffer(nbytes)

    how = ParallelReader(files=files, readers=2, timeout_s=60, new_buffer=buffer)
    outcome = how.run([job(file, data, 1 << 24)])
    assert outcome.done_bytes == SIZE
    assert not outcome.bad
    assert made == [READ_BYTES * 2]


def assert_no_reader_is_left() -> None:
    """They say that they have ended just before they do."""
    until = time.monotonic() + 60
    while [x for x in threading.enumerate() if x.name == "ckpt-reader"]:
        assert time.monotonic() < until, "a reader stays behind"
        time.sleep(0.001)


def test_nothing_stays_open_and_no_thread_stays_behind(file: Path, data: bytes) -> None:
    class Exploding(Discard):
        def deliver(self, start: int, data: memoryview) -> None:
            raise ZeroDivisionError

    before = os.listdir("/proc/self/fd")
    how = ParallelReader(files=Cold(), readers=3, timeout_s=30)
    with pytest.raises(ZeroDivisionError):
        how.run([job(file, data, 4096, Exploding())])
    failing = ParallelReader(files=FailingReads("file"), readers=3, timeout_s=30)
    assert failing.run([job(file, data, 4096)]).failed
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert_no_reader_is_left()


def test_readers_stop_when_the_waiting_thread_is_interrupted(file: Path, data: bytes) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    how = ParallelReader(files=Cold(), readers=2, timeout_s=30, progress=interrupt)
    with pytest.raises(KeyboardInterrupt):
        how.run([job(file, data, 4096)])
    assert_no_reader_is_left()


def test_the_first_finding_ends_a_run_and_keep_going_finds_all(file: Path, data: bytes) -> None:
    work = job(file, data, 4096)
    file.write_bytes(bytes(SIZE))
    how = ParallelReader(files=Files(), readers=1, timeout_s=30)
    assert len(how.run([work]).bad) < SIZE // 4096
    assert len(how.run([work], keep_going=True).bad) == SIZE // 4096


def test_a_file_of_another_size_is_bad_from_its_first_chunk_on(file: Path, data: bytes) -> None:
    work = job(file, data, 1 << 24)
    os.truncate(file, SIZE - 1)
    outcome = ParallelReader(files=Files(), readers=1, timeout_s=30).run([work], keep_going=True)
    assert {bad.index for bad in outcome.bad} == {0, 1, 2}
    assert outcome.bad[0].got == f"{SIZE - 1} of {SIZE} bytes are there"


@pytest.mark.parametrize("piece", [1, 63, 64, 65, 1000, 4096])
def test_checksums_do_not_depend_on_how_the_bytes_arrive(piece: int) -> None:
    data = bytes(range(256)) * 4
    entry = FileEntry("f", len(data), chunk_sums(data, Recipe(chunk_bytes=64)))
    unit = Unit(ReadJob(Path("f"), entry, Discard()), 0, 0, len(data))
    found: list[BadChunk] = []
    check = ChunkCheck(unit, found.append)
    broken = bytearray(data)
    broken[200] ^= 1
    view = memoryview(broken)
    check.feed([view[start : start + piece] for start in range(0, len(data), piece)])
    assert [(bad.index, bad.offset, bad.nbytes) for bad in found] == [(3, 192, 64)]


def test_nothing_is_read_without_a_reader() -> None:
    with pytest.raises(ConfigError, match="readers=0 must be an int of at least 1"):
        ParallelReader(files=Files(), readers=0, timeout_s=30)
