"""Objects that come in parts, several at once: each part is written where it belongs in the one file.

Where that is follows from the length that all parts but the last one have. A part that comes before that is
known, or once more, has a file of its own until the end: no two requests ever write the same bytes.
Each part is durable before it is acknowledged, so the end, which the client waits for no longer than for any
request, finds next to nothing left to write.
What is known of uploads is in memory: a server that is started anew knows none, and the client begins anew.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_core.levels.serving.tree import Condition, Tree
from ckpt_core.levels.serving.wire import Refusal
from ckpt_core.system.files import Files

UNIT_BYTES = 8 << 20
"""A part whose length is a multiple of it is not the last one, as far as can be told when it comes first."""

MOST_PARTS = 10_000
MOST_UPLOADS = 1000
FORGOTTEN_S = 24 * 3600.0
_QUIET_S = 10.0
_COPY_BYTES = 1 << 20
_ENDED = 1000


@dataclass(frozen=True)
class PartPlace:
    """Where a request writes a part: `at` in the upload's own file; or at the start of a file aside."""

    fd: int
    at: int
    aside: Path | None = None


@dataclass(frozen=True)
class _Part:
    place: PartPlace
    nbytes: int
    tag: str


@dataclass
class Upload:
    """One object on its way.

    Attributes:
        unit: the length of every part but the last one; 0: not known yet.
        given: parts that somebody was told to write in the upload's own file.
        busy: requests that are at it now.
    """

    name: str
    key: str
    path: Path
    fd: int
    began_s: float
    unit: int = 0
    given: set[int] = field(default_factory=set)
    parts: dict[int, _Part] = field(default_factory=dict)
    busy: int = 0
    ended: bool = False
    moved_s: float = field(default_factory=time.monotonic)


class Uploads:
    """Those that have begun and not ended. Thread-safe."""

    def __init__(self, tree: Tree, *, files: Files) -> None:
        self._tree, self._files = tree, files
        self._changed = threading.Condition()
        self._begun: dict[str, Upload] = {}
        self._ended: OrderedDict[str, tuple[str, str]] = OrderedDict()
        """Key and tag of the last ones: an answer may be lost, and asked for again."""

    def begin(self, key: str) -> str:
        """A new one; its name. Raises Refusal."""
        self._tree.check_key(key)
        self._forget()
        if len(self._begun) >= MOST_UPLOADS:
            raise Refusal(507, "StorageFull")
        path, fd = self._tree.begin()
        upload = Upload(secrets.token_hex(16), key, path, fd, time.time())
        with self._changed:
            self._begun[upload.name] = upload
        return upload.name

    def begun(self) -> list[Upload]:
        """All of them, the oldest first."""
        with self._changed:
            return sorted(self._begun.values(), key=lambda one: one.began_s)

    def place(self, name: str, key: str, number: int, nbytes: int) -> tuple[Upload, PartPlace]:
        """Where a part is to be written; `arrived` or `failed` is called afterwards.

        Raises:
            Refusal: there is no such upload, or it can have no such part.
        """
        if not 1 <= number <= MOST_PARTS:
            raise Refusal(400, "InvalidArgument")
        with self._changed:
            upload = self._used(name, key)
            if not upload.unit and nbytes and nbytes % UNIT_BYTES == 0:
                upload.unit = nbytes
            if upload.unit and nbytes <= upload.unit and number not in upload.given:
                upload.given.add(number)
                return upload, PartPlace(upload.fd, (number - 1) * upload.unit)
        try:
            path, fd = self._tree.begin()
        except BaseException:
            self._let_go(upload)
            raise
        return upload, PartPlace(fd, 0, path)

    def arrived(self, upload: Upload, number: int, place: PartPlace, nbytes: int, tag: str) -> None:
        """A part is there, and durable: it takes the place of one that came before."""
        with self._changed:
            before = upload.parts.get(number)
            upload.parts[number] = _Part(place, nbytes, tag)
            upload.moved_s = time.monotonic()
        if before is not None:
            self._drop(before.place)
        self._let_go(upload)

    def failed(self, upload: Upload, place: PartPlace) -> None:
        """A part did not come."""
        self._drop(place)
        self._let_go(upload)

    def end(self, name: str, key: str, parts: Sequence[tuple[int, str]], over: Condition) -> str:
        """Make one object of the parts, durably; its tag. Asked once more it says the same.

        Raises:
            Refusal: there is no such upload; or these are not its parts; or as `Tree.publish`.
        """
        with self._changed:
            done = self._ended.get(name)
            if done is not None and done[0] == key:
                return done[1]
            upload = self._used(name, key)
        try:
            self._fence(upload)
            self._join(upload, parts)
            tag = self._tree.publish(upload.path, key, over)
        except BaseException:
            upload.ended = False
            self._let_go(upload)
            raise
        with self._changed:
            self._ended[name] = key, tag
            while len(self._ended) > _ENDED:
                self._ended.popitem(last=False)
        self._remove(upload)
        self._let_go(upload)
        return tag

    def abort(self, name: str, key: str) -> None:
        """Give one up. Raises Refusal: there is none."""
        with self._changed:
            upload = self._used(name, key)
            upload.ended = True
        self._remove(upload)
        self._let_go(upload)

    def close(self) -> None:
        """Give up all of them."""
        for upload in self.begun():
            with suppress(Refusal):
                self.abort(upload.name, upload.key)

    # -- inside ----------------------------------------------------------------------------------

    def _fence(self, upload: Upload) -> None:
        """From now on nobody else writes: a part that was given up by its client may still be coming."""
        with self._changed:
            upload.ended = True
            if not self._changed.wait_for(lambda: upload.busy == 1, _QUIET_S):
                raise Refusal(503, "SlowDown")

    def _join(self, upload: Upload, asked: Sequence[tuple[int, str]]) -> None:
        """Put what lies aside where it belongs."""
        numbers = [number for number, _ in asked]
        if not numbers or numbers != sorted(upload.parts):
            raise Refusal(400, "InvalidPart")
        at, moved = 0, False
        for number, tag in asked:
            part = upload.parts[number]
            if tag.strip('"') != part.tag.strip('"'):
                raise Refusal(400, "InvalidPart")
            if part.place.aside is not None:
                self._move(part, upload.fd, at)
                moved = True
            elif part.place.at != at:
                raise Refusal(400, "InvalidPart")
            at += part.nbytes
        # Invariant: every byte up to the end is of a part that has arrived, and none is behind it.
        if os.fstat(upload.fd).st_size != at:
            raise Refusal(400, "InvalidPart")
        if moved:
            self._tree.sync(upload.fd)

    def _move(self, part: _Part, fd: int, at: int) -> None:
        buffer = memoryview(bytearray(min(_COPY_BYTES, part.nbytes)))
        for offset in range(0, part.nbytes, _COPY_BYTES):
            block = buffer[: min(_COPY_BYTES, part.nbytes - offset)]
            if self._files.fill(part.place.fd, block, offset) != len(block):
                raise Refusal(500, "InternalError")
            self._tree.write(fd, block, at + offset)

    def _used(self, name: str, key: str) -> Upload:
        upload = self._begun.get(name)
        if upload is None or upload.key != key or upload.ended:
            raise Refusal(404, "NoSuchUpload")
        upload.busy += 1
        return upload

    def _let_go(self, upload: Upload) -> None:
        """Its files are closed when nobody writes to them any more: their numbers would be another's."""
        with self._changed:
            upload.busy -= 1
            over = upload.busy == 0 and upload.name not in self._begun
            self._changed.notify_all()
        if over:
            self._files.close(upload.fd)
            for part in upload.parts.values():
                self._drop(part.place)

    def _remove(self, upload: Upload) -> None:
        with self._changed:
            del self._begun[upload.name]
        self._tree.discard(upload.path)

    def _drop(self, place: PartPlace) -> None:
        if place.aside is not None:
            self._files.close(place.fd)
            self._tree.discard(place.aside)

    def _forget(self) -> None:
        """Nobody sends one object for so long: whoever had begun it was killed."""
        limit = time.monotonic() - FORGOTTEN_S
        for upload in self.begun():
            if upload.moved_s < limit and not upload.busy:
                with suppress(Refusal):
                    self.abort(upload.name, upload.key)
