"""The owner of a root reads what is in the page cache through a mapping: the same bytes, the same checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core.errors import CorruptCheckpoint
from ckpt_core.restore import NoGuard, Restorer, RestoreRequest
from ckpt_core.restore.shard_reader import ShardReader
from ckpt_core.system.files import Files
from tests.restore.harness import SHARD, Recipe, assert_same, flip, write_step, zeros_like


class Counting(Files):
    """Counts the mappings that are made."""

    def __init__(self) -> None:
        self.mapped = 0

    def map_private(self, fd: int, size: int) -> Any:
        self.mapped += 1
        return super().map_private(fd, size)


def owner(root: Path, files: Files) -> Restorer:
    return Restorer(root, files=files, readers=3, timeout_s=30.0, store=NoGuard())


def state() -> dict[str, Any]:
    torch.manual_seed(3)
    many = {str(index): torch.randn(7, index) for index in range(300)}
    return {"large": torch.randn(9_000_001), "many": many, "last": torch.randn(33)}


def test_a_cached_step_comes_back_through_a_mapping(root: Path) -> None:
    write_step(root, 1, state(), Recipe(chunk_bytes=1 << 20))
    live, files = zeros_like(state()), Counting()
    assert owner(root, files).restore(live) is not None
    assert_same(live, state())
    assert files.mapped == 1


def test_a_reader_that_does_not_own_the_root_maps_nothing(root: Path) -> None:
    write_step(root, 1, state())
    live, files = zeros_like(state()), Counting()
    assert Restorer(root, files=files, readers=3, timeout_s=30.0).restore(live) is not None
    assert files.mapped == 0


def test_a_flipped_bit_is_found_in_a_mapping(root: Path) -> None:
    path = write_step(root, 1, state(), Recipe(chunk_bytes=1 << 20))
    flip(path / SHARD, 20_000_000)
    with pytest.raises(CorruptCheckpoint):
        owner(root, Counting()).restore(zeros_like(state()), RestoreRequest(strict=True))


def test_what_is_not_all_in_the_page_cache_is_not_mapped_in(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.touch()
    with path.open("r+b") as file:
        file.truncate(1 << 20)  # a hole: none of its pages is in the cache
    reader = ShardReader(path, nbytes=1 << 20, files=Files())
    reader.open()
    assert not reader.is_resident(0, 1 << 20)
    reader.close()
