"""Copies of steps at a level in an object store, made call by call."""

from __future__ import annotations

from ckpt_core.layout import Manifest, RankEntry
from ckpt_core.levels import Copy, Far
from tests.levels.servers.faulty import FaultServer

SHARD = "shard-00000-0.safetensors"
RANK = "rank-00000.json"
MIB = 1 << 20
A, B, C = (Copy(100, f"000000000100-{digit * 8}") for digit in "abc")


def at_server(server: FaultServer, *, request_s: float = 20.0) -> Far:
    """Another agent's view of the same level."""
    from ckpt_core.levels.far.objects import ObjectFar

    return ObjectFar(server.url(), request_s=request_s)


def manifest_of(copy: Copy) -> bytes:
    rows = (RankEntry(0, RANK, 10, "0" * 16),)
    return Manifest(copy.step, copy.attempt, 1.0, rows, 5, directory=copy.directory).encode()


def put(far: Far, copy: Copy, name: str = SHARD, data: bytes = b"0123456789") -> None:
    far.put(copy, name, iter([memoryview(data)]), len(data))


def send(far: Far, copy: Copy, *, replaces: str | None = None) -> bool:
    """All that makes a step, in order."""
    put(far, copy)
    put(far, copy, RANK)
    return far.publish(copy, manifest_of(copy), replaces=replaces)


def step(number: int, digit: str = "a") -> Copy:
    return Copy(number, f"{number:012d}-{digit * 8}")
