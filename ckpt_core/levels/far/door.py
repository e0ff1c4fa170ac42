"""`Far`: the door to one further level. A directory and an object store answer the same calls.

    far = open_far(url, files=files)
    far.steps()                                what is whole there: step -> attempt
    far.put(copy, name, blocks, nbytes)        one file of a copy that is under way
    far.publish(copy, manifest, replaces=None) commit point: the step is there, or it is not
    far.retire([target])                       the manifest first, then the files

Idea: what is being sent lies where only its own attempt writes, so that whoever sends a file twice, or
late, sends the bytes that belong there; and a step is whole if and only if its manifest is in its place,
which one atomic act puts there. So agents of several machines need not talk to one another.

Where a level keeps files is its own business: a directory has them in `step-<N>/` once they are published, an
object store in `step-<N>/<8 hex of the attempt>/` from the first on, with the manifest in `step-<N>/`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Self

from ckpt_core.errors import CkptError
from ckpt_core.types import step_dir_name

_BLOCK_BYTES = 1 << 20


class Away(CkptError):
    """A level could not be reached or did not do as asked: nothing is lost, and it may be tried again.

    The text names the level, what was asked of it, what it said, and what to do; never a credential.

    Attributes:
        hopeless: trying again does not help before somebody does something (permission, no such bucket).
    """

    def __init__(self, message: str, *, hopeless: bool = False, step: int | None = None) -> None:
        super().__init__(message, step=step)
        self.hopeless = hopeless


class Conflict(CkptError):
    """Somebody else has written a word meanwhile."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One save: of a step, or of a directory of files.

    Attributes:
        step: its number.
        attempt: "<step, 12 digits>-<8 hex digits>", as the manifest has it.
        directory: name of the directory of files; None: it is a step.
    """

    step: int
    attempt: str
    directory: str | None = None

    @classmethod
    def of(cls, attempt: str, directory: str | None = None) -> Self:
        """The save of an attempt, which names its step."""
        return cls(int(attempt.partition("-")[0]), attempt, directory)

    @property
    def target(self) -> str:
        """The name in the root under which it is published."""
        return step_dir_name(self.step) if self.directory is None else self.directory

    @property
    def folder(self) -> str:
        """What tells it from other saves of the same target: the hex digits of its attempt."""
        return self.attempt.rpartition("-")[2]


@dataclass(frozen=True, slots=True)
class Word:
    """A small file of a level that several may write, and which writing of it this is.

    Attributes:
        data: its bytes.
        tag: changes with each writing.
    """

    data: bytes
    tag: str


class Readable(ABC):
    """What steps are brought from. Thread-safe. Every call ends within its deadlines, or raises `Away`."""

    url: str
    """Without anything secret."""

    @abstractmethod
    def steps(self) -> dict[int, str]:
        """The steps that are whole there, ascending, with their attempts.

        A step whose manifest cannot be understood is left out, with a warning in the log.
        """

    @abstractmethod
    def directories(self) -> dict[str, Copy]:
        """The directories of files that are whole there, by their names, likewise."""

    @abstractmethod
    def manifest(self, target: str) -> bytes | None:
        """The bytes of `manifest.json` of what has that name; None when nothing whole has."""

    @abstractmethod
    def files(self, copy: Copy) -> dict[str, int]:
        """Files of a copy that are there whole, published or not: name -> length; no `manifest.json`."""

    @abstractmethod
    def read_into(self, copy: Copy, name: str, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from a file of a copy, from `offset` on.

        Raises:
            Away: also when the file is not there, or ends before.
        """

    def read_blocks(self, copy: Copy, name: str, offset: int, nbytes: int) -> Iterator[memoryview]:
        """A range of a file of a copy, in order, as it comes: each block is to be used before the next.

        Raises:
            Away: as `read_into`, once the blocks before were given.
        """
        buffer = memoryview(bytearray(min(_BLOCK_BYTES, nbytes)))
        for at in range(offset, offset + nbytes, _BLOCK_BYTES):
            block = buffer[: min(_BLOCK_BYTES, offset + nbytes - at)]
            self.read_into(copy, name, block, at)
            yield block

    def places(self, copy: Copy, name: str) -> Iterable[Readable]:
        """What a file of a copy can be read from anew where its bytes are wrong: each place that has it."""
        return (self,)

    def read(self, copy: Copy, name: str, nbytes: int) -> bytes:
        """The first bytes of a file of a copy: a small file whole. Raises as `read_into`."""
        data = bytearray(nbytes)
        self.read_into(copy, name, memoryview(data), 0)
        return bytes(data)

    def close(self) -> None:
        """Let go of connections. Idempotent."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Far(Readable):
    """One further level. Thread-safe. Every call ends within the deadlines of its level, or raises `Away`."""

    mounted: str = ""
    """Where the filesystem that a directory is to be on is mounted; "": not known yet, or no directory."""

    # -- writing ---------------------------------------------------------------------------------

    @abstractmethod
    def put(self, copy: Copy, name: str, blocks: Iterable[memoryview], nbytes: int) -> None:
        """Write a file of a copy; once this returns it is there, whole and durable.

        Args:
            blocks: its bytes in order, read while they are sent; each is used before the next is asked for,
                and may be overwritten then, unless it is read-only. What it raises comes out of this call,
                and no file is there.
        """

    def take_over(self, copy: Copy, name: str, nbytes: int, *, before: tuple[Copy, str]) -> bool:
        """Have a file of a copy be one that is there already, of a copy that is whole, without sending it.

        Args:
            before: that copy, and the name of the file in it, which has the same bytes.

        Returns:
            Whether it is there now, durably; False: it is to be sent.
        """
        return False

    @abstractmethod
    def publish(self, copy: Copy, manifest: bytes, *, replaces: str | None = None) -> bool:
        """Make a copy whose files are all there a step (a directory) of the level. The commit point.

        Args:
            replaces: the attempt that may be there now and be replaced; None: none may.

        Returns:
            Whether this very copy is there, by this call or by another one; False when another attempt
            has its place.
        """

    def was_retired(self, copy: Copy) -> bool:
        """Whether a copy that was refused was there and has been taken away, so that it stays away."""
        return False

    @abstractmethod
    def point(self, pointer: str, directory: str) -> None:
        """Let the file `pointer` name a directory of files that is there, durably and at once."""

    @abstractmethod
    def pointers(self) -> dict[str, str]:
        """The pointers that are there, and what each names."""

    @abstractmethod
    def retire(self, targets: Collection[str]) -> None:
        """Take steps (directories) away: first they are no steps any more, durably, then their bytes go."""

    def drop(self, copy: Copy) -> None:
        """Give back the space of a copy that is given up, where that is short; `sweep` finds what stays."""
        return

    @abstractmethod
    def discard(self, copy: Copy, name: str) -> None:
        """Take away a file of a copy that nobody can see yet, as its bytes are wrong; it may have gone."""

    def take_up(self, mine: Callable[[str], bool]) -> None:
        """What the caller's earlier lives had begun to send, and nobody can see: go on with it where that can
        be done, or give it up. Never raises.

        Args:
            mine: whether nobody else sends a file, "<target>/<folder>/<name>".
        """
        return

    def begun(self, copy: Copy, name: str, nbytes: int) -> int:
        """How many bytes at a file's beginning are there: `put`, which is given all, sends the rest."""
        return 0

    def give_up(self) -> None:
        """Nothing is to be sent now: give up what was to be gone on with. Never raises."""
        return

    @abstractmethod
    def sweep(self, keep: Collection[Copy]) -> None:
        """Delete what was sent for copies that nobody will publish any more.

        Args:
            keep: copies that may still be sent by whoever calls; others' are kept while they are young.
        """

    # -- words: the run, its session, pins ----------------------------------------------------------

    @abstractmethod
    def read_word(self, name: str) -> Word | None:
        """A small file beside the steps; None when it is not there."""

    @abstractmethod
    def write_word(self, name: str, data: bytes, *, over: str | None) -> str:
        """Write a word durably, if it still has the tag `over` (None: if it is not there); the new tag.

        Raises:
            Conflict: it has another tag, or is (not) there.
        """

    @abstractmethod
    def pins(self, among: Collection[int] | None = None) -> frozenset[int]:
        """Steps that retention must keep there; with `among` only those of these, which asks for less."""

    @abstractmethod
    def pin(self, step: int, pinned: bool) -> None:
        """Set or take a pin, durably."""

    # -- life ------------------------------------------------------------------------------------

    @abstractmethod
    def check(self) -> None:
        """Be sure that steps can be kept there: reachable, writable, and its conditions are honoured.

        Leaves nothing behind. Called when a Checkpointer is made, and by `ckpt-core doctor`.

        Raises:
            ConfigError: what is wrong and what to do (bucket, permission, credentials, conditions ignored).
            Away: it cannot be told now.
        """
