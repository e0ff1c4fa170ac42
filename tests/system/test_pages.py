"""Memory in whole pages: what the kernel was told about it, and what a forked child gets."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from pathlib import Path

import pytest

from ckpt_core.system import pages
from ckpt_core.system.pages import page_memory, touch

SIZE = 8 * 2**20
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_of(mapping: mmap.mmap) -> set[str]:
    """VmFlags of the mapping, from the kernel's own list."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    flags = "", ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif line.startswith("VmFlags:") and inside:
            flags = tuple(line.split()[1:])
    return set(flags)


def test_huge_pages_are_asked_for_where_the_kernel_has_them() -> None:
    asked = HUGE.exists() and "[never]" not in HUGE.read_text()
    flags = flags_of(page_memory(SIZE))
    assert "wf" in flags and "sh" not in flags
    assert ("hg" in flags) >= asked


def test_a_forked_child_gets_none_of_it_and_may_let_it_go() -> None:
    mapping = page_memory(SIZE)
    mapping[:] = b"x" * SIZE
    pid = os.fork()
    if pid == 0:
        clean = mapping[:: SIZE // 64] == bytes(64)
        mapping.close()
        os._exit(0 if clean else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert mapping[:: SIZE // 64] == b"x" * 64


def test_where_a_child_cannot_be_kept_out_memory_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_MADV_WIPEONFORK", 9999)  # as on Linux before 4.14
    mapping = page_memory(SIZE)
    assert mapping[:: SIZE // 64] == bytes(64)
    mapping[-1] = 1
    assert "sh" in flags_of(mapping)


def resident_bytes(mapping: mmap.mmap) -> int:
    """How much of it has pages, from the kernel's own list."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if place := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(place[1], 16) <= address < int(place[2], 16)
        elif inside and line.startswith("Rss:"):
            found = int(line.split()[1]) * 1024
    return found


def test_memory_that_is_touched_has_its_pages_and_keeps_its_bytes() -> None:
    mapping = page_memory(SIZE)
    mapping[5] = 1
    before = resident_bytes(mapping)
    touch(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), SIZE)
    assert before < SIZE <= resident_bytes(mapping)
    assert mapping[5] == 1 and mapping[6:] == bytes(SIZE - 6)


def test_a_kernel_that_cannot_touch_memory_leaves_it_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pages, "_MADV_POPULATE_WRITE", 9999)  # as on Linux before 5.14
    mapping = page_memory(SIZE)
    mapping[5] = 1
    touch(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), SIZE)
    assert mapping[5] == 1
