"""A level in an object store of our own, and a look at what is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from ckpt_core.layout import Manifest, RankManifest
from ckpt_core.levels import Copy, Far, open_far
from ckpt_core.options import Level
from tests.levels.making import bytes_of
from tests.levels.servers.faulty import FaultServer, in_environment


def level_of(server: FaultServer, **options: object) -> Level:
    """One that keeps all and passes over nothing."""
    return Level(server.url(), **{"keep_last": None, "backlog": 100, **options})  # type: ignore[arg-type]


@contextmanager
def opened(server: FaultServer) -> Iterator[Far]:
    """The level as this process sees it."""
    with in_environment(server.environ()), open_far(server.url()) as far:
        yield far


def look_at(far: Far) -> dict[int, int]:
    """Marks of all steps there, after a look at every byte of each."""
    found = {}
    for step, attempt in far.steps().items():
        copy = Copy(step, attempt)
        data = far.manifest(copy.target)
        assert data is not None
        manifest = Manifest.decode(data, path=Path("manifest.json"))
        assert manifest.attempt == attempt
        mark = found[step] = int(manifest.created_unix_s)
        for row in manifest.ranks:
            text = read(far, copy, row.file, row.nbytes)
            assert xxhash.xxh3_64_hexdigest(text) == row.xxh3
            for entry in RankManifest.decode(text, path=Path(row.file)).files:
                data = read(far, copy, entry.name, entry.nbytes)
                assert data == bytes_of(step, mark, row.rank, entry.nbytes)
    return found


def read(far: Far, copy: Copy, name: str, nbytes: int) -> bytes:
    """A whole file."""
    data = bytearray(nbytes)
    far.read_into(copy, name, memoryview(data), 0)
    return bytes(data)
