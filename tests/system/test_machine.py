"""What the kernel tells of the machine, where others have given things any name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt_core.system import machine
from ckpt_core.system.files import Files
from ckpt_core.system.memory_limit import room_left

ODD = b"disk\xe9\r\x0b\xe2\x80\xa8"
"""What the kernel leaves as it is in a name: bytes that are no UTF-8, and ends of lines that are none."""


def test_names_of_mounts_may_be_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = os.stat(tmp_path).st_dev
    ours = b"%d:%d" % (os.major(number), os.minor(number))
    lines = [
        b"36 35 0:0 / /mnt/%b rw shared:1 - ext4 /dev/%b rw\n" % (ODD, ODD),
        b"37 35 %b / /mnt/%b rw - tmpfs %b rw,huge=always\n" % (ours, ODD, ODD),
    ]
    mounts = tmp_path / "mountinfo"
    mounts.write_bytes(b"".join(lines))
    monkeypatch.setattr(machine, "_MOUNTS", mounts)
    assert machine.filesystem_of(tmp_path) == ("tmpfs", "rw,huge=always")
    assert Files().in_huge_pages(tmp_path)
    mounts.write_bytes(lines[0])
    assert not Files().in_huge_pages(tmp_path)


def test_a_control_group_may_have_any_name(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_bytes(b"0::/disk\xe9\n")
    group = Path(os.fsdecode(bytes(tmp_path / "fs") + b"/disk\xe9"))
    group.mkdir(parents=True)
    (group / "memory.max").write_text("1000\n")
    (group / "memory.current").write_text("400\n")
    assert room_left(groups, tmp_path / "fs") == 600
