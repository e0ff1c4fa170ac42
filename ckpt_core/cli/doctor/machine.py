"""CPUs, memory and limits of the process."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import psutil

from ckpt_core.cli.doctor.finding import Finding, note, ok, warning
from ckpt_core.cli.doctor.memory_limit import room_left
from ckpt_core.cli.doctor.trials import Trial
from ckpt_core.cli.text import count_text, size_text

_STAGING_SHARE = 4
"""Staging takes at most one part in so many of the free memory, unless `staging_bytes` says more."""

_FEW_FILES = 256


def check_machine(torch: Trial | None) -> list[Finding]:
    """What this process may use here. `torch` tells whether staging memory would be page-locked."""
    pinned = torch is not None and bool(torch.told.get("devices"))
    free = psutil.virtual_memory().available
    return [_cpus(), judge_memory(free, room_left()), *_limits(free, pinned=pinned)]


def judge_memory(free_bytes: int, room_bytes: int | None) -> Finding:
    """What staging would take by default, beside what the control group allows (None: all there is)."""
    most = free_bytes // _STAGING_SHARE
    staging = f"twice a rank's state, at most {size_text(most)}, in each process"
    text = f"{size_text(free_bytes)} free: staging takes {staging}"
    if room_bytes is None or room_bytes >= free_bytes:
        return ok("memory", text)
    text = f"{text}; this control group may take {size_text(room_bytes)} more"
    advice = "set staging_bytes by that: what is free on the host counts, not in the container"
    return (
        warning("memory", text, advice) if 2 * most > room_bytes else note("memory", text, advice)
    )


def _cpus() -> Finding:
    count = len(os.sched_getaffinity(0))
    if count == 1:
        return note("cpus", "1: copying and writing share it with training")
    return ok("cpus", str(count))


def _limits(free_bytes: int, *, pinned: bool) -> Iterator[Finding]:
    files, size = _soft(resource.RLIMIT_NOFILE), _soft(resource.RLIMIT_FSIZE)
    locked = _soft(resource.RLIMIT_MEMLOCK)
    fine = True
    if files is not None and files < _FEW_FILES:
        fine = False
        yield warning("limits", f"{count_text(files, 'open file')} at most", "raise it: ulimit -n")
    if size is not None:
        fine = False
        text = f"files of at most {size_text(size)}"
        yield warning("limits", text, "a larger shard file fails: ulimit -f unlimited")
    if pinned and locked is not None and locked < free_bytes // _STAGING_SHARE:
        fine = False
        text = f"{size_text(locked)} of locked memory at most, and staging memory is page-locked with CUDA"
        yield note("limits", text, "if a save says so, ulimit -l unlimited")
    if fine:
        many = "any number of" if files is None else f"{files:,}"
        yield ok("limits", f"{many} open files, files of any size")


def _soft(which: int) -> int | None:
    limit = resource.getrlimit(which)[0]
    return None if limit == resource.RLIM_INFINITY else limit
