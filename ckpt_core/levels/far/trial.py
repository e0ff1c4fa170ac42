"""How fast bytes go to a level: measured with one object or file of our own, which is taken away again."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ckpt_core.errors import CkptError
from ckpt_core.levels.far.door import Away
from ckpt_core.options import scheme_of
from ckpt_core.system.files import Files

TRIAL_BYTES = 64 * 1024 * 1024
_FIRST_BYTES = 4 * 1024 * 1024
_BLOCK_BYTES = 4 * 1024 * 1024
_MOST_S = 20.0
"""What would take longer is not tried: the first bytes have said enough."""


def upload_speed(url: str) -> float:
    """Bytes for each second that a level takes; called by `ckpt-core doctor`, after `Far.check`.

    Raises:
        Away: it does not take them.
    """
    speed = _once(url, _FIRST_BYTES)
    return _once(url, TRIAL_BYTES) if TRIAL_BYTES / speed < _MOST_S else speed


def _once(url: str, nbytes: int) -> float:
    name = f".ckpt-core-doctor-{secrets.token_hex(6)}"
    begun = time.monotonic()
    if scheme_of(url) is None:
        _to_directory(Path(url), name, nbytes)
    else:
        _to_store(url, name, nbytes)
    return nbytes / max(time.monotonic() - begun, 1e-6)


def _to_store(url: str, name: str, nbytes: int) -> None:
    # Only here: it brings the client.
    from ckpt_core.levels.far.bucket import Bucket

    bucket = Bucket(url, request_s=_MOST_S, retries=1)
    try:
        bucket.put_blocks(name, _blocks(nbytes), nbytes)
    finally:
        with suppress(CkptError):
            bucket.delete([name])


def _to_directory(folder: Path, name: str, nbytes: int) -> None:
    files = Files()
    path = next(place for place in (folder, *folder.parents) if place.is_dir()) / name
    try:
        fd = files.create(path)
        try:
            for number, block in enumerate(_blocks(nbytes)):
                files.pwrite(fd, block, number * _BLOCK_BYTES)
            files.sync(fd)
        finally:
            files.close(fd)
    except OSError as exc:
        raise Away(f"{folder}: a trial file cannot be written: {exc.strerror or exc}") from exc
    finally:
        with suppress(OSError):
            files.unlink(path)


def _blocks(nbytes: int) -> Iterator[memoryview]:
    block = memoryview(os.urandom(_BLOCK_BYTES))  # nothing on the way can make it smaller
    for _ in range(0, nbytes, _BLOCK_BYTES):
        yield block
