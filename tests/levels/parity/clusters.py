"""Nodes of a group in this process: a root and a place for parity each, and no network."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from ckpt_core.levels.bring.fetching import Wanted, fetch
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.levels.far.door import Copy
from ckpt_core.levels.parity.encoding import How, Sources, encode
from ckpt_core.levels.parity.groups import Shape
from ckpt_core.levels.parity.objects import Group
from ckpt_core.levels.parity.parts import read_part
from ckpt_core.levels.parity.rebuilding import Node, ParityFar
from ckpt_core.store import step_path
from ckpt_core.system.files import Files
from tests.levels.making import CHUNK_BYTES, make_store, save
from tests.store.harness import QuickFiles

PIECE_BYTES = 1024
STEP = 7
ATTEMPT = "000000000007-0123abcd"


class Cluster:
    """A group with one step, node n having rank n.

    Args:
        sizes: of what the nodes have; (): different ones.
        fresh: the step is to be made; else the folder has it.
    """

    def __init__(
        self, folder: Path, shape: Shape, *, sizes: Sequence[int] = (), fresh: bool = True
    ) -> None:
        self.folder, self.shape = folder, shape
        self.group = Group(shape, tuple(f"node-{n:05d}" for n in range(shape.nodes)))
        self.save = Copy(STEP, ATTEMPT)
        for n in range(shape.nodes) if fresh else ():
            nbytes = sizes[n] if sizes else (3 * n + 5) * CHUNK_BYTES + 17 * n
            self.write(n, nbytes)

    def write(self, n: int, nbytes: int, *, sums: bool = True) -> None:
        store = make_store(self.root(n))
        save(
            store,
            STEP,
            mark=n,
            nbytes=nbytes,
            ranks=(n,),
            world=self.shape.nodes,
            attempt=ATTEMPT,
            sums=sums,
        )
        store.close()

    def root(self, n: int) -> Path:
        return self.folder / f"root-{n}"

    def kept(self, n: int) -> Path:
        return self.folder / f"kept-{n}"

    def encode(self, *numbers: int, files: Files | None = None) -> None:
        """What these nodes keep; all, if none is named."""
        fars = [DirectoryFar(self.root(n), files=QuickFiles()) for n in range(self.shape.nodes)]
        parts = [read_part(far, self.save) for far in fars]
        sources = Sources(fars, [part for part in parts if part is not None])
        assert len(sources.parts) == len(fars)
        for n in numbers or range(self.shape.nodes):
            far = DirectoryFar(self.kept(n), files=files or QuickFiles())
            how = How(piece_bytes=PIECE_BYTES)
            encode(self.group, n, self.save, sources, far, how)

    def lose(self, *numbers: int) -> None:
        for n in numbers:
            shutil.rmtree(self.root(n), ignore_errors=True)
            shutil.rmtree(self.kept(n), ignore_errors=True)

    def far(self, n: int) -> ParityFar:
        """What can be rebuilt of a node."""
        nodes = [
            Node(part, *(DirectoryFar(at(m), files=QuickFiles()) for at in (self.root, self.kept)))
            for m, part in enumerate(self.group.parts)
            if m != n
        ]
        return ParityFar(f"parity:///{n}", self.group.parts[n], nodes)

    def bring(self, n: int, into: Path, *, files: Files | None = None) -> None:
        """Rebuild the part of a node."""
        into.mkdir(parents=True)
        wanted = Wanted(self.save, into, (n,), self.shape.nodes, 1.0)
        with self.far(n) as far:
            fetch(far, wanted, lambda done, total: None, files=files or QuickFiles())

    def contents(self, n: int) -> dict[str, bytes]:
        """What a node holds of the step."""
        return contents(step_path(self.root(n), STEP))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def others(cluster: Cluster, lost: Collection[int]) -> list[int]:
    return [n for n in range(cluster.shape.nodes) if n not in lost]
