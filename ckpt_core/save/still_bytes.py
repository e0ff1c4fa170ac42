"""Compare live leaves with the bytes of a still file: the stager hashes them, and idle writers help.

    stager   asks writers for help -> takes piece after piece -------------> waits for those who have begun
    writer                      comes -> takes piece after piece -> none is left
    writer that comes late                                                         none is left: reads nothing

Danger: what is read is training's own memory, which nobody here owns. So the barrier stays shut until the
last helper has ended: the stager waits for them inside its own reading of live leaves; and where it can wait
no longer, each of them counts as a reader of the snapshot by itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
import xxhash

from ckpt_core.errors import StagingError
from ckpt_core.persist import HeldFile
from ckpt_core.snapshot import CopyStreams, Snapshot, StageItem
from ckpt_core.state import lies_at, memory_at, memory_of
from ckpt_core.system.threads import Monitor

_SCRATCH_BYTES = 8 * 2**20
_NO_BYTES = bytes(4096)


class LiveBytes:
    """A file as it would be written now: header, leaves, and zeros between them and to its end.

    Whatever thread asks for them, the leaves stay alive as long as this does. Those of a device are read by
    the stager alone.

    Args:
        header: at its start.
        items: leaves in file order.
    """

    def __init__(self, header: bytes, items: Sequence[StageItem], streams: CopyStreams) -> None:
        self._header = memoryview(header)
        self._items = [item for item in items if item[2]]
        self._offsets = [offset for _, offset, _ in self._items]
        self._streams = streams
        self.on_host = not streams.devices.any_of(tensor for tensor, _, _ in self._items)

    def runs(self, begin: int, end: int) -> Iterator[memoryview]:
        """Bytes begin .. end of the file, in order; each run is read before the next is asked for."""
        head = self._header[begin:end]
        if head:
            yield head
        cursor = begin + len(head)
        for index in range(max(bisect_right(self._offsets, cursor) - 1, 0), len(self._items)):
            tensor, offset, nbytes = self._items[index]
            if offset >= end:
                break
            yield from _zeros(offset - cursor)
            start, stop = max(offset, cursor), min(offset + nbytes, end)
            if start < stop:
                yield from bytes_of(tensor, start - offset, stop - start, self._streams)
                cursor = stop
        yield from _zeros(end - cursor)


class Comparison:
    """Which pieces of a file are others now. `find` is called once; `help` by any thread, at any time.

    Args:
        snapshot: whose leaves are read.
        deadline: on the monotonic clock; no wait lasts longer.
    """

    def __init__(
        self, live: LiveBytes, file: HeldFile, snapshot: Snapshot, *, deadline: float
    ) -> None:
        self._file, self._snapshot, self._deadline = file, snapshot, deadline
        self._ends = list(accumulate(file.sizes))
        self._changed = Monitor()
        # None: nobody may begin, or go on. A helper that comes late holds no leaf meanwhile.
        self._live: LiveBytes | None = live
        self._next = 0
        self._helpers = 0
        self._found: list[int] = []
        self._error: BaseException | None = None

    def find(self) -> list[int]:
        """Numbers of these pieces; nobody reads a leaf once it returns. Called inside a reading of them.

        Raises:
            StagingError: the deadline passed, and a helper still reads; the snapshot counts it.
            BaseException: what a helper has failed with.
        """
        try:
            self._take_pieces()
        finally:
            self._end()
        if self._error is not None:
            raise self._error
        return sorted(self._found)

    @torch.no_grad()
    def help(self) -> None:
        """Take pieces until none is left; an error is for `find` to raise."""
        with self._changed.lock:
            if self._live is None or not self._snapshot.enter_copy():
                return
            self._helpers += 1
        error: BaseException | None = None
        try:
            self._take_pieces()
        except BaseException as exc:
            # It belongs to the checkpoint, and not to the thread that helps.
            error = exc
        self._snapshot.leave_copy()
        with self._changed.lock:
            self._helpers -= 1
            self._error = self._error or error
            if error is not None:
                self._live = None
            self._changed.notify_all()

    # -- inside ----------------------------------------------------------------------------------

    def _take_pieces(self) -> None:
        while True:
            with self._changed.lock:
                live, piece = self._live, self._next
                if live is None or piece == len(self._ends):
                    return
                self._next += 1
            digest, end = xxhash.xxh3_128(), self._ends[piece]
            for run in live.runs(end - self._file.sizes[piece], end):
                digest.update(run)
            if digest.digest() != self._file.digests[piece]:
                with self._changed.lock:
                    self._found.append(piece)

    def _end(self) -> None:
        """Nobody begins from here on; wait for who has."""
        with self._changed.lock:
            self._live = None
        if not self._changed.wait_for(lambda: self._helpers == 0, deadline=self._deadline):
            raise StagingError(
                f"step {self._snapshot.step} was not staged before the deadline: its leaves are still being "
                f"compared. Earlier steps are untouched",
                step=self._snapshot.step,
            )


def bytes_of(
    tensor: torch.Tensor, begin: int, nbytes: int, streams: CopyStreams
) -> Iterator[memoryview]:
    """Some of the row-major bytes of a leaf, which are whole elements of one that is strided."""
    devices = streams.devices
    if devices.is_flat(tensor):
        yield memory_at(lies_at(tensor) + begin, nbytes)
        return
    most = _SCRATCH_BYTES // tensor.element_size() * tensor.element_size()
    # Of this call, and so of this thread alone.
    scratch = torch.empty(min(most, nbytes), dtype=torch.uint8, device="cpu")
    for done in range(0, nbytes, most):
        target = scratch[: min(most, nbytes - done)]
        streams.copy(tensor, begin + done, target, into=set())
        if devices.of(tensor) is not None:
            streams.settle()
        yield memory_of(target)


def _zeros(count: int) -> Iterator[memoryview]:
    while count > 0:
        run = memoryview(_NO_BYTES)[:count]
        yield run
        count -= len(run)
