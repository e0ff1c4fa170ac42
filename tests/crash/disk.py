"""A model of what a disk holds after the power has failed: what was synced, and of the rest anything.

It replays a log of file operations. Every file has durable bytes and writes that were not synced yet;
every directory has durable names and changes that were not synced yet. A sync makes durable what belongs
to that one file or directory, and nothing else: stricter than any journaling filesystem, which is
what POSIX allows. A rename is one change of two directories; it is kept or dropped as a whole as long as
neither of them was synced. Writes through a memory mapping are not seen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECTOR_BYTES = 512
ROOT = "root"
FREE = (".inflight", ".slots")
"""Where the engine deletes or overwrites whatever has a name."""


@dataclass(eq=False)
class File:
    """Bytes that are durable, and what was done to them since."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)

    def sync(self) -> None:
        """Everything written is durable."""
        self.durable = self.after(Policy(data="keep"))
        self.pending = []

    def after(self, policy: Policy) -> bytearray:
        """The bytes that a power loss may leave; (offset, None) in `pending` is a change of length."""
        data = bytearray(self.durable)
        for offset, written in self.pending:
            fate = policy.fate_of_write()
            if fate == "drop":
                continue
            if written is None:
                data = data[:offset].ljust(offset, b"\0")
                continue
            end = offset + len(written)
            data = data.ljust(end, b"\0")
            data[offset:end] = policy.garbled(written) if fate == "garble" else written
        return data


@dataclass(eq=False)
class Dir:
    """Names that are durable, and the names as they are now."""

    durable: dict[str, Node] = field(default_factory=dict)
    current: dict[str, Node] = field(default_factory=dict)


Node = File | Dir


@dataclass(frozen=True)
class Half:
    """One directory's part of a change of names: `name` stands for `node` now, and for `old` before."""

    folder: Dir
    name: str
    node: Node | None
    old: Node | None
    place: str


@dataclass
class Change:
    """A change of names that is not wholly durable.

    Attributes:
        halves: what is not durable of it.
        split_at: which operation made one of two halves durable; None while both are not.
    """

    halves: list[Half]
    split_at: int | None = None

    @property
    def adds_to_root(self) -> bool:
        return any(half.place == ROOT and half.node is not None for half in self.halves)

    @property
    def takes_from_root(self) -> bool:
        return any(half.place == ROOT and half.node is None for half in self.halves)


class Policy:
    """What becomes of everything that was not synced.

    Args:
        data: "keep", "drop", "garble" or "random", for writes.
        names: "keep", "drop", "random", "prefix", or "no-additions" and "no-removals": changes that add
            a name to the root, or take one from it, are dropped, all others are kept.
        split: "keep", "drop" or "random", for the other half of a rename of which one is durable.
    """

    def __init__(
        self, *, data: str, names: str = "keep", split: str = "keep", seed: int = 0
    ) -> None:
        self.text = f"data={data} names={names} split={split} seed={seed}"
        self._data, self._names, self._split = data, names, split
        self._random = random.Random(seed)
        self._left = self._random.random()
        self._broken = False

    def fate_of_write(self) -> str:
        if self._data == "random":
            return self._random.choice(("keep", "drop", "garble"))
        return self._data

    def garbled(self, data: bytes) -> bytes:
        """Some sectors written, some not, some nonsense."""
        pieces = []
        for start in range(0, len(data), SECTOR_BYTES):
            sector = data[start : start + SECTOR_BYTES]
            noise = self._random.randbytes(len(sector))
            pieces.append(self._random.choice((sector, bytes(len(sector)), noise, noise)))
        return b"".join(pieces)

    def keeps(self, change: Change) -> bool:
        if change.split_at is not None:
            return self._choose(self._split)
        if self._names == "no-additions":
            return not change.adds_to_root
        if self._names == "no-removals":
            return not change.takes_from_root
        if self._names == "prefix":
            self._broken = self._broken or self._random.random() > self._left
            return not self._broken
        return self._choose(self._names)

    def _choose(self, rule: str) -> bool:
        return self._random.random() < 0.5 if rule == "random" else rule == "keep"


def policies(seeds: int) -> Iterator[Policy]:
    """The outcomes that are worst for somebody, then random ones."""
    yield Policy(data="drop", names="keep", split="keep")
    yield Policy(data="garble", names="keep", split="drop")
    yield Policy(data="keep", names="drop", split="drop")
    yield Policy(data="drop", names="drop", split="keep")
    yield Policy(data="keep", names="no-additions", split="drop")
    yield Policy(data="keep", names="no-removals", split="keep")
    for seed in range(seeds):
        names = ("random", "prefix")[seed % 2]
        yield Policy(data="random", names=names, split="random", seed=seed)


class Disk:
    """The model. Paths are relative to `base`, whose own name is durable."""

    def __init__(self, base: Path, root: Path) -> None:
        self._base = base
        self._root = root
        self._top = Dir()
        self._changes: list[Change] = []
        self._open: dict[int, File] = {}
        self._count = 0

    def apply(self, name: str, args: tuple[Any, ...]) -> None:
        """Replay one operation."""
        self._count += 1
        getattr(self, f"_{name}")(*args)

    # -- operations ------------------------------------------------------------------------------

    def _mkdir(self, path: Path) -> None:
        self._change([(path, Dir())])

    def _rmdir(self, path: Path) -> None:
        self._change([(path, None)])

    def _unlink(self, path: Path) -> None:
        self._change([(path, None)])

    def _rename(self, source: Path, target: Path) -> None:
        self._change([(target, self._find(source)), (source, None)])

    def _exchange(self, first: Path, second: Path) -> None:
        one, two = self._find(first), self._find(second)
        self._change([(second, one), (first, two)])

    def _link(self, source: Path, target: Path) -> None:
        self._change([(target, self._find(source))])

    def _sync_dir(self, path: Path) -> None:
        folder = self._find(path)
        assert isinstance(folder, Dir)
        folder.durable = dict(folder.current)
        for change in self._changes:
            left = [half for half in change.halves if half.folder is not folder]
            if 0 < len(left) < len(change.halves):
                change.split_at = self._count
            change.halves = left
        self._changes = [change for change in self._changes if change.halves]

    def _create(self, path: Path, fd: int) -> None:
        self._open[fd] = File()
        self._change([(path, self._open[fd])])

    def _open_write(self, path: Path, fd: int) -> None:
        found = self._find(path)
        assert isinstance(found, File)
        self._open[fd] = found

    def _allocate(self, fd: int, size: int) -> None:
        file = self._open[fd]
        if len(file.after(Policy(data="keep"))) < size:
            file.pending.append((size, None))

    def _truncate(self, fd: int, size: int) -> None:
        self._open[fd].pending.append((size, None))

    def _pwrite(self, fd: int, data: bytes, offset: int) -> None:
        self._open[fd].pending.append((offset, data))

    def _sync(self, fd: int) -> None:
        self._open[fd].sync()

    def _close(self, fd: int) -> None:
        self._open.pop(fd, None)  # opened for reading, most likely

    # -- what is left ----------------------------------------------------------------------------

    def after(self, policy: Policy) -> dict[str, bytes | None]:
        """The tree that a power loss leaves now: path -> bytes, or None for a directory."""
        kept: dict[int, list[Half]] = {}
        spoiled: set[int] = set()
        for change in self._changes:
            keeps = policy.keeps(change)
            for half in change.halves:
                if keeps:
                    kept.setdefault(id(half.folder), []).append(half)
                elif self._is_left_split(change) and half.place in FREE:
                    spoiled.add(id(half.old))
        found: dict[str, bytes | None] = {}
        _walk(_survivors(self._top, kept), "", policy, spoiled, found)
        return found

    # -- inside ----------------------------------------------------------------------------------

    def _change(self, entries: list[tuple[Path, Node | None]]) -> None:
        halves = []
        for path, node in entries:
            folder = self._find(path.parent)
            assert isinstance(folder, Dir)
            halves.append(
                Half(
                    folder, path.name, node, folder.current.get(path.name), self._place(path.parent)
                )
            )
        for half in halves:
            _set(half.folder.current, half)
        first, *rest = halves
        if rest and rest[0].folder is first.folder:
            self._changes.append(Change([first]))  # both names in one directory: one sync for both
            self._changes.append(Change(rest))
        else:
            self._changes.append(Change(halves))

    def _is_left_split(self, change: Change) -> bool:
        # Whichever directory of a rename is synced first, in between there are two names or none.
        # Two are harmless if the next thing to happen is the other sync.
        return change.split_at is not None and change.split_at < self._count

    def _place(self, folder: Path) -> str:
        if folder == self._root:
            return ROOT
        return folder.name if folder.parent == self._root else ""

    def _find(self, path: Path) -> Node:
        node: Node = self._top
        for part in path.relative_to(self._base).parts:
            assert isinstance(node, Dir)
            node = node.current[part]
        return node


Tree = dict[str, Any]
"""Name -> (File or Dir, subtree or None)."""


def _set(names: dict[str, Node], half: Half) -> None:
    names.pop(half.name, None)
    if half.node is not None:
        names[half.name] = half.node


def _survivors(folder: Dir, kept: dict[int, list[Half]]) -> Tree:
    names = dict(folder.durable)
    for half in kept.get(id(folder), ()):
        _set(names, half)
    return {
        name: (node, _survivors(node, kept) if isinstance(node, Dir) else None)
        for name, node in names.items()
    }


def _walk(
    tree: Tree, prefix: str, policy: Policy, spoiled: set[int], found: dict[str, bytes | None]
) -> None:
    for name, (node, children) in tree.items():
        path = prefix + name
        # A committed thing that has kept its old name among the slots or attempts as well: the
        # engine overwrites or deletes whatever has such a name. Show at once what that comes to.
        bad = id(node) in spoiled and ("/step-" in path or "/tag" in path)
        if isinstance(node, File):
            data = bytes(node.after(policy))
            found[path] = bytes(len(data)) if bad else data
        else:
            found[path] = None
            if not bad:
                _walk(children, path + "/", policy, spoiled, found)


def build(tree: dict[str, bytes | None], target: Path) -> None:
    """Make such a tree, in the new directory `target`."""
    target.mkdir(parents=True)
    for name, data in tree.items():
        if data is None:
            (target / name).mkdir()
        else:
            (target / name).write_bytes(data)
