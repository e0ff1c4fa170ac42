"""A step that lies in memory is given as it lies there: verified, and not copied."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from ckpt_core.errors import CorruptCheckpoint, RestoreError
from ckpt_core.levels.agent.copying import How, Sent, send
from ckpt_core.levels.agent.source import OpenSave
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.levels.far.parts import PART_BYTES, Parts
from ckpt_core.store import step_path
from ckpt_core.system.files import Files
from tests.levels.making import CHUNK_BYTES, bytes_of, make_store, read_step, save
from tests.store.harness import QuickFiles

NBYTES = 5 * CHUNK_BYTES - 77
BLOCK_BYTES = CHUNK_BYTES // 3


class InMemory(QuickFiles):
    """As if everything lay on tmpfs."""

    def is_in_memory(self, fd: int) -> bool:
        """Yes."""
        return True


class NoProc(QuickFiles):
    """As if nothing were mounted at /proc."""

    def open_read(self, path: Path, *, direct: bool = False) -> int:
        """Nothing is there."""
        if path.is_relative_to("/proc"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return super().open_read(path, direct=direct)


@pytest.fixture
def step(root: Path) -> Path:
    """One step, of a single file."""
    save(make_store(root), 10, mark=1, nbytes=NBYTES)
    return step_path(root, 10)


def test_blocks_of_a_file_in_memory_stay_as_they_are(step: Path) -> None:
    with OpenSave(step, files=InMemory()) as opened:
        blocks = list(opened.blocks(opened.entries[0], BLOCK_BYTES))
    assert all(block.readonly and len(block) <= BLOCK_BYTES for block in blocks)
    assert b"".join(blocks) == bytes_of(10, 1, 0, NBYTES)


def test_a_step_in_memory_is_sent_whole(step: Path, tmp_path: Path) -> None:
    far = DirectoryFar(tmp_path / "far", files=QuickFiles())
    with OpenSave(step, files=InMemory()) as opened:
        assert send(opened, far, How()) is Sent.REACHED
    assert read_step(tmp_path / "far", 10) == 1


def test_a_step_is_opened_where_there_is_no_proc(step: Path) -> None:
    with OpenSave(step, files=NoProc()) as opened:
        assert opened.nbytes > NBYTES


def test_a_file_that_is_missing_and_a_pipe_in_its_place_are_named(step: Path) -> None:
    with OpenSave(step, files=QuickFiles()) as opened:
        name = opened.entries[0].name
    (step / name).unlink()
    with pytest.raises(CorruptCheckpoint, match=f"{step / name}: expected a file, got nothing"):
        OpenSave(step, files=QuickFiles())
    os.mkfifo(step / name)
    with pytest.raises(RestoreError, match="a pipe or a device"):
        OpenSave(step, files=QuickFiles())


def test_damage_in_memory_is_found_before_the_last_block_of_its_chunk(step: Path) -> None:
    with OpenSave(step, files=InMemory()) as opened:
        entry = opened.entries[0]
        path = step / entry.name
        data = bytearray(path.read_bytes())
        data[CHUNK_BYTES + 5] ^= 1
        path.write_bytes(data)
        given = list[int]()
        with pytest.raises(CorruptCheckpoint, match="of chunk 1"):
            given.extend(map(len, opened.blocks(entry, BLOCK_BYTES)))
    assert sum(given) < 2 * CHUNK_BYTES


def test_a_file_in_memory_that_is_cut_is_damage(step: Path) -> None:
    with OpenSave(step, files=InMemory()) as opened:
        os.truncate(step / opened.entries[0].name, CHUNK_BYTES)
        with pytest.raises(CorruptCheckpoint, match="bytes, got fewer"):
            list(opened.blocks(opened.entries[0], BLOCK_BYTES))


def test_what_lies_in_memory_is_known() -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir():
        pytest.skip("no /dev/shm here")
    with tempfile.TemporaryFile(dir=memory) as file:
        assert Files().is_in_memory(file.fileno())
    with Path("/proc/self/status").open() as other:
        assert not Files().is_in_memory(other.fileno())


def test_read_only_blocks_become_pieces_of_parts_and_are_not_copied() -> None:
    data = os.urandom(2 * PART_BYTES + 12345)
    blocks = [memoryview(data)[at : at + (3 << 20)] for at in range(0, len(data), 3 << 20)]
    parts = Parts(iter(blocks), len(data))
    given = list(parts)
    assert b"".join(given) == data and not parts._lent
    assert all(part.obj is data for part in given)
