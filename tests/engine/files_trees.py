"""Trees as DeepSpeed saves them, large enough for several chunks, and what a directory must hold."""

from __future__ import annotations

import argparse
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from ckpt_core import Options, verify
from ckpt_core.system.files import Files
from tests.torch_zip.zip_files import Cloner, assert_alike, ties

TINY = Options(chunk_bytes=4096, staging_bytes="96KiB", in_flight=2, eager_leaf_bytes=512)


def model_states(seed: int, rows: int = 40) -> dict[str, Any]:
    """Weights that are views of one flat buffer, one of them tied, and everything around them."""
    torch.manual_seed(seed)
    flat = torch.randn(rows * 300 + 77).to(torch.bfloat16)
    weight = flat[: rows * 300].view(rows, 300)
    return {
        "module": OrderedDict(embedding=weight, head=weight, bias=flat[rows * 300 :][:50]),
        "buffers": {"mean": torch.rand(20), "placeholder": torch.empty(0, dtype=torch.bfloat16)},
        "args": argparse.Namespace(lr=0.1, seed=seed, shapes=[torch.Size([rows, 300])]),
        "global_steps": seed,
    }


def optim_states(seed: int, rows: int = 40) -> dict[str, Any]:
    """Slices of a leaf that requires gradients, which are no leaves themselves."""
    torch.manual_seed(seed + 1)
    master = torch.randn(rows * 300 + 77, requires_grad=True)
    return {
        "single_partition_of_fp32_groups": [master[: rows * 300 + 13]],
        "state": {0: {"exp_avg": torch.rand(rows * 300 + 13), "step": torch.tensor(float(seed))}},
        "partition_count": [1],
    }


def assert_holds(path: Path, tree: Any) -> None:
    """The file is what `torch.save` gives of detached clones, however it is loaded."""
    expected = Cloner()(tree)
    for how in ({}, {"mmap": True}):
        found = torch.load(path, weights_only=False, **how)
        assert_alike(found, expected)
        assert ties(found) == ties(expected)


def assert_directory(path: Path, files: dict[str, Any]) -> None:
    """The directory is whole and holds these files and nothing else."""
    report = verify(path)
    assert report.ok, report
    there = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert there == {*files, "manifest.json", "rank-00000.json"}
    for name, tree in files.items():
        assert_holds(path / name, tree)


class GatedFiles(Files):
    """A disk on which writes of tensors into the first attempt stand still while the gate is shut."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.holds = threading.Event()
        self._held: Path | None = None
        self._paths: dict[int, Path] = {}

    def create(self, path: Path, *, direct: bool = False) -> int:
        fd = super().create(path, direct=direct)
        self._paths[fd] = path
        return fd

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        if isinstance(data, memoryview):
            self._held = self._held or self._paths[fd].parent
            if self._paths[fd].parent == self._held:
                self.holds.set()
                assert self.gate.wait(60)
        super().pwrite(fd, data, offset)
