"""Which filesystem a directory is on, and whether it keeps what is written to it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from ckpt_core.cli.doctor.finding import Finding, note, ok, warning

_MEMORY = frozenset({"tmpfs", "ramfs"})
_LAYERS = frozenset({"overlay", "aufs"})
_NETWORK = frozenset(
    "9p afs beegfs ceph cifs glusterfs gpfs lustre ncpfs nfs nfs4 pvfs2 smb3 smbfs virtiofs wekafs".split()
)
_NETWORK_FUSE = frozenset({"fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.juicefs"})
_LOCAL_LOCKS = frozenset({"nolock", "localflock", "local_lock=all", "local_lock=posix"})
_NO_BARRIERS = frozenset({"nobarrier", "barrier=0"})


@dataclass(frozen=True, slots=True)
class Mount:
    """A filesystem: its type, where it is, its mount options."""

    kind: str
    place: str
    options: frozenset[str]


def mount_of(path: Path) -> Mount | None:
    """The filesystem of an existing path; None if the system does not tell."""
    real = Path(os.path.realpath(path))
    found, longest = None, -1
    for part in psutil.disk_partitions(all=True):
        # Of two with one place the later one covers the other.
        if real.is_relative_to(part.mountpoint) and len(part.mountpoint) >= longest:
            longest = len(part.mountpoint)
            found = Mount(part.fstype, part.mountpoint, frozenset(part.opts.split(",")))
    return found


def judge_mount(mount: Mount | None) -> list[Finding]:
    """Whether committed steps stay, and whether locks and syncs are what they seem."""
    if mount is None:
        return [note("filesystem", "of unknown type: the system does not tell")]
    return [_judge_kind(mount), *_judge_options(mount)]


def _judge_kind(mount: Mount) -> Finding:
    text = f"{mount.kind}, mounted at {mount.place}"
    if mount.kind in _MEMORY:
        found = f"{text}: lives in memory, and is gone after a reboot"
        return warning("filesystem", found, "use a disk for what must survive")
    if mount.kind in _LAYERS:
        found = f"{text}: a container's own layer, gone with the container"
        return warning("filesystem", found, "mount a volume, and put the root there")
    if mount.kind in _NETWORK | _NETWORK_FUSE:
        found = f"{text}: a network filesystem, as safe as its fsync and its locks"
        return note("filesystem", found, "see that its server does not sync behind your back")
    if mount.kind.startswith("fuse"):
        found = f"{text}: whether it keeps what was synced, its maker must tell"
        return warning("filesystem", found, "an object store is none: use a disk")
    return ok("filesystem", text)


def _judge_options(mount: Mount) -> list[Finding]:
    found = []
    if mount.options & _LOCAL_LOCKS:
        text = f"locks hold on this host alone ({', '.join(sorted(mount.options & _LOCAL_LOCKS))})"
        found.append(
            warning(
                "filesystem", text, "jobs on two hosts could write to one root: mount it with locks"
            )
        )
    if mount.options & _NO_BARRIERS:
        text = f"mounted with {', '.join(sorted(mount.options & _NO_BARRIERS))}"
        advice = "a power loss may take synced files: remount with barriers"
        found.append(warning("filesystem", text, advice))
    return found
