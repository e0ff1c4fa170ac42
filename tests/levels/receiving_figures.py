"""What a byte costs on its way from an object store on loopback to a root in memory.

    python -m tests.levels.receiving_figures [--files 4] [--times 5] [--place /dev/shm]

Files of 64 MiB. `looked at`: ranges of 16 MiB by four threads, hashed and forgotten. `brought`: the same,
written to new files, as a restore of a fresh root has it done. Each once by requests of our own and once by
the client of object stores. GB of each second, and processor's time of this process for each GB. `the client
alone`: 8 MiB by eight threads, copied once, as `bench --suite levels` has it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import xxhash

from ckpt_core.bench.levels.client import Client
from ckpt_core.bench.remote import Remote
from ckpt_core.levels import Copy
from ckpt_core.levels.bring.fetching import RANGE_BYTES, STREAMS, Wanted, fetch
from ckpt_core.levels.far.objects import ObjectFar
from ckpt_core.store import step_path
from ckpt_core.system.files import Files
from tests.levels import making
from tests.levels.sending import sent_to
from tests.levels.servers.faulty import in_environment, s3_environ

URL = "s3://bucket/run"
FILE_BYTES = 64 << 20


def main(arguments: list[str]) -> int:
    """See above; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.levels.receiving_figures")
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--place", default="/dev/shm")
    given = parser.parse_args(arguments)
    worker, rows = "ckpt_core.bench.levels.sink:Sink", dict[str, list[tuple[float, float]]]()
    with tempfile.TemporaryDirectory(dir=given.place) as name:
        place = Path(name, "sink")
        place.mkdir()
        with Remote("sink", place, timeout_s=600, worker=worker) as sink:
            environ = {**s3_environ(sink.call("start")["port"]), "AWS_UNSIGNED_PAYLOAD": "true"}
            with in_environment(environ):
                ways = _ways(place, given.files)
                for _ in range(given.times):
                    for what, way in ways.items():
                        rows.setdefault(what, []).append(_timed(way))
    print(f"{'':32}{'GB/s':>8}{'s/GB':>8}")
    for what, found in rows.items():
        wall, spent = (
            median(column) / (given.files * FILE_BYTES) * 1e9 for column in zip(*found, strict=True)
        )
        print(f"{what:32}{1 / wall:8.2f}{spent:8.2f}")
    return 0


def _ways(place: Path, count: int) -> dict[str, Callable[[], object]]:
    making.CHUNK_BYTES = 8 << 20
    store = making.make_store(place / "root")
    making.save(store, 1, nbytes=FILE_BYTES, ranks=range(count), world=count)
    store.close()
    ours, clients = ObjectFar(URL), ObjectFar(URL)
    clients._bucket._receiver = None
    sent_to(ours, place / "root", 1)
    copy = Copy(1, ours.steps()[1])
    alone = place / "alone"
    alone.mkdir()
    for shard in step_path(place / "root", 1).glob("shard-*"):
        shard.rename(alone / shard.name)
    names = sorted(path.name for path in alone.iterdir())
    client = Client("obstore", place)
    url = f"{URL}/{copy.target}/{copy.folder}"
    return {
        "looked at by our own requests": lambda: _look(ours, copy, names),
        "looked at by the client": lambda: _look(clients, copy, names),
        "brought by our own requests": lambda: _bring(ours, copy, place),
        "brought by the client": lambda: _bring(clients, copy, place),
        "the client alone": lambda: client.download(url, str(alone)),
    }


def _look(far: ObjectFar, copy: Copy, names: list[str]) -> None:
    def read(one: tuple[str, int]) -> None:
        found = xxhash.xxh3_64()
        for block in far.read_blocks(copy, *one, RANGE_BYTES):
            found.update(block)

    with ThreadPoolExecutor(STREAMS) as threads:
        starts = range(0, FILE_BYTES, RANGE_BYTES)
        list(threads.map(read, [(name, begin) for name in names for begin in starts]))


def _bring(far: ObjectFar, copy: Copy, place: Path) -> None:
    with tempfile.TemporaryDirectory(dir=place) as name:
        fetch(far, Wanted(copy, Path(name), (), 1), lambda *told: None, files=Files())


def _timed(way: Callable[[], object]) -> tuple[float, float]:
    began, spent = time.perf_counter(), time.process_time()
    way()
    return time.perf_counter() - began, time.process_time() - spent


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
