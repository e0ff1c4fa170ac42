"""Which mappings are kept, for how long, and who may have them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_core.system.files import Files
from ckpt_core.system.kept_mappings import KeptMappings
from tests.faults.mounts import mounted

NBYTES = 64 * 1024


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    with mounted("tmpfs", tmp_path) as where:
        yield where


@pytest.fixture
def kept() -> Iterator[KeptMappings]:
    found = KeptMappings(files=Files(), most=2)
    yield found
    found.close()


def made(path: Path, nbytes: int = NBYTES) -> int:
    fd = Files().create(path)
    Files().pwrite(fd, bytes(nbytes), 0)
    return fd


def is_open(fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").exists()


def test_what_is_kept_is_given_once_and_to_whoever_wants_as_many_bytes(
    memory: Path, kept: KeptMappings
) -> None:
    fd = made(memory / "a")
    assert kept.keep(fd, NBYTES, None)
    found = kept.take(memory / "a", NBYTES)
    assert found is not None and found.fd == fd and not found.is_warm
    found.memory[:5] = b"hello"
    assert (memory / "a").read_bytes()[:5] == b"hello"
    assert kept.take(memory / "a", NBYTES) is None
    assert kept.keep(fd, NBYTES, found.memory, warm=True)
    assert kept.is_warm(memory / "a", NBYTES) and not kept.is_warm(memory / "a", NBYTES + 1)
    assert kept.take(memory / "a", NBYTES + 1) is None
    assert not is_open(fd)


def test_the_longest_kept_go_first(memory: Path, kept: KeptMappings) -> None:
    fds = [made(memory / name) for name in "abc"]
    for fd in fds:
        assert kept.keep(fd, NBYTES, None)
    assert [is_open(fd) for fd in fds] == [False, True, True]


@pytest.mark.parametrize("nbytes", [0, 4096, NBYTES + 4096])
def test_a_file_of_another_length_is_not_kept(
    memory: Path, kept: KeptMappings, nbytes: int
) -> None:
    fd = made(memory / "a")
    os.truncate(memory / "a", nbytes)
    assert not kept.keep(fd, NBYTES, None)
    assert is_open(fd), "it stays the caller's"
    os.close(fd)


def test_a_file_with_a_hole_is_given_to_nobody(memory: Path, kept: KeptMappings) -> None:
    fd = made(memory / "a")
    assert kept.keep(fd, NBYTES, None)
    os.truncate(memory / "a", 4096)
    os.truncate(memory / "a", NBYTES)
    assert kept.take(memory / "a", NBYTES) is None
    assert not is_open(fd)


def test_nothing_is_kept_behind_the_end(memory: Path, kept: KeptMappings) -> None:
    first, second = made(memory / "a"), made(memory / "b")
    assert kept.keep(first, NBYTES, None)
    kept.close()
    assert not is_open(first)
    assert not kept.keep(second, NBYTES, None)
    os.close(second)
    kept.close()


def test_its_own_descriptor_is_no_reader_and_any_other_is(memory: Path, kept: KeptMappings) -> None:
    path = memory / "a"
    assert kept.keep(made(path), NBYTES, None)
    assert not Files().is_unused(path)
    assert kept.is_unused(path)
    with path.open("rb"):
        assert not kept.is_unused(path)
    with path.open("r+b"):
        assert not kept.is_unused(path)
    assert kept.is_unused(path)


def test_files_are_touched_bit_by_bit(memory: Path, kept: KeptMappings) -> None:
    large = 9 * 2**20
    assert kept.keep(made(memory / "a", large), large, None)
    assert kept.touch_ahead() and not kept.is_warm(memory / "a", large)
    assert kept.touch_ahead() and kept.is_warm(memory / "a", large)
    assert not kept.touch_ahead()
    assert not any((memory / "a").read_bytes())


def test_the_memory_of_files_without_a_name_comes_back(memory: Path, kept: KeptMappings) -> None:
    before = os.statvfs(memory).f_bfree
    assert kept.keep(made(memory / "a"), NBYTES, None)
    (memory / "a").unlink()
    assert os.statvfs(memory).f_bfree < before
    kept.drop_gone()
    assert os.statvfs(memory).f_bfree == before
