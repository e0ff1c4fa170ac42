"""Directories of files in a root, and what a level has of them."""

from __future__ import annotations

from pathlib import Path

import torch

from ckpt_core import Checkpointer, Options, verify
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.system.files import Files

SMALL = Options(staging_bytes="1MiB", chunk_bytes="64KiB", writers=2)
FILES = ("model.pt", "experts/layer_01/expert.pt")


def save_in(ck: Checkpointer, step: int, name: str = "", *, pointer: str | None = "latest") -> str:
    """Save one, and wait until it is committed; its name."""
    name = name or f"global_step{step}"
    opened = ck.begin_files(step, name, pointer=pointer)
    for number, file in enumerate(FILES):
        opened.add(
            file, {"w": torch.arange(40_000) + step, "number": number, "none": torch.empty(0)}
        )
    opened.seal().committed.result()
    return name


def save(root: Path, step: int, name: str = "", *, pointer: str | None = "latest") -> str:
    """The same by a Checkpointer of its own."""
    with Checkpointer(root, SMALL) as ck:
        return save_in(ck, step, name, pointer=pointer)


def far_of(place: Path) -> DirectoryFar:
    """A directory as a level."""
    return DirectoryFar(place, files=Files())


def whole(place: Path) -> dict[str, int]:
    """The directories of files that are there, with their numbers; every byte is compared."""
    found = {}
    for name, copy in far_of(place).directories().items():
        report = verify(place / name)
        assert report.ok and report.checked_bytes > 0, report
        found[name] = copy.step
    return found


def damage(path: Path) -> None:
    """Turn one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
