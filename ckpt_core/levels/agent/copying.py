"""One copy: a committed step is read, verified, sent, looked at over there, and published.

    with OpenSave(step_path(root, step), files=files) as save:
        sent = send(save, far, how)

Order matters: shard files, a look at what has arrived of them, then the rank manifests, which tell the agents
of other nodes that this part is there; the manifest of the step last, by whoever finds all of them.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from ckpt_core.errors import CkptError
from ckpt_core.layout import FileEntry, Manifest, RankEntry, RankManifest, rank_manifest_name
from ckpt_core.levels.agent.pace import BLOCK_BYTES, Pace
from ckpt_core.levels.agent.sent_before import SentBefore
from ckpt_core.levels.agent.source import OpenSave
from ckpt_core.levels.far.door import Away, Copy, Far

SAMPLE = 0.01
"""Part of the chunks between the first and the last one of a file that are read back."""


class Sent(enum.Enum):
    """How a copy ended."""

    REACHED = "the step is there"
    WAITS = "the parts of other nodes are missing"
    LOST = "another save of it has its place"
    RETIRED = "it was taken away there"


def _nothing(*args: object) -> None:
    pass


@dataclass(frozen=True)
class How:
    """How a copy is sent.

    Attributes:
        pace: of the bytes.
        before: what was sent there before, so that the same files need not be sent again.
        own: no other root sends there, so that this part of a step is all that comes.
        replaces: the attempt that is there now and may be replaced.
        may_publish: called right before; raises where somebody else has the level now.
        progress: told the bytes done.
        travelled: told of the bytes that were sent, and not there already.
        sample: see `SAMPLE`.
    """

    pace: Pace = field(default_factory=lambda: Pace(None))
    replaces: str | None = None
    may_publish: Callable[[], None] = _nothing
    progress: Callable[[int], None] = _nothing
    travelled: Callable[[int], None] = _nothing
    sample: float = SAMPLE
    before: SentBefore = field(default_factory=SentBefore)
    own: bool = False


def send(save: OpenSave, far: Far, how: How) -> Sent:
    """Take what a root has of a save to a level, and publish it if that makes it whole there.

    What is there from an earlier try is not sent again, nor what an earlier save has as well.

    Raises:
        CorruptCheckpoint: the save is damaged here. Nothing of it can be seen there.
        Away: the level did not do as asked, or does not give back what was sent; to be tried again.
        Stopped, or what `may_publish` raises: at once.
    """
    sending = _Sending(save, far, how)
    for entry in save.entries:
        sending.file(entry)
    sending.look()
    for name, data in save.ranks.items():
        sending.rank(name, data)
    how.before.note(save)
    return complete(save, far, how)


def complete(save: OpenSave, far: Far, how: How) -> Sent:
    """Publish a copy whose parts from this root are there, if those from all roots are.

    Raises:
        As `send`.
    """
    manifest: bytes | None = save.manifest_bytes
    if not save.is_whole and not how.own:
        manifest = _assembled(save.manifest, save.copy, far)
    if manifest is None:
        return Sent.WAITS
    how.may_publish()
    done = far.publish(save.copy, manifest, replaces=how.replaces)
    if done:
        return Sent.REACHED
    return Sent.RETIRED if far.was_retired(save.copy) else Sent.LOST


def is_still_there(save: OpenSave, far: Far) -> bool:
    """Whether all that this root sends of a copy lies there: of a level somebody else may clear what waits.

    Raises:
        Away: it cannot be told now.
    """
    there = far.files(save.copy)
    mine = {entry.name: entry.nbytes for entry in save.entries}
    mine |= {name: len(data) for name, data in save.ranks.items()}
    return all(there.get(name) == nbytes for name, nbytes in mine.items())


class _Sending:
    """What is there, and how far the copy is."""

    def __init__(self, save: OpenSave, far: Far, how: How) -> None:
        self._save, self._far, self._how = save, far, how
        self._copy = save.copy
        self._there = far.files(save.copy)
        self._done = 0

    def file(self, entry: FileEntry) -> None:
        if self._there.get(entry.name) == entry.nbytes or self._is_taken_over(entry):
            self._count(entry.nbytes)
        else:
            self._put(entry)

    def _is_taken_over(self, entry: FileEntry) -> bool:
        before = self._how.before.file(self._save, entry)
        if before is None:
            return False
        self._how.pace.let_through(0)
        return self._far.take_over(self._copy, entry.name, entry.nbytes, before=before)

    def _put(self, entry: FileEntry) -> None:
        there = self._far.begun(self._copy, entry.name, entry.nbytes)
        self._far.put(self._copy, entry.name, self._paced(entry, there), entry.nbytes)

    def rank(self, name: str, data: bytes) -> None:
        """Send a rank manifest, and read all of it back."""
        for again in (False, True):
            if again or self._there.get(name) != len(data):
                self._far.put(self._copy, name, iter([memoryview(data)]), len(data))
                self._how.travelled(len(data))
            if self._read(name, 0, len(data)) == xxhash.xxh3_64_hexdigest(data):
                return self._count(len(data))
        raise _differs(self._far, self._copy, name)

    def look(self) -> None:
        """Be sure that the files have arrived: lengths, and the bytes of a sample."""
        there = self._far.files(self._copy)
        for entry in self._save.entries:
            if there.get(entry.name) != entry.nbytes:
                what = f"{entry.name} of {self._copy.target} is not there whole"
                raise Away(f"{self._far.url}: {what}: it is sent again", step=self._copy.step)
            if self._is_sound(entry):
                continue
            # It may have been left by an earlier try, which nobody had looked at yet.
            self._discard(entry)
            self._put(entry)
            if not self._is_sound(entry):
                self._discard(entry)
                raise _differs(self._far, self._copy, entry.name)

    def _discard(self, entry: FileEntry) -> None:
        """Leave nothing that a later try, which looks at another sample, may believe."""
        self._how.before.forget(self._save, entry)
        # Order matters: a rank manifest tells other nodes that the files are there.
        for name in [name for name in self._save.ranks if self._there.pop(name, None) is not None]:
            self._far.discard(self._copy, name)
        self._far.discard(self._copy, entry.name)

    def _is_sound(self, entry: FileEntry) -> bool:
        return all(
            self._read(entry.name, offset, nbytes) == (xxh3 or self._here(entry, offset, nbytes))
            for offset, nbytes, xxh3 in sampled(entry, self._how.sample)
        )

    def _here(self, entry: FileEntry, offset: int, nbytes: int) -> str:
        """The sum of a piece here, where the manifest has none."""
        found, buffer = xxhash.xxh3_64(), memoryview(bytearray(min(nbytes, BLOCK_BYTES)))
        for begin in range(0, nbytes, BLOCK_BYTES):
            block = buffer[: min(BLOCK_BYTES, nbytes - begin)]
            self._save.read_into(entry.name, block, offset + begin)
            found.update(block)
        return found.hexdigest()

    def _read(self, name: str, offset: int, nbytes: int) -> str:
        found = xxhash.xxh3_64()
        for block in self._far.read_blocks(self._copy, name, offset, nbytes):
            self._how.pace.let_through(0)
            found.update(block)
        return found.hexdigest()

    def _paced(self, entry: FileEntry, there: int) -> Iterator[memoryview]:
        """Args: there: bytes at the beginning that do not travel."""
        before = self._done
        for block in self._save.blocks(entry, self._how.pace.block_bytes):
            there -= len(block)
            travels = min(len(block), max(0, -there))
            self._how.pace.let_through(travels)
            yield block
            self._how.travelled(travels)
            self._count(len(block))
        self._done = before + entry.nbytes

    def _count(self, nbytes: int) -> None:
        self._done += nbytes
        self._how.progress(self._done)


def sampled(entry: FileEntry, part: float) -> Iterator[tuple[int, int, str | None]]:
    """Offset, length and sum of the chunks to look at: the first, the last, and a part of the others."""
    offset, last, dice = 0, len(entry.chunks) - 1, random.SystemRandom()
    for index, chunk in enumerate(entry.chunks):
        if index in (0, last) or dice.random() < part:
            yield offset, chunk.nbytes, chunk.xxh3
        offset += chunk.nbytes


# -- several nodes ---------------------------------------------------------------------------------


def _assembled(mine: Manifest, copy: Copy, far: Far) -> bytes | None:
    """The manifest over the ranks of all nodes; None while one of them is missing."""
    there = far.files(copy)
    names = [rank_manifest_name(rank) for rank in range(mine.world_size)]
    if any(name not in there for name in names):
        return None
    entries, state_bytes = [], 0
    for rank, name in enumerate(names):
        data = far.read(copy, name, there[name])
        found = _decoded(data, far, name)
        for entry in found.files:
            if there.get(entry.name) != entry.nbytes:
                return None
        entries.append(RankEntry(rank, name, len(data), xxhash.xxh3_64_hexdigest(data)))
        state_bytes += _state_bytes(found)
    return Manifest(
        mine.step,
        mine.attempt,
        mine.created_unix_s,
        tuple(entries),
        state_bytes,
        mine.world_size,
        mine.version,
        mine.directory,
        mine.pointer,
    ).encode()


def _decoded(data: bytes, far: Far, name: str) -> RankManifest:
    try:
        return RankManifest.decode(data, path=Path(name))
    except CkptError as exc:
        raise Away(f"{far.url}: {exc}: the node that sent it sends it again") from exc


def _state_bytes(rank: RankManifest) -> int:
    if rank.version > 2:
        return sum(file.nbytes for file in rank.files)
    return sum(leaf.nbytes for leaf in rank.leaves) + sum(part.slice.nbytes for part in rank.slices)


def _differs(far: Far, copy: Copy, name: str) -> Away:
    return Away(
        f"{far.url}: {name} of {copy.target} reads back otherwise than it was sent, twice. The step is not "
        "published there, and is safe here. Look for a disk or a network that damages bytes",
        step=copy.step,
    )
