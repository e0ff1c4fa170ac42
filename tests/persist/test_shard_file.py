"""Shard files on real filesystems: direct, buffered, mapped and recycled ones hold the same bytes."""

from __future__ import annotations

import mmap
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import xxhash

from ckpt_core.errors import PersistError
from ckpt_core.persist import SUM_BYTES, FilePlace, ShardFile, ShardRequest, WriteJob, WriterPool
from ckpt_core.system.devices import NOTHING_QUEUED, Queued
from ckpt_core.system.files import Files
from ckpt_core.types import DirectIO
from tests.persist.undirect import NoDirectOpen, NoDirectWrite

CHUNK = 8192


@dataclass
class FakePiece:
    """A piece as the stager would give it, in page-aligned memory."""

    index: int
    offset: int
    nbytes: int
    memory: memoryview
    ready: Queued = NOTHING_QUEUED
    releases: int = 0

    def release(self) -> None:
        self.releases += 1


def pieces_of(data: bytes, size: int = CHUNK) -> list[FakePiece]:
    memory = mmap.mmap(-1, len(data))
    memory.write(data)
    view = memoryview(memory)
    return [
        FakePiece(at // size, at, len(view[at : at + size]), view[at : at + size])
        for at in range(0, len(data), size)
    ]


def shard(path: Path, nbytes: int, *, recycled: bool = False, **changes: Any) -> ShardFile:
    settings: dict[str, Any] = {
        "name": path.name,
        "nbytes": nbytes,
        "place": lambda: FilePlace(path, recycled),
        "direct_io": DirectIO.AUTO,
        "mapped": False,
        "checksum": True,
        "step": 3,
    }
    files = changes.pop("files", Files())
    return ShardFile(ShardRequest(**(settings | changes)), files=files)


DATA = os.urandom(5 * CHUNK + 4096)


@pytest.mark.parametrize("direct_io", list(DirectIO))
@pytest.mark.parametrize("order", [1, -1], ids=["in order", "backwards"])
def test_written_bytes_and_checksums_are_those_of_the_pieces(
    tmp_path: Path, direct_io: DirectIO, order: int
) -> None:
    file = shard(tmp_path / "s", len(DATA), direct_io=direct_io)
    for piece in pieces_of(DATA)[::order]:
        file.write(piece)
    results = file.sync()
    file.close()
    file.close()
    assert (tmp_path / "s").read_bytes() == DATA
    assert [r.nbytes for r in results] == [CHUNK] * 5 + [4096]
    assert results[1].xxh3 == xxhash.xxh3_64(DATA[CHUNK : 2 * CHUNK]).hexdigest()


@pytest.mark.parametrize("nbytes", [SUM_BYTES, 3 * SUM_BYTES, 2 * SUM_BYTES + 4096])
def test_a_long_piece_is_one_write_under_several_checksums(tmp_path: Path, nbytes: int) -> None:
    class Counting(Files):
        writes = 0

        def pwrite(self, fd: int, data: Any, offset: int) -> None:
            self.writes += 1
            super().pwrite(fd, data, offset)

    data, files = os.urandom(nbytes), Counting()
    memory = mmap.mmap(-1, nbytes)
    memory.write(data)
    file = shard(tmp_path / "s", nbytes, files=files, sum_bytes=SUM_BYTES)
    file.write(FakePiece(0, 0, nbytes, memoryview(memory)))
    results = file.sync()
    file.close()
    assert files.writes == 1
    parts = [data[at : at + SUM_BYTES] for at in range(0, nbytes, SUM_BYTES)]
    assert [(r.nbytes, r.xxh3) for r in results] == [
        (len(part), xxhash.xxh3_64(part).hexdigest()) for part in parts
    ]


@pytest.mark.parametrize("direct_io", list(DirectIO))
@pytest.mark.parametrize(
    "nbytes", [1, 4095, 4096, 4097, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7]
)
@pytest.mark.parametrize("checksum", [True, False])
def test_a_file_is_cut_to_its_exact_length(
    tmp_path: Path, direct_io: DirectIO, nbytes: int, checksum: bool
) -> None:
    padded = -(-nbytes // 4096) * 4096
    data = DATA[:nbytes] + b"\xff" * (padded - nbytes)
    file = shard(tmp_path / "s", padded, direct_io=direct_io, exact_bytes=nbytes, checksum=checksum)
    for piece in pieces_of(data):
        file.write(piece)
    results = file.sync()
    file.close()
    assert (tmp_path / "s").read_bytes() == DATA[:nbytes]
    parts = [DATA[at : min(at + CHUNK, nbytes)] for at in range(0, nbytes, CHUNK)]
    sums = [xxhash.xxh3_64(part).hexdigest() if checksum else None for part in parts]
    assert [(r.nbytes, r.xxh3) for r in results] == list(zip(map(len, parts), sums, strict=True))


def test_without_checksums_none_is_computed(tmp_path: Path) -> None:
    file = shard(tmp_path / "s", CHUNK, checksum=False)
    file.write(pieces_of(DATA[:CHUNK])[0])
    assert file.sync()[0].xxh3 is None
    file.close()


@pytest.mark.parametrize("old_bytes", [4096, len(DATA), 3 * len(DATA)])
def test_a_recycled_file_is_overwritten_in_place_and_has_the_new_length(
    tmp_path: Path, old_bytes: int
) -> None:
    path = tmp_path / "s"
    path.write_bytes(b"\xaa" * old_bytes)
    inode = path.stat().st_ino
    file = shard(path, len(DATA), recycled=True)
    for piece in pieces_of(DATA):
        file.write(piece)
    file.sync()
    file.close()
    assert path.read_bytes() == DATA
    assert path.stat().st_ino == inode


def test_windows_are_the_file_itself(tmp_path: Path) -> None:
    path = tmp_path / "s"
    file = shard(path, len(DATA), mapped=True)
    for piece in pieces_of(DATA):
        window = file.window(piece.offset, piece.nbytes)
        window[:] = piece.memory
        file.write(FakePiece(piece.index, piece.offset, piece.nbytes, window))
    results = file.sync()
    file.close()
    assert path.read_bytes() == DATA
    assert results[0].xxh3 == xxhash.xxh3_64(DATA[:CHUNK]).hexdigest()


@pytest.mark.parametrize("files", [NoDirectOpen(), NoDirectWrite()], ids=["open", "write"])
def test_where_direct_io_is_refused_the_same_file_is_written_buffered(
    tmp_path: Path, files: Files
) -> None:
    file = shard(tmp_path / "s", len(DATA), files=files)
    for piece in pieces_of(DATA):
        file.write(piece)
    file.sync()
    file.close()
    assert (tmp_path / "s").read_bytes() == DATA


@pytest.mark.parametrize("files", [NoDirectOpen(), NoDirectWrite()], ids=["open", "write"])
def test_direct_io_on_means_an_error_where_it_is_refused(tmp_path: Path, files: Files) -> None:
    file = shard(tmp_path / "s", len(DATA), files=files, direct_io=DirectIO.ON)
    with pytest.raises(PersistError, match="step 3 was not saved"):
        file.write(pieces_of(DATA)[0])
    file.close()


def test_an_error_names_step_path_cause_and_advice(tmp_path: Path) -> None:
    file = shard(tmp_path / "missing" / "s", CHUNK)
    with pytest.raises(PersistError, match="Earlier steps are untouched") as info:
        file.write(pieces_of(DATA[:CHUNK])[0])
    assert info.value.step == 3
    assert info.value.path == tmp_path / "missing" / "s"
    assert isinstance(info.value.__cause__, FileNotFoundError)


def test_writers_release_every_piece_and_report_every_error(tmp_path: Path) -> None:
    import threading

    pool = WriterPool(3)
    pool.start()
    good = shard(tmp_path / "good", len(DATA))
    bad = shard(tmp_path / "missing" / "bad", len(DATA))
    jobs = [(good, piece) for piece in pieces_of(DATA)] + [(bad, p) for p in pieces_of(DATA)]
    results: list[BaseException | None] = []
    ended = threading.Semaphore(0)

    def done(error: BaseException | None) -> None:
        results.append(error)
        ended.release()

    for file, piece in jobs:
        pool.submit(WriteJob(file, piece, lambda: False, done))
    for _ in jobs:
        assert ended.acquire(timeout=60)
    pool.close(timeout_s=60)
    good.sync()
    good.close()
    assert (tmp_path / "good").read_bytes() == DATA
    assert all(piece.releases == 1 for _, piece in jobs)
    assert sum(isinstance(error, PersistError) for error in results) == len(jobs) // 2


def test_a_cancelled_piece_is_released_and_not_written(tmp_path: Path) -> None:
    import threading

    pool = WriterPool(1)
    pool.start()
    file = shard(tmp_path / "s", CHUNK)
    piece = pieces_of(DATA[:CHUNK])[0]
    ended = threading.Event()
    pool.submit(WriteJob(file, piece, lambda: True, lambda error: ended.set()))
    assert ended.wait(60)
    pool.close(timeout_s=60)
    assert piece.releases == 1
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("before", "now"), [((2, 1), (1, 1, 1)), ((1, 1, 1), (2, 1))], ids=["smaller", "larger"]
)
def test_a_piece_is_that_of_an_earlier_file_only_where_it_lies_there(
    tmp_path: Path, before: tuple[int, ...], now: tuple[int, ...]
) -> None:
    """Staging memory that was replaced has chunks of another size: number 1 lies somewhere else."""
    a, b, c = (os.urandom(CHUNK) for _ in range(3))
    data = {(2, 1): a + b + c, (1, 1, 1): a + c + b}  # number 1 is c in both
    target = {"shared_at": lambda: tmp_path / "s"}
    earlier = shard(tmp_path / "earlier", 3 * CHUNK, **target)
    for piece in pieces_of(data[before], before[0] * CHUNK):
        earlier.write(piece)
    earlier.sync()
    file = shard(tmp_path / "s", 3 * CHUNK, **target)
    file.earlier, earlier.held = earlier.held, None
    file.compare()
    for piece in pieces_of(data[now], now[0] * CHUNK):
        file.write(piece)
    file.sync()
    for one in (file, earlier):
        one.close()
        one.let_go()
    assert not file.is_shared
    assert (tmp_path / "s").read_bytes() == data[now]


NO_FALLOCATE = """
import ctypes, os, struct, sys
from pathlib import Path
from ckpt_core.system.files import Files

def rule(code, yes, no, value):
    return struct.pack("HBBI", code, yes, no, value)

rules = rule(0x20, 0, 0, 0) + rule(0x15, 0, 1, int(sys.argv[2]))
rules += rule(0x06, 0, 0, 0x00050000 | 95) + rule(0x06, 0, 0, 0x7FFF0000)
buffer = ctypes.create_string_buffer(rules)
program = struct.pack("HxxxxxxP", 4, ctypes.addressof(buffer))
libc = ctypes.CDLL(None)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program):
    sys.exit(3)

def writes():
    with open("/proc/self/io") as found:
        return int(dict(line.split(": ") for line in found)["syscw"])

files = Files()
for name, mapped in (("plain", False), ("mapped", True)):
    fd = files.create(Path(sys.argv[1]) / name)
    before = writes()
    files.allocate(fd, 2**20, mapped=mapped)
    print(writes() - before, os.fstat(fd).st_blocks * 512)
"""
"""Answers `fallocate` as a filesystem without it does; write calls, and bytes of blocks, for both kinds."""


def test_without_fallocate_only_a_mapped_file_has_its_blocks_written(tmp_path: Path) -> None:
    number = {"x86_64": 285, "aarch64": 47}.get(platform.machine())
    if number is None:
        pytest.skip(f"the number of fallocate on {platform.machine()} is not known here")
    command = [sys.executable, "-c", NO_FALLOCATE, str(tmp_path), str(number)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode == 3:
        pytest.skip("no seccomp filter is to be had here")
    assert done.returncode == 0, done.stderr
    plain, mapped = (tuple(map(int, line.split())) for line in done.stdout.splitlines())
    assert plain[0] < 10
    assert mapped[1] >= 2**20
