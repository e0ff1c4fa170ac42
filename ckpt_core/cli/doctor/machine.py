"""CPUs, memory and limits of the process."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

from ckpt_core.cli.doctor.finding import Finding, note, ok, warning
from ckpt_core.cli.doctor.trials import Trial
from ckpt_core.errors import ConfigError
from ckpt_core.options import Options
from ckpt_core.system.memory_limit import free_memory, room_left
from ckpt_core.units import count_text, parse_bytes, size_text

_STAGING_SHARE = 4
"""Staging takes at most one part in so many of the free memory, unless `staging_bytes` says otherwise."""

_FEW_FILES = 256


def check_machine(torch: Trial | None) -> list[Finding]:
    """What this process may use here. `torch` tells whether staging memory would be page-locked."""
    pinned = torch is not None and bool(torch.told.get("devices"))
    free, room = free_memory(), room_left()
    memory = judge_memory(free, _staging_bytes(), limited=room is not None and room <= free)
    return [_cpus(), memory, *_limits(free, pinned=pinned)]


def judge_memory(free_bytes: int, staging_bytes: int | None, *, limited: bool) -> Finding:
    """What staging would take, beside what may be taken.

    Args:
        free_bytes: what may still be taken.
        staging_bytes: as the environment sets it; None: not.
        limited: a control group allows no more, whatever the host has.
    """
    text = f"{size_text(free_bytes)} free" + (" in this control group" if limited else "")
    if staging_bytes is None:
        most = size_text(free_bytes // _STAGING_SHARE)
        return ok(
            "memory",
            f"{text}: staging takes twice a rank's state, at most {most} for all ranks of this machine",
        )
    text = f"{text}: staging_bytes={size_text(staging_bytes)} in each rank"
    if staging_bytes <= free_bytes:
        return ok("memory", text)
    end = "the kernel kills the job" if limited else "the machine runs out of memory"
    return warning("memory", text, f"lower CKPT_CORE_STAGING_BYTES, else {end} when it is in use")


def _staging_bytes() -> int | None:
    try:
        given = Options.from_env().staging_bytes
        return None if given is None else parse_bytes(given, field="staging_bytes")
    except ConfigError:
        return None  # told with the environment


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
