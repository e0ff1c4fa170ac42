"""How fast parity is made, and a lost part made of it: the arithmetic alone, beside disks, and over HTTP.

    python -m tests.levels.parity.figures [--shape 4+1] [--mib 64] [--times 5] [--place /dev/shm]

Each node has a part of so many MiB. `arithmetic`: data that are in memory, into memory that is used again.
`encode`: what one node does: reads k blocks of each stripe that it keeps, compares them with their sums,
hashes, writes, syncs and reads back. `rebuild`: a lost part is fetched as a restore does it. Both with roots
in this process (`here`) and from a server of each node (`served`). GB/s are of what is read of others, and
beside them the same for each second of all processors, of this process and of the servers.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from ckpt_core.levels import parity_speed, read_keys
from ckpt_core.levels.bring.fetching import Wanted, fetch
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.levels.far.door import Readable
from ckpt_core.levels.parity.encoding import How, Sources, encode
from ckpt_core.levels.parity.groups import Shape
from ckpt_core.levels.parity.objects import parity_key, root_key
from ckpt_core.levels.parity.parts import read_part
from ckpt_core.levels.parity.rebuilding import Node, ParityFar
from ckpt_core.levels.serving.binding import Address
from ckpt_core.levels.serving.server import PeerServer
from ckpt_core.system.files import Files
from tests.levels import making
from tests.levels.parity.clusters import contents
from tests.levels.parity.serving import RUN, ServedCluster
from tests.levels.servers.peer import TOKEN

CHUNK_BYTES = 4 << 20
Fars = Callable[[int], tuple[Readable, Readable]]


def main(arguments: list[str]) -> int:
    """See above; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.levels.parity.figures")
    parser.add_argument("--shape", default="4+1")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--place", default="/dev/shm")
    given = parser.parse_args(arguments)
    making.CHUNK_BYTES, shape = CHUNK_BYTES, Shape.parse(given.shape)
    by, speed = parity_speed(given.shape)
    print(f"arithmetic, {given.shape} by {by}: {speed / 1e9:.2f} GB/s", flush=True)
    with tempfile.TemporaryDirectory(dir=given.place) as name:
        cluster = ServedCluster(Path(name), shape, sizes=[given.mib << 20] * shape.nodes)
        token = Path(name) / "token"
        token.touch(mode=0o600)
        token.write_text(TOKEN)
        os.environ["CKPT_PEER_TOKEN_FILE"] = str(token)
        _figures(cluster, "here", lambda n: _here(cluster, n), [], times=given.times)
        with ExitStack() as stack:
            servers = [stack.enter_context(_served(cluster, n)) for n in range(shape.nodes)]
            ports, pids = [port for port, _ in servers], [pid for _, pid in servers]
            there = _there(cluster, ports)
            _figures(cluster, "served", there, pids, times=given.times)
    return 0


def _figures(
    cluster: ServedCluster, where: str, fars: Fars, pids: list[int], *, times: int
) -> None:
    shape, nodes = cluster.shape, range(cluster.shape.nodes)
    opened = [fars(n) for n in nodes]
    roots = [_here(cluster, 0)[0], *(root for root, _ in opened[1:])]
    parts = [part for far in roots if (part := read_part(far, cluster.save)) is not None]
    sources = Sources(roots, parts)
    nbytes = sum(part.nbytes for part in parts[1:]) * shape.m // (shape.nodes - 1)

    def make() -> None:
        shutil.rmtree(cluster.kept(0), ignore_errors=True)
        own = DirectoryFar(cluster.kept(0), files=Files())
        encode(cluster.group, 0, cluster.save, sources, own, How())

    _print(f"encode, {where}", [_took(make, pids) for _ in range(times)], nbytes)
    for n in nodes:
        encode(
            cluster.group,
            n,
            cluster.save,
            sources,
            DirectoryFar(cluster.kept(n), files=Files()),
            How(),
        )
    lost = shape.nodes - 1
    into = cluster.folder / "rebuilt"

    def bring() -> None:
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir()
        others = [Node(cluster.group.parts[n], *opened[n]) for n in nodes if n != lost]
        far = ParityFar("parity:///lost", cluster.group.parts[lost], others)
        wanted = Wanted(cluster.save, into, (lost,), shape.nodes)
        fetch(far, wanted, lambda done, total: None, files=Files())

    took = [_took(bring, pids) for _ in range(times)]
    assert contents(into) == cluster.contents(lost)
    shutil.rmtree(into)
    _print(f"rebuild, {where}", took, parts[lost].nbytes * shape.k)


def _here(cluster: ServedCluster, n: int) -> tuple[Readable, Readable]:
    return tuple(DirectoryFar(at(n), files=Files()) for at in (cluster.root, cluster.kept))


def _there(cluster: ServedCluster, ports: list[int]) -> Fars:
    from ckpt_core.levels.far.plain import PlainFar

    def fars(n: int) -> tuple[Readable, Readable]:
        part = cluster.group.parts[n]
        return tuple(
            PlainFar(f"peer://127.0.0.1:{ports[n]}/{key(RUN, part)}")
            for key in (root_key, parity_key)
        )

    return fars


@contextmanager
def _served(cluster: ServedCluster, n: int) -> Iterator[tuple[int, int]]:
    """The port of a node's server, a process of its own, and its id."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            keys = read_keys(os.environ["CKPT_PEER_TOKEN_FILE"])
            server = PeerServer(cluster.dir(n), keys, Address("127.0.0.1", 0), files=Files())
            server.show(root_key(RUN, cluster.group.parts[n]), cluster.root(n))
            os.write(write, str(server.address).encode())
            while os.getppid() != 1:
                time.sleep(0.5)
        finally:
            os._exit(0)
    try:
        yield int(os.read(read, 100).decode().rpartition(":")[2]), pid
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(read)
        os.close(write)


def _took(work: Callable[[], None], pids: list[int]) -> tuple[float, float, float]:
    """Seconds, of this process's processors, and of the servers'."""
    begun, mine, theirs = time.perf_counter(), time.process_time(), _cpu_s(pids)
    work()
    return time.perf_counter() - begun, time.process_time() - mine, _cpu_s(pids) - theirs


def _cpu_s(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _print(what: str, took: list[tuple[float, float, float]], nbytes: int) -> None:
    wall, mine, theirs = (median(column) for column in zip(*took, strict=True))
    of_cpu = f"{nbytes / 1e9 / mine:.2f} for each second of a processor here"
    if theirs:
        of_cpu += f", {nbytes / 1e9 / theirs:.2f} of the servers'"
    print(f"{what}: {nbytes / 1e9 / wall:.2f} GB/s, {of_cpu}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
