"""Where a run took place. Names no host and no user."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Machine:
    """What a reader needs to judge the figures of a run."""

    cpu: str
    cpus: int
    memory_bytes: int
    filesystem: str
    mount_options: str
    disk: str
    kernel: str
    python: str
    torch: str
    date: str

    def to_json(self) -> dict[str, str | int]:
        """Fields as they are."""
        return asdict(self)


def describe(root: Path) -> Machine:
    """The machine at hand and the filesystem that holds `root`."""
    from importlib import metadata  # not before: every command comes by this file

    filesystem, options = filesystem_of(root)
    return Machine(
        cpu=processor("model name") or platform.machine(),
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=_meminfo("MemTotal"),
        filesystem=filesystem,
        mount_options=options,
        disk=_disk(root),
        kernel=platform.release(),
        python=platform.python_version(),
        torch=metadata.version("torch"),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return 0


def processor(field: str) -> str:
    """What the kernel tells of the first processor; empty where it tells nothing of the kind.

    Raises:
        OSError: there is no /proc.
    """
    # No further than needed: it takes milliseconds to tell of hundreds of processors.
    with Path("/proc/cpuinfo").open() as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == field:
                return value.strip()
    return ""


def boot_id() -> str:
    """Another one for each start of each machine; "" where that is not told."""
    return _read(_BOOT_ID)


def filesystem_of(path: Path) -> tuple[str, str]:
    """Type and options of the filesystem whose device number `path` has. Raises OSError."""
    number = os.stat(path).st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    # Any mount may have a name of any bytes: what is looked at is ASCII, and a line ends in "\n" alone.
    with open(_MOUNTS, encoding="ascii", errors="replace", newline="\n") as lines:
        for line in lines:
            left, _, right = line.partition(" - ")
            if left.split()[2] == wanted:
                return right.split()[0], right.split()[-1]
    return "unknown", ""


def _disk(root: Path) -> str:
    number = os.stat(root).st_dev
    block = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not block.exists():
        return "no block device"
    # A partition has no queue of its own; its disk is the directory above.
    disk = block.resolve()
    disk = disk if (disk / "queue").exists() else disk.parent
    return _read(disk / "device/model") or disk.name


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
