"""The process of a client of object stores alone, which sends files and reads them back. Needs no torch."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module, metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ckpt_core.bench.serving import Answer

_PART_BYTES, _STREAMS = 8 << 20, 4
_NEEDS = {
    "obstore": "obstore",
    "sync_boto3": "boto3",
    "torch_save_s3fs": "s3fs",
    "dcp_s3torchconnector": "s3torchconnector",
}


def release(name: str) -> Answer:
    """What a way is made of, or that it is missing."""
    needs = _NEEDS.get(name, "ckpt-core")
    try:
        return {"version": f"{needs} {metadata.version(needs)}"}
    except metadata.PackageNotFoundError:
        return {"reason": f"{needs} is not installed"}


class Client:
    """Answers `ckpt_core.bench.levels.suite`."""

    def __init__(self, name: str, root: Path) -> None:
        self._name = name

    def hello(self) -> Answer:
        """See `release`."""
        return release(self._name)

    def upload(self, url: str, source: str) -> Answer:
        """The files of a step to a store; what it took of this process."""
        put = _put_obstore if self._name == "obstore" else _put_boto3
        began, cpu_s = time.perf_counter(), time.process_time()
        put(url, Path(source))
        return {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_s}

    def download(self, url: str, source: str) -> Answer:
        """The files of a step out of a store into memory that was used before."""
        obstore, store = _obstore(url)
        sizes = {path.name: path.stat().st_size for path in _files(Path(source))}
        ranges = [
            (name, start, min(_PART_BYTES, size - start))
            for name, size in sizes.items()
            for start in range(0, size, _PART_BYTES)
        ]
        target = bytearray(_PART_BYTES)

        def get(one: tuple[str, int, int]) -> None:
            data = obstore.get_range(store, one[0], start=one[1], length=one[2])
            target[: one[2]] = memoryview(data)

        with ThreadPoolExecutor(2 * _STREAMS) as threads:
            began = time.perf_counter()
            list(threads.map(get, ranges))
            return {"seconds": time.perf_counter() - began}


def _files(source: Path) -> list[Path]:
    return sorted(path for path in source.iterdir() if path.is_file())


def _obstore(url: str) -> tuple[Any, Any]:
    place = urlsplit(url)
    store = import_module("obstore.store").S3Store(
        place.netloc, prefix=place.path.strip("/"), client_options={"allow_http": True}
    )
    return import_module("obstore"), store


def _put_obstore(url: str, source: Path) -> None:
    obstore, store = _obstore(url)
    for path in _files(source):
        obstore.put(store, path.name, path, chunk_size=_PART_BYTES, max_concurrency=_STREAMS)


def _put_boto3(url: str, source: Path) -> None:
    place = urlsplit(url)
    client = import_module("boto3").client("s3")
    for path in _files(source):
        client.upload_file(str(path), place.netloc, f"{place.path.strip('/')}/{path.name}")
