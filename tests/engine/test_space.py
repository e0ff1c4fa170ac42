"""A save is refused for want of space where it cannot fit, and nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ckpt_core import Checkpointer, Options, PersistError, load
from ckpt_core.store import step_path
from ckpt_core.system.files import Files

_KIB = 1024


class Little(Files):
    """A disk on which there is little room, once `free` is set."""

    free: int | None = None

    def free_bytes(self, path: Path) -> int:
        return super().free_bytes(path) if self.free is None else self.free


class Sizeless(Files):
    """A filesystem that tells no size, as a tmpfs without a limit."""

    def free_bytes(self, path: Path) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 4096, *[0] * 8)))
            return super().free_bytes(path)


def options(*, pipelined: bool = True) -> Options:
    settings = {"chunk_bytes": 4096, "eager_leaf_bytes": 256, "keep_last": 2, "in_flight": 2}
    return Options(**settings, pipelined=pipelined, timeout=60)  # type: ignore[arg-type]


@pytest.mark.parametrize("pipelined", [False, True])
def test_each_file_of_a_save_counts_the_slot_that_it_takes(tmp_path: Path, pipelined: bool) -> None:
    layer, tail = torch.zeros(100_000), torch.zeros(90_000)
    files = Little()
    with Checkpointer(tmp_path, options(pipelined=pipelined), files=files) as ck:
        for step in range(9):
            if len(list((tmp_path / ".slots").glob("*"))) == 2:
                files.free = 16 * _KIB
            layer += 1
            tail += 1
            save = ck.begin(step, {"layer": layer})
            save.stage(["layer"])
            save.seal({"layer": layer, "tail": tail}).committed.result(60)
    assert files.free is not None, "there are not two slots"
    assert load(step_path(tmp_path, 8))["tail"].eq(9).all()


def test_named_files_count_no_slot_since_they_take_none(tmp_path: Path) -> None:
    state = {"w": torch.zeros(100_000)}
    files = Little()
    with Checkpointer(tmp_path, options(), files=files) as ck:
        for step in range(4):
            ck.save(step, state).committed.result(60)
        assert list((tmp_path / ".slots").iterdir())
        files.free = 16 * _KIB
        save = ck.begin_files(4, "tag4")
        save.add("w.pt", state)
        with pytest.raises(PersistError, match=r"needs 39\d\.\d KiB more"):
            save.seal().committed.result(60)
        with pytest.raises(PersistError, match="needs"):
            ck.save(5, state)
        ck.save(6, state).committed.result(60)


def test_a_filesystem_that_tells_no_size_is_not_full(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, options(), files=Sizeless()) as ck:
        ck.save(1, {"w": torch.zeros(100_000)}).committed.result(60)
    assert load(tmp_path)["w"].eq(0).all()
