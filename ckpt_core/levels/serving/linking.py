"""A file of a step gets one more key, in another step: nothing of it is sent, and all of it is read.

What the other side says of it is not believed: the sums are those of the step that is here, from its manifest
on. So what has been damaged since it was received is not linked on, and nothing ever is but a whole file of a
published step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import xxhash

from ckpt_core.errors import CkptError
from ckpt_core.layout import MANIFEST_NAME, MAX_MANIFEST_BYTES, FileEntry, Manifest, RankManifest
from ckpt_core.levels.serving.tree import Condition, Thing, Tree, refused
from ckpt_core.levels.serving.wire import Refusal
from ckpt_core.system.files import Files

_BLOCK_BYTES = 1 << 20


def link(
    tree: Tree, source: str, key: str, condition: Condition, *, files: Files
) -> tuple[str, float]:
    """Give a file of a step that is here one more key, durably; its tag, and when it was written.

    Raises:
        Refusal: 404 if it is not there; 412 if it is no file of a step, or not what was saved. Nothing has
            changed.
    """
    tree.check_key(key)
    thing = tree.open(source)
    if thing is None:
        raise Refusal(404, "NoSuchKey")
    try:
        entry = _entry(tree, source, files)
        if entry is None or not _is_right(thing, entry, files):
            raise Refusal(412, "PreconditionFailed")
        return tree.link(thing, source, key, condition), thing.changed_s
    finally:
        files.close(thing.fd)


def _entry(tree: Tree, key: str, files: Files) -> FileEntry | None:
    """What the step that it belongs to says of a file; None: no step that is whole here does."""
    for folder, file in _cuts(key):
        with suppress(CkptError):
            raw = _small(tree, f"{folder.rpartition('/')[0]}/{MANIFEST_NAME}", files)
            manifest = None if raw is None else Manifest.decode(raw, path=Path(folder))
            for row in () if manifest is None else manifest.ranks:
                data = _small(tree, f"{folder}/{row.file}", files)
                if data is None or xxhash.xxh3_64_hexdigest(data) != row.xxh3:
                    continue
                for entry in RankManifest.decode(data, path=Path(row.file)).files:
                    if entry.name == file:
                        return entry
    return None


def _cuts(key: str) -> Iterator[tuple[str, str]]:
    """The folder of an attempt, and a name in it: names may have folders, too."""
    parts = key.split("/")
    for at in range(len(parts) - 1, 1, -1):
        yield "/".join(parts[:at]), "/".join(parts[at:])


def _small(tree: Tree, key: str, files: Files) -> bytes | None:
    thing = tree.open(key)
    if thing is None:
        return None
    try:
        with refused():
            return (
                None if thing.nbytes > MAX_MANIFEST_BYTES else files.first(thing.fd, thing.nbytes)
            )
    finally:
        files.close(thing.fd)


def _is_right(thing: Thing, entry: FileEntry, files: Files) -> bool:
    """Whether every byte of a file is what was saved."""
    if thing.nbytes != entry.nbytes:
        return False
    offset, buffer = 0, memoryview(bytearray(min(_BLOCK_BYTES, entry.nbytes)))
    for chunk in entry.chunks:
        found, end = xxhash.xxh3_64(), offset + chunk.nbytes
        for at in range(offset, end, _BLOCK_BYTES):
            block = buffer[: min(_BLOCK_BYTES, end - at)]
            with refused():
                if files.fill(thing.fd, block, at) < len(block):
                    return False
            found.update(block)
        if found.hexdigest() != chunk.xxh3:
            return False
        offset = end
    return True
