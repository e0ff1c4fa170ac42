"""How much memory this process may still take: the host's free memory, and less where a limit says so.

A control group kills whoever goes beyond its limit; the host's free memory says nothing about that. What a
root on tmpfs or /dev/shm holds is memory of the group, too, and counts as used.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

_GROUPS, _MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")

_LIMITS = (
    ("memory.max", "memory.current", ""),
    ("memory.high", "memory.current", ""),  # beyond it everything stands still
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes", "total_"),
)
"""File of the limit, of what is used, and how its statistics begin: control groups of version 2, then 1."""

_NO_LIMIT = 1 << 60


def free_memory(groups: Path = _GROUPS, mount: Path = _MOUNT) -> int:
    """Bytes that this process may still take. All processes of the host, or of the group, share them.

    Args:
        groups, mount: see `room_left`.
    """
    host = _host_room()
    if host == 0:
        return 0  # nothing else can be read either
    room = room_left(groups, mount)
    return min(host, host if room is None else room, *_address_rooms())


def _host_room() -> int:
    """What the host has; 0 where a limit is so tight that this cannot even be read."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except MemoryError:
        return 0
    except OSError:
        pass  # a container without it
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def room_left(groups: Path = _GROUPS, mount: Path = _MOUNT) -> int | None:
    """Bytes until the tightest limit of a control group, page cache that can be dropped not counted.

    Args:
        groups: which groups the process is in.
        mount: where their files are; version 1 has a directory for each controller.

    Returns:
        None without a limit.
    """
    rooms = [room for folder in _folders(groups, mount) for room in _rooms(folder)]
    return min(rooms, default=None)


def _folders(groups: Path, mount: Path) -> Iterator[Path]:
    """The group and all above it. In a container its own path may be none that can be seen here."""
    for line in _read(groups).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top = mount / "memory" if controllers else mount
        group = top / name.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def _rooms(folder: Path) -> Iterator[int]:
    for limit, used, prefix in _LIMITS:
        most = _read(folder / limit).strip()
        # Version 1 has no word for "no limit". A save asks on training's thread: only what counts is read.
        if not most.isdigit() or int(most) >= _NO_LIMIT:
            continue
        now = _read(folder / used).strip()
        if now.isdigit():
            yield max(int(most) - int(now) + _droppable(folder / "memory.stat", prefix), 0)


def _droppable(stat: Path, prefix: str) -> int:
    """Page cache, which is counted as used but makes room; files in memory are not on these lists."""
    found = {}
    for line in _read(stat).splitlines():
        name, _, value = line.partition(" ")
        if value.isdigit():
            found[name.removeprefix(prefix)] = int(value)
    # Half of what is in use, as the kernel reckons for MemAvailable; what must be written first is no room.
    cached = found.get("inactive_file", 0) + found.get("active_file", 0) // 2
    unwritten = ("dirty", "writeback", "file_dirty", "file_writeback")
    return max(cached - sum(found.get(name, 0) for name in unwritten), 0)


def _address_rooms() -> Iterator[int]:
    """Bytes until `ulimit -v` and `ulimit -d`."""
    limits = {"VmSize": resource.RLIMIT_AS, "VmData": resource.RLIMIT_DATA}
    bounds = {name: resource.getrlimit(limit)[0] for name, limit in limits.items()}
    if set(bounds.values()) == {resource.RLIM_INFINITY}:
        return
    used = dict(
        line.split(":", 1) for line in _read(Path("/proc/self/status")).splitlines() if ":" in line
    )
    for name, most in bounds.items():
        now = used.get(name, "").split()
        if most != resource.RLIM_INFINITY and now:
            yield max(most - int(now[0]) * 1024, 0)


def _read(path: Path) -> str:
    try:
        # A group may have any bytes as its name, which becomes a path.
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""
