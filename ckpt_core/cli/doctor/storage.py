"""A trial of a directory's filesystem: the store commits a step there, with the engine's own file layer.

Everything happens in a hidden directory of its own, which is removed.
"""

from __future__ import annotations

import mmap
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_core.cli.doctor.finding import Finding, note, ok, problem
from ckpt_core.errors import CkptError
from ckpt_core.layout import MANIFEST_NAME
from ckpt_core.persist import FilePlace, ShardFile, ShardRequest
from ckpt_core.store import Attempt, RootLock, StepStore, step_path
from ckpt_core.system.files import Files
from ckpt_core.types import DirectIO
from ckpt_core.units import ALIGN_BYTES

_PREFIX = ".ckpt-core-doctor-"
_STEP = 1
_FILE = "trial"
_TRY_LOCK = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit(3)
"""
_REFUSED = 3


def try_storage(directory: Path) -> list[Finding]:
    """What the filesystem of a directory can do.

    Raises:
        OSError: nothing can be made there.
    """
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=directory) as folder:
        return list(_trial(Path(folder)))


def _trial(folder: Path) -> Iterator[Finding]:
    store = StepStore(
        folder / "root", files=Files(), keep_last=None, keep_every=None, spare_slots=0
    )
    try:
        store.open()
    except CkptError as exc:
        yield problem("lock", _told(exc, folder), "use another filesystem")
        return
    try:
        yield check_lock(store.root, is_record=store.has_record_lock)
        yield _commit(store, folder)
        yield _recycling(store.root)
        yield check_sharing(store.root, step_path(store.root, _STEP) / _FILE)
        yield _direct(store, folder)
    finally:
        store.close()


def check_lock(root: Path, *, is_record: bool = False) -> Finding:
    """Whether another process is kept out of a root whose lock this one has, of whatever kind."""
    command = [sys.executable, "-I", "-S", "-c", _TRY_LOCK, str(RootLock(root).path)]
    code = subprocess.run(command, capture_output=True, timeout=60, check=False).returncode
    if code == _REFUSED and is_record:
        text = (
            "a second process is kept out by a POSIX record lock: no better one is to be had here"
        )
        return note(
            "lock", text, "code of the job that opens and closes .lock drops it for a while"
        )
    if code == _REFUSED:
        return ok("lock", "a second process is kept out")
    text = "a second process got the lock that this one had"
    return problem("lock", text, "two jobs could write to one root: use another filesystem")


def _commit(store: StepStore, folder: Path) -> Finding:
    try:
        # Twice: to replace a step is another operation than to add one.
        for _ in range(2):
            attempt = store.begin(_STEP)
            _write(attempt, direct=DirectIO.AUTO)
            Files().write_new(attempt.path / MANIFEST_NAME, b"{}")
            store.publish(attempt)
    except (CkptError, OSError) as exc:
        return problem("commit", _told(exc, folder), "use another filesystem")
    return ok("commit", "write, fsync and rename of a trial step, added and replaced")


def _recycling(root: Path) -> Finding:
    if Files().is_unused(step_path(root, _STEP) / _FILE):
        return ok("recycling", "files of retired steps that nobody reads are written again")
    text = "who reads a file cannot be told here, or writing copies: those of retired steps are deleted"
    return note("recycling", text, "saves take a little longer than where they are written again")


def check_sharing(root: Path, file: Path, *, files: Files | None = None) -> Finding:
    """What `share_unchanged` would do in a root, tried with a file of it."""
    files = files or Files()
    if not files.is_local(root):
        text = "other machines may change files here, so `share_unchanged` does nothing"
        return note("sharing", text, "every step is written whole")
    try:
        files.link(file, root / "shared")
    except OSError as exc:
        text = f"no hard links ({exc.strerror or exc}), so `share_unchanged` copies what has not changed"
        return note("sharing", text, "steps take as much space as without it")
    return ok("sharing", "with `share_unchanged` steps have files in common that have not changed")


def _direct(store: StepStore, folder: Path) -> Finding:
    try:
        _write(store.begin(_STEP + 1), direct=DirectIO.ON)
    except CkptError as exc:
        text = (
            f"no O_DIRECT: writes go through the page cache ({_told(exc.__cause__ or exc, folder)})"
        )
        return note("direct I/O", text, "saves take longer, and push other files out of the cache")
    return ok("direct I/O", "O_DIRECT works: writes go past the page cache")


def _write(attempt: Attempt, *, direct: DirectIO) -> None:
    """A file of one piece, as a save writes it."""
    request = ShardRequest(
        name=_FILE,
        nbytes=ALIGN_BYTES,
        place=lambda: FilePlace(attempt.path / _FILE, recycled=False),
        direct_io=direct,
        checksum=True,
        step=_STEP,
    )
    shard = ShardFile(request, files=Files())
    try:
        # A mapping begins on a page, as direct writes need.
        shard.write(_Piece(memory=memoryview(mmap.mmap(-1, ALIGN_BYTES))))
        shard.sync()
    finally:
        shard.close()


@dataclass(frozen=True, slots=True)
class _Piece:
    """All bytes of a file."""

    memory: memoryview
    index: int = 0
    offset: int = 0
    nbytes: int = ALIGN_BYTES
    ready: Any = None
    release: Callable[[], None] = lambda: None


def _told(error: BaseException, folder: Path) -> str:
    """An error without the name of the directory that is gone when it is read."""
    return " ".join(str(error).replace(str(folder), "trial").split())
