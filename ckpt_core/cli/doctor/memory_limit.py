"""How much memory the control group of this process still allows: psutil tells what the host has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def room_left(
    groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes until the tightest limit, page cache that can be dropped not counted; None without a limit.

    Args:
        groups: which groups the process is in.
        mount: where their files are; version 1 has a directory for each controller.
    """
    rooms = [room for folder in _folders(groups, mount) if (room := _room(folder)) is not None]
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


def _room(folder: Path) -> int | None:
    for limit, used, dropped in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        most, now = _read(folder / limit).strip(), _read(folder / used).strip()
        if most.isdigit() and now.isdigit():
            return max(int(most) - int(now) + _cached(folder / "memory.stat", dropped), 0)
    return None


def _cached(stat: Path, field: str) -> int:
    for line in _read(stat).splitlines():
        name, _, value = line.partition(" ")
        if name == field and value.isdigit():
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
