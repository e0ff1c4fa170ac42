"""A copy past the caches, for bytes that nobody reads soon.

An ordinary store reads the line that it overwrites, so that a copy moves half as many bytes again, and what
training has in the caches makes room for it. glibc does without for copies of hundreds of megabytes alone,
and a leaf has a few. There is no call for it: the instructions are written here. They are in every x86-64.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache

from ckpt_core.system.machine import processor

Move = Callable[[int, int, int], object]
"""Of a target, a source and a number of bytes."""

LEAST_BYTES = 128
"""What the first and the last line may leave of it is a line at least."""

_FASTER_ON = frozenset({"AuthenticAMD"})
"""Where it was measured: 12 GB/s instead of 7 on an EPYC, in leaves of 2 MiB."""

_CODE = bytes.fromhex(
    "f30f1efa"  # endbr64
    "89f9 f7d9 83e13f"  # ecx = -target & 63: up to the first whole line
    "4829ca f3a4"  # nbytes -= ecx; rep movsb
    "4889d1 48c1e906"  # rcx = nbytes >> 6: whole lines
    "f30f6f06 f30f6f4e10 f30f6f5620 f30f6f5e30"  # movdqu xmm0-3, [source]
    "660fe707 660fe74f10 660fe75720 660fe75f30"  # movntdq [target], xmm0-3
    "4883c640 4883c740 48ffc9 75cd"  # source += 64; target += 64; rcx -= 1; jnz to the loads
    "83e23f 89d1 f3a4"  # what is left: rep movsb
    "0faef8 c3"  # sfence: whoever is told of it finds the bytes; ret
)
_SIGNATURE = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_MEMMOVE = ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
memmove: Move = ctypes.CFUNCTYPE(ctypes.c_void_p, *_SIGNATURE)(_MEMMOVE)
"""The C library's; runs without the GIL."""
memmove_locked: Move = ctypes.PYFUNCTYPE(ctypes.c_void_p, *_SIGNATURE)(_MEMMOVE)
"""The same with the GIL held."""
_PROT_READ_EXEC = mmap.PROT_READ | mmap.PROT_EXEC

_kept: list[ctypes.c_char] = []
"""A reference to each page of it: without one it would be unmapped."""


def streaming_move() -> Move | None:
    """The copy, where it is faster than memmove; None elsewhere, and where it cannot be had."""
    with suppress(OSError):
        if processor("vendor_id") in _FASTER_ON:
            return load()
    return None


def load() -> Move | None:
    """The copy of at least `LEAST_BYTES` between memories that do not overlap; runs without the GIL.

    None on other processors, and where the system refuses: SELinux without `execmem`, systemd's
    `MemoryDenyWriteExecute=`.

    Raises:
        OSError: there is no memory.
    """
    if os.uname().machine != "x86_64":
        return None
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page.write(_CODE)
    held = ctypes.c_char.from_buffer(page)
    place = ctypes.addressof(held)
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if protect(place, mmap.PAGESIZE, _PROT_READ_EXEC):
        return None
    move = ctypes.CFUNCTYPE(None, *_SIGNATURE)(place)
    if not _copies(move):
        return None
    _kept.append(held)
    return move


def _copies(move: Move) -> bool:
    """Whether it does, between places that are not aligned; an emulator may lie."""
    source, target = bytearray(range(256)) * 2, bytearray(512)
    begin = (ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (target, source))
    to, of = begin
    move(to + 3, of + 5, 400)
    return target == bytes(3) + source[5:405] + bytes(109)


@cache
def large_move() -> Move:
    """The faster of both, for `LEAST_BYTES` and more; runs without the GIL."""
    return streaming_move() or memmove
