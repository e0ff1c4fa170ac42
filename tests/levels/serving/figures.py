"""What a byte costs on its way to a peer and back, and what the least of it is on this machine.

    python -m tests.levels.serving.figures [--files 4] [--times 5] [--place /dev/shm]

`sent`: files of 64 MiB as the agent sends them, read and compared on the way; the peer is another process.
Once with an AES-GMAC of each part, and once as to other object stores, with a signed SHA-256. `fetched`: the
same back. Wall time, and for each GB the processor's time of this process and of the peer's.
`bare` are the steps that no way can leave out, a thread for each end: kernel to kernel on loopback, into
memory that is used again; the same and on into a new file in memory; sums of bytes that are in memory.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import psutil
import xxhash

from ckpt_core.levels.agent.pace import Pace
from ckpt_core.levels.agent.source import OpenSave
from ckpt_core.levels.far.objects import ObjectFar
from ckpt_core.levels.signing import BodyMac
from ckpt_core.store import step_path
from ckpt_core.system.files import Files
from tests.levels import making
from tests.levels.servers.faulty import in_environment
from tests.levels.servers.peer import PeerServer

BLOCK_BYTES, FILE_BYTES = 1 << 20, 64 << 20
Row = tuple[float, float, float]


def main(arguments: list[str]) -> int:
    """See above; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.levels.serving.figures")
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--place", default="/dev/shm")
    given = parser.parse_args(arguments)
    making.CHUNK_BYTES, nbytes = 4 << 20, given.files * FILE_BYTES
    with tempfile.TemporaryDirectory(dir=given.place) as name:
        place = Path(name)
        store = making.make_store(place / "root")
        making.save(store, 1, nbytes=FILE_BYTES, ranks=range(given.files), world=given.files)
        store.close()
        rows: dict[str, list[Row]] = {}
        for _ in range(given.times):
            for what, row in _round(place, nbytes).items():
                rows.setdefault(what, []).append(row)
    print(f"{'':28}{'GB/s':>8}{'here, s/GB':>12}{'peer, s/GB':>12}")
    for what, found in rows.items():
        wall, here, there = (median(column) * 1e9 / nbytes for column in zip(*found, strict=True))
        print(f"{what:28}{1 / wall:8.2f}{here:12.2f}{there:12.2f}")
    return 0


def _round(place: Path, nbytes: int) -> dict[str, Row]:
    found: dict[str, Row] = {}
    path = step_path(place / "root", 1)
    home = place / "peer"
    home.mkdir()
    with PeerServer(home) as server, in_environment(server.environ()):
        peer = psutil.Process(server._process.pid)
        with OpenSave(path, files=Files()) as save:
            for what in ("sent, AES-GMAC", "sent, SHA-256"):
                with ObjectFar(server.url(what[-4:])) as far:
                    far._bucket._peer._refused = what.endswith("SHA-256")  # type: ignore[union-attr]
                    found[what] = _took(partial(_send, save, far), peer)
                    found["fetched"] = _took(partial(_fetch, save, far), peer)
    shutil.rmtree(home)
    source = place / "whole"
    source.write_bytes(b"".join(one.read_bytes() for one in sorted(path.glob("*.safetensors"))))
    found["bare: socket"] = _took(lambda: _bare(source, None))
    found["bare: socket, new file"] = _took(lambda: _bare(source, place / "bare"))
    data = memoryview(source.read_bytes())
    found["bare: xxh3"] = _took(lambda: _fed(xxhash.xxh3_64(), data))
    found["bare: AES-GMAC"] = _took(lambda: _fed(BodyMac.begin("secret"), data))
    found["bare: SHA-256"] = _took(lambda: _fed(hashlib.sha256(), data))
    return found


def _took(act: Callable[[], object], peer: psutil.Process | None = None) -> Row:
    before = sum(peer.cpu_times()[:2]) if peer is not None else 0.0
    began, cpu_s = time.perf_counter(), time.process_time()
    act()
    row = time.perf_counter() - began, time.process_time() - cpu_s
    return (*row, sum(peer.cpu_times()[:2]) - before if peer is not None else 0.0)


def _send(save: OpenSave, far: ObjectFar) -> None:
    for entry in save.entries:
        blocks = save.blocks(entry, Pace(None).block_bytes)
        far.put(save.copy, entry.name, blocks, entry.nbytes)


def _fetch(save: OpenSave, far: ObjectFar) -> None:
    for entry in save.entries:
        for block in far.read_blocks(save.copy, entry.name, 0, entry.nbytes):
            xxhash.xxh3_64_intdigest(block)


def _fed(found: object, data: memoryview) -> None:
    for at in range(0, len(data), BLOCK_BYTES):
        found.update(data[at : at + BLOCK_BYTES])  # type: ignore[attr-defined]


def _bare(source: Path, into: Path | None) -> None:
    """From one file through a socket, by two threads, and no further than one buffer; or into a new file."""
    here, there = _connected()
    thread = threading.Thread(target=_give, args=(source, here))
    thread.start()
    buffer = memoryview(bytearray(BLOCK_BYTES))
    fd = os.open(into, os.O_CREAT | os.O_WRONLY) if into is not None else -1
    at = 0
    while got := there.recv_into(buffer):
        if fd >= 0:
            os.pwrite(fd, buffer[:got], at)
        at += got
    thread.join()
    here.close()
    there.close()
    if into is not None:
        os.close(fd)
        into.unlink()


def _give(source: Path, sock: socket.socket) -> None:
    with source.open("rb") as file:
        sock.sendfile(file)
    sock.shutdown(socket.SHUT_WR)


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        here = socket.create_connection(listening.getsockname())
        return here, listening.accept()[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
