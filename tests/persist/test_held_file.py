"""A file that is held: another name where that can be, else a copy that is checked; and no slot."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
import xxhash

from ckpt_core.errors import PersistError
from ckpt_core.persist import HeldFile, WriteResult
from ckpt_core.system.files import Files

DATA = random.Random(3).randbytes(12288)
SIZES = (8192, 4096)


class NoLinks(Files):
    """A filesystem without them."""

    def link(self, source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(source))


def held(path: Path, files: Files | None = None) -> HeldFile:
    path.write_bytes(DATA)
    pieces = [DATA[: SIZES[0]], DATA[SIZES[0] :]]
    digests = [xxhash.xxh3_128(piece).digest() for piece in pieces]
    sums = [[WriteResult(len(piece), xxhash.xxh3_64_hexdigest(piece))] for piece in pieces]
    return HeldFile(path, digests, sums, files=files or Files())


def open_here(path: Path) -> bool:
    links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return str(path) in [os.readlink(link) for link in links if link.is_symlink()]


def test_it_gets_another_name(tmp_path: Path) -> None:
    file = held(tmp_path / "a")
    file.put(tmp_path / "b", step=1)
    assert (tmp_path / "b").samefile(tmp_path / "a")
    assert file.sizes == SIZES
    file.release()


def test_it_is_no_slot_as_long_as_somebody_has_it(tmp_path: Path) -> None:
    file = held(tmp_path / "a")
    second = file.take()
    file.release()
    assert open_here(tmp_path / "a")
    assert not Files().is_unused(tmp_path / "a")
    second.release()
    assert not open_here(tmp_path / "a")


def test_without_links_and_without_its_name_it_is_copied(tmp_path: Path) -> None:
    for files, gone in ((NoLinks(), False), (Files(), True)):
        file = held(tmp_path / "a", files)
        if gone:
            (tmp_path / "a").unlink()
        target = tmp_path / f"copy-{gone}"
        file.put(target, step=1)
        assert target.read_bytes() == DATA and target.stat().st_nlink == 1
        # From there it is shared from now on.
        file.home = target
        assert open_here(target)
        assert bytes(file.read(8190, 4)) == DATA[8190:8194]
        file.release()


def test_what_has_its_name_meanwhile_is_not_taken(tmp_path: Path) -> None:
    file = held(tmp_path / "a")
    (tmp_path / "a").unlink()
    (tmp_path / "a").write_bytes(b"another")
    file.put(tmp_path / "b", step=1)
    assert (tmp_path / "b").read_bytes() == DATA
    file.release()


def test_a_name_that_is_taken_is_left_alone(tmp_path: Path) -> None:
    file = held(tmp_path / "a")
    (tmp_path / "b").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        file.put(tmp_path / "b", step=1)
    assert (tmp_path / "b").read_bytes() == b"mine"
    file.release()


@pytest.mark.parametrize("cut", [False, True])
def test_damage_is_not_copied(tmp_path: Path, cut: bool) -> None:
    file = held(tmp_path / "a", NoLinks())
    with (tmp_path / "a").open("r+b") as changed:
        if cut:
            changed.truncate(9000)
        else:
            changed.seek(9000)
            changed.write(b"!")
    with pytest.raises(PersistError, match="is damaged on storage"):
        file.put(tmp_path / "b", step=7)
    file.release()
