"""A lost node's part, as a level that it is brought from: each piece made of k others when it is asked for.

    with ParityFar(run, part, nodes) as far:
        far.steps()                  that can be rebuilt from what is left
        far.read_blocks(...)         bytes of files that nobody has

What is read of others is compared with the sums that lie with the parity, piece by piece, and what differs is
not used: another node is asked in its place, if there is one. What is made of it is compared by whoever asks,
with the sums of the save.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from ckpt_core.errors import CkptError, NotCommitted
from ckpt_core.levels.far.door import Away, Copy, Readable
from ckpt_core.levels.parity.codes import Bytes, Code, combine
from ckpt_core.levels.parity.objects import Kept, Sums, damaged, step_of, stripe_name
from ckpt_core.levels.parity.parts import Filling, Part, plain, wrong
from ckpt_core.types import parse_step_dir

logger = logging.getLogger("ckpt_core")

_TRIES = 2
"""What is wrong may have happened on the way."""


@dataclass
class Node:
    """Another node, which may have kept something, in one place or in several: then it is there as often.

    Attributes:
        part: the name of what it holds.
        root: its steps; None: they are lost.
        kept: its parity; None: it is lost.
        saves: its steps and their attempts, once it was asked.
        objects: its parity, by attempt, likewise.
        away: why it did not answer.
    """

    part: str
    root: Readable | None
    kept: Readable | None
    saves: dict[int, str] = field(default_factory=dict)
    objects: dict[str, Kept] = field(default_factory=dict)
    away: Away | None = None

    def ask(self, part: str) -> None:
        """Find out what it has for a part."""
        self.away = None
        try:
            self.saves = {} if self.root is None else self.root.steps()
            there = {} if self.kept is None else self.kept.directories()
            found: dict[str, Kept] = {}
            for copy in there.values():
                if step_of(copy.target) is not None:
                    kept = self.objects.get(copy.attempt) or self._read(copy)
                    if kept is not None and part in kept.about.parts:
                        found[copy.attempt] = kept
            self.objects = found
        except Away as exc:
            self.away = exc

    def _read(self, copy: Copy) -> Kept | None:
        assert self.kept is not None
        try:
            return Kept.read(self.kept, copy)
        except CkptError as exc:
            if not damaged(exc):
                raise
            logger.warning("parity at %s is not used: %s", self.kept.url, exc)
            return None


@dataclass(frozen=True)
class _Save:
    """A save that can be rebuilt.

    Attributes:
        about: as one of its directories of parity says.
        part: the lost one.
        number: of that in its group.
        roots: nodes that hold their own part of it, by their number in the group.
        kept: what the nodes keep of its parity, likewise.
    """

    about: Kept
    part: Part
    number: int
    roots: dict[int, Node]
    kept: dict[int, Kept]


class ParityFar(Readable):
    """What one node held, rebuilt.

    Args:
        url: what it is called.
        part: whose.
        nodes: those that may have something for it, itself not among them.
    """

    def __init__(self, url: str, part: str, nodes: Sequence[Node]) -> None:
        self.url = url
        self._part, self._nodes = part, list(nodes)
        self._lock = threading.Lock()
        self._saves: dict[str, _Save] | None = None
        self._parts: dict[tuple[str, str], Part] = {}
        self._sums: dict[tuple[str, int, int], Sums] = {}

    # -- what there is -----------------------------------------------------------------------------

    def steps(self) -> dict[int, str]:
        """As `Far.steps`.

        Raises:
            Away: a node does not answer, and with what it has there may be a newer one.
        """
        saves = self._look()
        found = {save.about.about.save.step: attempt for attempt, save in saves.items()}
        away = [node.away for node in self._nodes if node.away is not None]
        seen = max([step for node in self._nodes for step in node.saves], default=-1)
        if away and seen > max(found, default=-2):
            raise away[0]
        return dict(sorted(found.items()))

    def directories(self) -> dict[str, Copy]:
        """None: parity is kept of steps."""
        return {}

    def manifest(self, target: str) -> bytes | None:
        """As `Far.manifest`."""
        step = parse_step_dir(target)
        for save in self._known().values():
            if save.about.about.save.step == step:
                return save.part.raw
        return None

    def files(self, copy: Copy) -> dict[str, int]:
        """As `Far.files`."""
        part = self._save(copy).part
        names = {entry.name: entry.nbytes for entry in part.entries}
        return {**names, **{name: len(data) for name, data in part.ranks.items()}}

    # -- bytes ---------------------------------------------------------------------------------------

    def read_into(self, copy: Copy, name: str, buffer: memoryview, offset: int) -> None:
        """As `Far.read_into`; also CorruptCheckpoint, where too much is damaged."""
        done = 0
        for block in self.read_blocks(copy, name, offset, len(buffer)):
            buffer[done : done + len(block)] = block
            done += len(block)

    def read_blocks(self, copy: Copy, name: str, offset: int, nbytes: int) -> Iterator[memoryview]:
        """As `Far.read_blocks`; also CorruptCheckpoint, where too much is damaged."""
        save = self._save(copy)
        part = save.part
        if name in part.ranks:
            yield memoryview(part.ranks[name])[offset : offset + nbytes]
            return
        number = next((n for n, one in enumerate(part.entries) if one.name == name), None)
        if number is None or offset + nbytes > part.entries[number].nbytes:
            text = f"{self.url}: {name} ends before byte {offset + nbytes}"
            raise Away(text, step=copy.step)
        yield from self._range(save, part.starts[number] + offset, nbytes)

    def _range(self, save: _Save, begin: int, nbytes: int) -> Iterator[memoryview]:
        """A range of the part, block by block."""
        about = save.about.about
        cuts, stripes = about.cuts[save.number], about.group.shape.covering(save.number)
        end = begin + nbytes
        while begin < end:
            number = bisect_right(cuts, begin, 0, len(stripes)) - 1
            last = min(end, cuts[number + 1])
            stripe = _Stripe(self, save, stripes[number])
            yield from stripe.blocks(begin - cuts[number], last - cuts[number])
            begin = last

    # -- inside --------------------------------------------------------------------------------------

    def part_of(self, kept: Kept, name: str) -> Part:
        """The manifests of a node, as they lie with some parity; read once."""
        key = (kept.copy.attempt, name)
        if key not in self._parts:
            self._parts[key] = kept.part(name)
        return self._parts[key]

    def sums(self, save: _Save, stripe: int, node: int) -> Sums:
        """The sums of a stripe that lie with a node; read once."""
        key = (save.about.copy.attempt, stripe, node)
        if key not in self._sums:
            self._sums[key] = save.kept[node].sums(stripe)
        return self._sums[key]

    def _known(self) -> dict[str, _Save]:
        return self._look() if self._saves is None else self._saves

    def _save(self, copy: Copy) -> _Save:
        found = self._known().get(copy.attempt)
        if found is None:
            raise Away(f"{self.url}: {copy.target} cannot be rebuilt", step=copy.step)
        return found

    def _look(self) -> dict[str, _Save]:
        """Ask all nodes, and find out what can be rebuilt."""
        with self._lock:
            count = max(1, len(self._nodes))
            with ThreadPoolExecutor(count, thread_name_prefix="ckpt-parity") as threads:
                list(threads.map(lambda node: node.ask(self._part), self._nodes))
            about = {
                attempt: kept for node in self._nodes for attempt, kept in node.objects.items()
            }
            found: dict[str, _Save] = {}
            for kept in about.values():
                with suppress(NotCommitted):
                    save = self._rebuilt(kept)
                    attempt = kept.about.attempt
                    if attempt not in found or len(found[attempt].kept) < len(save.kept):
                        found[attempt] = save
            newest: dict[int, _Save] = {}
            for save in found.values():
                # Of two saves of one step, the one that more nodes hold.
                step = save.about.about.save.step
                if step not in newest or len(newest[step].roots) < len(save.roots):
                    newest[step] = save
            self._saves = {save.about.about.attempt: save for save in newest.values()}
            return self._saves

    def _rebuilt(self, kept: Kept) -> _Save:
        """What can be made of it. Raises NotCommitted."""
        about, copy = kept.about, kept.copy
        numbers = {part: number for number, part in enumerate(about.parts)}
        mine = numbers[self._part]
        here = [(numbers[node.part], node) for node in self._nodes if node.part in numbers]
        step = about.save.step
        roots = {n: node for n, node in here if node.saves.get(step) == about.attempt}
        objects = {
            n: node.objects[copy.attempt] for n, node in here if copy.attempt in node.objects
        }
        shape = about.group.shape
        for stripe in shape.covering(mine):
            data = [n for n in shape.data(stripe) if n in roots]
            parity = [n for n in shape.parity(stripe) if n in objects]
            if len(data) + len(parity) < shape.k or not parity:
                raise NotCommitted(f"too little is left of step {step}", step=step)
        for one in objects.values():
            try:
                part = self.part_of(one, self._part)
                return _Save(one, part, mine, roots, objects)
            except CkptError as exc:
                logger.warning("parity at %s is not used: %s", one.far.url, exc)
        raise NotCommitted(f"no manifest of step {step} is left", step=step)

    def close(self) -> None:
        """As `Readable.close`."""
        for node in self._nodes:
            for far in (node.root, node.kept):
                if far is not None:
                    far.close()


@dataclass
class _Source:
    """A block that is read: that of a node's data, or its parity.

    Attributes:
        number: in the code.
        node: in the group.
    """

    number: int
    node: int
    filling: Filling | None = None
    at: int = -1


class _Stripe:
    """One stripe of a save, of which the block of one node is rebuilt. For one thread."""

    def __init__(self, far: ParityFar, save: _Save, stripe: int) -> None:
        self._far, self._save, self._stripe = far, save, stripe
        self._about = save.about.about
        shape = self._about.group.shape
        self._code = Code(shape.k, shape.m)
        data, parity = shape.data(stripe), shape.parity(stripe)
        self._wanted = data.index(save.number)
        self._keepers = [node for node in parity if node in save.kept]
        self._free = [_Source(n, node) for n, node in enumerate(data) if node in save.roots]
        self._free += [_Source(shape.k + parity.index(node), node) for node in self._keepers]
        self._used: list[_Source] = []
        self._errors: list[CkptError] = []
        size = min(self._about.piece_bytes, self._about.block_bytes)
        self._buffers = [np.zeros(size, np.uint8) for _ in range(shape.k + 1)]

    def blocks(self, begin: int, end: int) -> Iterator[memoryview]:
        """A range of the lost block. Each is to be used before the next. Raises Away, CorruptCheckpoint."""
        size = self._about.piece_bytes
        last = -(-end // size)
        for number in range(begin // size, last):
            first, behind = self._about.piece(number)
            piece = self._rebuilt(number, last)
            yield piece.data[max(begin, first) - first : min(end, behind) - first]

    def _rebuilt(self, piece: int, last: int) -> Bytes:
        begin, end = self._about.piece(piece)
        views = [buffer[: end - begin] for buffer in self._buffers]
        got: list[_Source] = []
        while len(got) < self._code.k:
            source = self._next(got)
            if self._read(source, piece, last, views[len(got)]):
                got.append(source)
            else:
                self._used = [one for one in self._used if one is not source]
        coefficients = self._code.coefficients([one.number for one in got], self._wanted)
        combine(coefficients, views[:-1], views[-1])
        return views[-1]

    def _next(self, got: Sequence[_Source]) -> _Source:
        """A source that this piece was not read from yet; a new one where the others have failed."""
        waiting = [one for one in self._used if all(one is not other for other in got)]
        if waiting:
            return waiting[0]
        if not self._free:
            away = [error for error in self._errors if not damaged(error)]
            raise (away or self._errors)[-1]
        self._used.append(self._free.pop(0))
        return self._used[-1]

    def _read(self, source: _Source, piece: int, last: int, into: Bytes) -> bool:
        """Whether a piece came, and is what was there when the parity was made."""
        for _ in range(_TRIES):
            try:
                if source.filling is None or source.at != piece:
                    source.filling = Filling(self._bytes(source, piece, last))
                source.filling.fill(into.data)
                source.at = piece + 1
                self._compare(source, piece, into)
                return True
            except CkptError as exc:
                source.filling = None
                error = exc
        logger.warning("step %d is rebuilt without a node: %s", self._about.save.step, error)
        self._errors.append(error)
        return False

    def _compare(self, source: _Source, piece: int, got: Bytes) -> None:
        k, found = self._code.k, xxhash.xxh3_64_intdigest(got.data)
        # What lies with the parity itself, or with any that is left.
        keeper = source.node if source.number >= k else self._sums_keeper()
        expected = self._far.sums(self._save, self._stripe, keeper).of(min(source.number, k), piece)
        if found != expected:
            far = self._where(source)
            path = Path(far.url) / f"piece {piece} of stripe {self._stripe}"
            step = self._about.save.step
            raise wrong(path, f"xxh3 {expected:016x}", f"xxh3 {found:016x}", step)

    def _sums_keeper(self) -> int:
        error: CkptError | None = None
        for node in self._keepers:
            try:
                self._far.sums(self._save, self._stripe, node)
                return node
            except CkptError as exc:
                error = exc
        assert error is not None
        raise error

    def _where(self, source: _Source) -> Readable:
        if source.number < self._code.k:
            root = self._save.roots[source.node].root
            assert root is not None  # it has the save
            return root
        return self._save.kept[source.node].far

    def _bytes(self, source: _Source, piece: int, last: int) -> Iterator[memoryview]:
        """The bytes of a source from a piece on."""
        about, far = self._about, self._where(source)
        begin, end = about.piece(piece)[0], about.piece(last - 1)[1]
        if source.number >= self._code.k:
            kept = self._save.kept[source.node]
            yield from far.read_blocks(kept.copy, stripe_name(self._stripe), begin, end - begin)
            return
        first, behind = about.block(source.node, self._stripe)
        part = self._far.part_of(self._save.about, about.parts[source.node])
        if first + begin < behind:
            yield from plain(far, about.save, part, first + begin, min(first + end, behind))
