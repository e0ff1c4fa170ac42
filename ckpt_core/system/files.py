"""The one door to the operating system's files: every byte that a save writes goes through `Files`.

Tests put a faulty layer here (killed at the n-th operation, power lost at the n-th sync, ENOSPC, EIO)
under the real engine above. Methods raise plain `OSError`; the callers in persist/ and store/ turn it
into our errors at one boundary. No method follows a symbolic link in the last component of a path.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import signal
import stat
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

from ckpt_core.system.calls import exchange, fallocate, filesystem_kind, start_writeback
from ckpt_core.system.pages import address_of, in_huge_pages
from ckpt_core.system.streaming import large_move

_BASE_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW

NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})
"""What a filesystem without direct I/O answers, at open or at the first read or write."""

_ADVICE = {
    errno.ENOSPC: "Free some space, keep fewer steps (keep_last), or use another disk; then save again.",
    errno.EDQUOT: "The disk quota is used up: free some space or raise it, or keep fewer steps (keep_last).",
    errno.EROFS: "The filesystem is read-only, often after a disk error: look at the kernel log (dmesg).",
    errno.EACCES: "Check the owner and the permissions of that directory and of those above it.",
    errno.EPERM: "Check the owner and the permissions of that directory and of those above it.",
    errno.ENOENT: (
        "It was removed or renamed by somebody else, or another rank has given this step up; the next save "
        "makes the root anew."
    ),
    errno.EEXIST: "Another rank has made a file of that name: each name is added by one rank.",
    errno.EOPNOTSUPP: "This filesystem cannot hold checkpoints: name a directory on another one.",
    errno.ENOTDIR: "A file or a link is where a directory belongs: move it away.",
    errno.ELOOP: "Links lead in a circle, or there are too many on the way: name the directory itself.",
    errno.ENAMETOOLONG: "The path is too long for this filesystem: use a root with a shorter path.",
    errno.EIO: "The device reports an error: look at the kernel log (dmesg), and save to another disk.",
    errno.ESTALE: "The network filesystem has lost that directory: look at its server, and mount it again.",
    errno.ENOLCK: "This filesystem has no locks: use a local disk, or NFS with its lock service.",
    errno.EMFILE: "This process has too many open files: raise `ulimit -n`, or find what leaves them open.",
    errno.ENFILE: "This machine has too many open files: end what holds them, or raise fs.file-max.",
    errno.EFBIG: (
        "This process or this filesystem allows no file of that size: raise `ulimit -f`, or use another disk."
    ),
    errno.EXDEV: (
        "A part of that directory is of a container's image (a lower layer of overlay) or of another mount, "
        "and no directory there can be moved: use a root on a volume, or a copy of this one (cp -a)."
    ),
    errno.ENOMEM: "There is not enough memory: end what uses it, or lower staging_bytes.",
}


def advice(error: BaseException) -> str:
    """What a user can do about an error of the operating system: the one table of it."""
    code = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError):
        code = errno.ENOMEM
    return _ADVICE.get(
        code or 0, "The next call tries again; if it fails too, look at the kernel log."
    )


_WHOLE_FILE, _NOTHING = (
    struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0) for kind in (fcntl.F_WRLCK, fcntl.F_UNLCK)
)
"""struct flock of 64-bit Linux: type, whence, start, length, process."""

_TMPFS = 0x01021994
_OVERLAY = 0x794C7630
_ZFS = 0x2FC12FC1
_COPIES_ON_WRITE = frozenset({0x9123683E, 0xCA451A4E, _ZFS})
"""btrfs, bcachefs and zfs: what is written over takes new blocks, and the old ones stay until later."""

_LOCAL = frozenset(
    {
        0xEF53,  # ext2 to ext4
        0x58465342,  # xfs
        0xF2F52010,  # f2fs
        *_COPIES_ON_WRITE,
        _TMPFS,
        _OVERLAY,
    }
)
"""Filesystems that this kernel alone reads and writes (`man statfs`)."""

Buffer = bytes | bytearray | memoryview | mmap.mmap


class Files:
    """Real files. Stateless: one instance may serve many threads."""

    best_read_bytes = 0
    """Where each read costs a journey: how long one should be; 0: the reader knows best."""

    # -- names ---------------------------------------------------------------------------------

    def mkdir(self, path: Path) -> None:
        """Create one directory; its parent exists."""
        os.mkdir(path)

    def rmdir(self, path: Path) -> None:
        """Remove an empty directory."""
        os.rmdir(path)

    def unlink(self, path: Path) -> None:
        """Remove a file (or a symbolic link itself)."""
        os.unlink(path)

    def rename(self, source: Path, target: Path) -> None:
        """Give `source` the name `target`, atomically; a file there is replaced, a full directory is not."""
        os.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file one more name; FileExistsError if that is taken, OSError where it cannot be."""
        os.link(source, target, follow_symlinks=False)

    def exchange(self, first: Path, second: Path) -> None:
        """Swap two existing names atomically (Linux renameat2); OSError where the filesystem cannot."""
        exchange(first, second)

    def is_unused(self, path: Path) -> bool:
        """Whether the kernel vouches that no process has the file open or mapped, this one included.

        False where it cannot tell: a filesystem without leases, one that other machines read too, or overlay.
        And where it is of no use, since nothing is written over in place.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _BASE_FLAGS)
        except OSError:
            return False
        try:
            return self.is_lone(fd)
        finally:
            os.close(fd)

    def is_lone(self, fd: int) -> bool:
        """The same of a file that is open and perhaps mapped by one descriptor, but for that one."""
        # Danger: a mapping on overlay holds the file of the layer below, which a lease does not look at.
        return filesystem_kind(fd) in _LOCAL - _COPIES_ON_WRITE - {_OVERLAY} and _grants_lease(fd)

    def in_huge_pages(self, path: Path) -> bool:
        """Whether what is at a path lies in memory, in huge pages; False where that cannot be told."""
        try:
            return in_huge_pages(path)
        except OSError:
            return False

    def in_memory(self, path: Path) -> bool:
        """Whether what is in a directory lies on tmpfs; False where that cannot be told."""
        return _filesystem_at(path) == _TMPFS

    def reserves(self, path: Path) -> bool:
        """Whether `allocate` keeps room for what is written in a directory later; False on zfs alone."""
        return _filesystem_at(path) != _ZFS

    def is_local(self, path: Path) -> bool:
        """Whether this machine alone reads and writes the filesystem of a directory; False where in doubt."""
        return _filesystem_at(path) in _LOCAL

    def sync_dir(self, path: Path) -> None:
        """Make the names in a directory durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _BASE_FLAGS)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # -- contents ------------------------------------------------------------------------------

    def create(self, path: Path, *, direct: bool = False) -> int:
        """A descriptor for a new file; FileExistsError if the name is taken."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _direct(direct), 0o644)

    def create_unnamed(self, folder: Path) -> int:
        """A descriptor for a new file in a directory, without a name: it goes if it never gets one."""
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | _BASE_FLAGS, 0o644)

    def name(self, fd: int, path: Path) -> None:
        """Give a file of `create_unnamed` its name; FileExistsError if that is taken."""
        # Only with a descriptor does Python ask for the link to be followed; the path says where it is.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd)

    def open_write(self, path: Path, *, direct: bool = False) -> int:
        """A descriptor for an existing file, whose bytes and blocks stay as they are."""
        _check_kind(path)
        return os.open(path, os.O_RDWR | _direct(direct))

    def open_read(self, path: Path, *, direct: bool = False) -> int:
        """A read-only descriptor for an existing file."""
        _check_kind(path)
        return os.open(path, os.O_RDONLY | _direct(direct))

    def open_within(self, folder: int, name: str) -> int:
        """As `open_read`, of a file in a directory that is open, whatever has that one's name by now."""
        _check_kind(name, folder)
        return os.open(name, os.O_RDONLY | _BASE_FLAGS, dir_fd=folder)

    def allocate(self, fd: int, size: int, *, mapped: bool = False) -> None:
        """Reserve blocks for bytes 0..size; a no-op where the filesystem has no such call.

        Args:
            mapped: there, libc writes a byte of each block: a store to a mapping without them is a SIGBUS.
        """
        if size == 0:
            return
        try:
            if mapped:
                os.posix_fallocate(fd, 0, size)
            else:
                fallocate(fd, size)
        except OSError as exc:
            # A filter that does not know the call answers EPERM. Danger: a mapping is not to go on without.
            unknown = not mapped and exc.errno == errno.EPERM
            if not unknown and exc.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise

    def truncate(self, fd: int, size: int) -> None:
        """Set the length of a file."""
        os.ftruncate(fd, size)

    def pwrite(self, fd: int, data: Buffer, offset: int) -> None:
        """Write all of `data` at `offset`."""
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(fd, view, offset)
            if written == 0:  # or this would never end
                raise OSError(errno.EIO, "the filesystem takes no bytes and does not say why")
            view = view[written:]
            offset += written

    def start_writeback(self, fd: int, offset: int, size: int) -> None:
        """Ask the kernel to begin writing cached pages out; a hint, not a sync."""
        start_writeback(fd, offset, size)

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """One scatter read at `offset`; returns the bytes read, 0 at the end of the file."""
        try:
            return os.preadv(fd, buffers, offset)
        except PermissionError:
            # Of a file that is open: a container's filter does not know preadv2, which libc calls for it.
            first = memoryview(next(filter(len, buffers), b"")).cast("B")
            data = os.pread(fd, len(first), offset)
            first[: len(data)] = data
            return len(data)

    def preadv_cached(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """As `preadv`, but only what lies in the page cache now; 0 when that is nothing or cannot be told."""
        try:
            return os.preadv(fd, buffers, offset, os.RWF_NOWAIT)
        except OSError:  # what is wrong, if anything, a plain read says
            return 0

    def sync(self, fd: int) -> None:
        """Make a file's bytes, and the metadata needed to read them, durable."""
        os.fdatasync(fd)

    def lock(self, fd: int) -> None:
        """Lock an open file whole, for all copies of this descriptor together; never waits."""
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WHOLE_FILE)

    def lock_record(self, fd: int) -> None:
        """Lock a file whole for this process, until it closes any descriptor of it; never waits."""
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock(self, fd: int) -> None:
        """Undo `lock` and `lock_record`, also for copies of this descriptor in other processes."""
        fcntl.lockf(fd, fcntl.LOCK_UN)
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _NOTHING)

    def map_shared(self, fd: int, size: int) -> mmap.mmap:
        """A writable shared mapping of bytes 0..size of a file that is at least that long."""
        return mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)

    def write_mapped(self, mapping: mmap.mmap, data: Buffer, offset: int) -> None:
        """Copy writable memory of `LEAST_BYTES` and more into a mapping, whose file is that long."""
        view = memoryview(data)
        large_move()(address_of(mapping) + offset, address_of(view), view.nbytes)

    def map_private(self, fd: int, size: int) -> mmap.mmap:
        """A mapping of bytes 0..size for reading; what is written to it reaches no file."""
        return mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)

    def is_in_memory(self, fd: int) -> bool:
        """Whether a file lies on tmpfs, where no read of what is there can fail."""
        return filesystem_kind(fd) == _TMPFS

    def map_range(self, fd: int, offset: int, nbytes: int) -> memoryview:
        """Bytes of a file as they are, read-only, for as long as somebody has the view.

        Danger: where reading fails, or somebody cuts the file, the process that looks at them is killed
        (SIGBUS). So it is for files in memory that nobody writes any more.

        Raises:
            ValueError: the file is shorter.
        """
        skip = offset % mmap.ALLOCATIONGRANULARITY
        kind = mmap.MAP_SHARED | mmap.MAP_POPULATE
        found = mmap.mmap(fd, skip + nbytes, kind, mmap.PROT_READ, offset=offset - skip)
        return memoryview(found)[skip:]

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    # -- compositions --------------------------------------------------------------------------

    def fill(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Read into all of `buffer` from `offset` on; the bytes read, fewer where the file ends before."""
        done = 0
        while done < len(buffer):
            got = self.preadv(fd, [buffer[done:]], offset + done)
            if got == 0:
                break
            done += got
        return done

    def first(self, fd: int, nbytes: int) -> bytes:
        """The first so many bytes, fewer where the file ends before."""
        data = bytearray(nbytes)
        return bytes(data[: self.fill(fd, memoryview(data), 0)])

    def write_new(self, path: Path, data: Buffer) -> None:
        """Create a small file, write it whole and make its bytes durable (its name needs `sync_dir`)."""
        fd = self.create(path)
        try:
            self.pwrite(fd, data, 0)
            self.sync(fd)
        finally:
            self.close(fd)

    def free_bytes(self, path: Path) -> int:
        """Bytes that an ordinary user may still write to the filesystem of `path`.

        Enough for anything where it tells no size, as a tmpfs without a limit: a write says when it is full.
        """
        stats = os.statvfs(path)
        return stats.f_bavail * stats.f_frsize if stats.f_blocks else sys.maxsize


def _check_kind(path: Path | str, folder: int | None = None) -> None:
    """Before opening: a pipe that somebody has put there would block, and a device might do anything."""
    mode = os.lstat(path, dir_fd=folder).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "a pipe or a device, and no file", str(path))


def _direct(direct: bool) -> int:
    return _BASE_FLAGS | (os.O_DIRECT if direct else 0)


def _grants_lease(fd: int) -> bool:
    """Whether a write lease is to be had, which needs that this descriptor is the only one."""
    try:
        # Danger: whoever opens the file while we have the lease makes the kernel signal us. The default,
        # SIGIO, ends the process; SIGURG is ignored.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        return False
    with contextlib.suppress(OSError):  # closing the descriptor gives it back as well
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def _filesystem_at(directory: Path) -> int:
    """The kind of filesystem that a directory is on; 0 when it cannot be told."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return filesystem_kind(fd)
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)
