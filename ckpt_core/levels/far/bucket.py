"""`Bucket`: what lies under one URL of an object store, and the few requests that a level makes of it.

Each call ends within the deadlines that it was opened with; every error of the client comes out as `Away`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any
from urllib.parse import unquote
from uuid import uuid4

import obstore
from obstore.exceptions import AlreadyExistsError, NotModifiedError, PreconditionError

from ckpt_core.errors import CkptError
from ckpt_core.levels.far.causes import away, is_missing
from ckpt_core.levels.far.clients import ERRORS, Store, open_store
from ckpt_core.levels.far.leftovers import abort_leftovers
from ckpt_core.levels.far.parts import PART_BYTES, STREAMS, Parts, part_bytes
from ckpt_core.levels.far.peer_parts import PeerParts
from ckpt_core.levels.far.receiving import BLOCK_BYTES, receiver_of
from ckpt_core.levels.far.resuming import Resuming
from ckpt_core.options import PEER, scheme_of

logger = logging.getLogger(__name__)

_COPIED_BYTES = 2**31
_LEAST_READ_BYTES_PER_S = 50e6
"""Of a disk of a peer."""

Version = dict[str, str]
"""Which writing of an object: what a condition is made of."""

_NOT_IN_AZURE = re.compile(r"[%\\\x00-\x1f\x7f]|\.(?=/|$)")
"""What Azure takes for something else, or refuses: a backslash for a slash; a dot at the end."""

CREATE: Version = {}
"""The condition that nothing is there."""


class Refused(CkptError):
    """The condition of a write did not hold; or it held, and the answer was lost and asked for again."""


class Unchanged(CkptError):
    """An object is the one that is known already."""


class Bucket:
    """Thread-safe."""

    def __init__(self, url: str, *, request_s: float, retries: int) -> None:
        self.url, self._request_s = url, request_s
        self._store = open_store(url, request_s=request_s, retries=retries)
        self._receiver = receiver_of(url, self._store, request_s=request_s)
        self._peer = (
            PeerParts(url, request_s=request_s, retries=retries) if scheme_of(url) == PEER else None
        )
        self._resuming = (
            Resuming(url, request_s=request_s, retries=retries) if Resuming.fits(url) else None
        )
        self._quotes = url.startswith("az:")

    def get(self, key: str, *, unless: Version | None = None) -> tuple[bytes, Version] | None:
        """An object and its version; None when it is not there.

        Raises:
            Unchanged: it is there in the version `unless`.
        """
        tag = None if unless is None else unless.get("e_tag")
        try:
            found = obstore.get(
                self._store, self._key(key), options={"if_none_match": tag} if tag else None
            )
            return bytes(found.bytes()), _version(found.meta)
        except NotModifiedError:
            raise Unchanged(key) from None
        except ERRORS as exc:
            if is_missing(exc):
                return None
            raise away(self.url, f"read {key}", exc) from None

    def read(self, key: str, offset: int, nbytes: int) -> memoryview:
        """A range of an object, by the client; shorter where the object ends."""
        try:
            return memoryview(
                obstore.get_range(self._store, self._key(key), start=offset, length=nbytes)
            )
        except ERRORS as exc:
            raise away(self.url, f"read {key}", exc) from None

    def fill(self, key: str, buffer: memoryview, offset: int) -> int:
        """A range of an object into a buffer of bytes; how many are there, fewer where the object ends."""
        done = 0
        if self._receiver is not None:
            try:
                done = self._receiver.fill(self._key(key), buffer, offset)
            except TimeoutError as exc:
                raise away(self.url, f"read {key}", exc) from None
        left = buffer[done:]
        if left:
            found = self.read(key, offset + done, len(left))
            left[: len(found)] = found
            done += len(found)
        return done

    def blocks(self, key: str, offset: int, nbytes: int) -> Iterator[memoryview]:
        """A range of an object, as it comes from the network: in memory that is used again at once."""
        try:
            if self._receiver is not None:
                for block in self._receiver.blocks(self._key(key), offset, nbytes):
                    offset, nbytes = offset + len(block), nbytes - len(block)
                    yield block
            if nbytes:
                found = obstore.get(
                    self._store, self._key(key), options={"range": (offset, offset + nbytes)}
                )
                for data in found.stream(min_chunk_size=BLOCK_BYTES):
                    yield memoryview(data)
        except ERRORS as exc:
            raise away(self.url, f"read {key}", exc) from None

    def close(self) -> None:
        """Let go of connections. Idempotent."""
        if self._receiver is not None:
            self._receiver.close()

    def size(self, key: str) -> int | None:
        """Length of an object; None when it is not there."""
        try:
            return obstore.head(self._store, self._key(key))["size"]
        except ERRORS as exc:
            if is_missing(exc):
                return None
            raise away(self.url, f"look at {key}", exc) from None

    def put(self, key: str, data: bytes, *, over: Version | None = None) -> Version:
        """Write a small object, whatever is there; or only over a version (`CREATE`: nothing). Its version.

        Raises:
            Refused: the condition did not hold.
        """
        mode: Any = None if over is None else over or "create"
        try:
            return _version(
                obstore.put(self._store, self._key(key), data, mode=mode, use_multipart=False)
            )
        except (AlreadyExistsError, PreconditionError):
            raise Refused(key) from None
        except ERRORS as exc:
            if over and is_missing(exc):
                raise Refused(key) from None
            raise away(self.url, f"write {key}", exc) from None

    def put_blocks(self, key: str, blocks: Iterable[memoryview], nbytes: int) -> None:
        """Write an object of any length. What `blocks` raises comes out, and nothing is there."""
        if self._peer is not None and self._peer.takes(nbytes):
            self._peer.put(key, blocks, nbytes)
            return
        if self._resuming is not None and self._resuming.put(key, blocks, nbytes):
            return
        parts = Parts(blocks, nbytes)
        try:
            if nbytes <= PART_BYTES:
                obstore.put(self._store, self._key(key), parts.joined(), use_multipart=False)
            else:
                size = part_bytes(nbytes)
                obstore.put(
                    self._store,
                    self._key(key),
                    iter(parts),
                    chunk_size=size,
                    max_concurrency=STREAMS,
                )
        except BaseException as exc:
            if parts.raised is not None:
                raise parts.raised from None
            if isinstance(exc, ERRORS):
                if self._resuming is not None:
                    self._resuming.failed(key)
                raise away(self.url, f"write {key}", exc) from None
            raise

    def begun(self, key: str, nbytes: int) -> int:
        """How many bytes at the beginning of an object `put_blocks` will find there, of an upload cut off."""
        return 0 if self._resuming is None else self._resuming.begun(key, nbytes)

    def take_up(self, mine: Callable[[str], bool]) -> None:
        """Uploads that were cut off, of objects that nobody else writes: to go on with, or aborted."""
        if self._resuming is not None:
            self._resuming.take_up(mine)
        else:
            abort_leftovers(self.url, mine=mine)

    def give_up(self) -> None:
        """Abort what was to be gone on with and was not."""
        if self._resuming is not None:
            self._resuming.give_up()

    def copy(self, source: str, target: str, nbytes: int) -> bool:
        """Have the server copy an object; False where it does not, or may not within a request."""
        store = self._store if nbytes <= _COPIED_BYTES else self._patient(nbytes)
        if store is None:
            return False
        try:
            obstore.copy(store, self._key(source), self._key(target))
        except ERRORS as exc:
            logger.info(
                "%s: %s is sent and not copied there: %s", self.url, target, type(exc).__name__
            )
            return False
        return True

    def _patient(self, nbytes: int) -> Store | None:
        """A client that waits until a peer has read so many bytes: it compares them, and links the file."""
        if self._peer is None:
            return None
        longest_s = self._request_s + nbytes / _LEAST_READ_BYTES_PER_S
        return open_store(self.url, request_s=longest_s, retries=0)

    def delete(self, keys: list[str]) -> None:
        """Take objects away; those that are not there are no error."""
        if not keys:
            return
        try:
            obstore.delete(self._store, [*map(self._key, keys)])
        except ERRORS as exc:
            if not is_missing(exc):
                raise away(self.url, f"delete {keys[0]}", exc) from None
            # Some stores refuse what is not there: the others are still to go.
            for key in keys if len(keys) > 1 else ():
                self.delete([key])

    def below(self, folder: str) -> dict[str, tuple[int, datetime]]:
        """Objects in a folder and below: name in it -> length, and when it was written. May lag behind."""
        try:
            rows = obstore.list(self._store, self._key(folder)).collect()
        except ERRORS as exc:
            raise away(self.url, f"list {folder}", exc) from None
        cut = len(folder) + 1
        return {self._name(row["path"])[cut:]: (row["size"], row["last_modified"]) for row in rows}

    def look(self, folder: str | None = None) -> tuple[list[str], dict[str, int]]:
        """Names of the folders in a folder, and of its objects with their lengths. May lag behind."""
        try:
            found = obstore.list_with_delimiter(self._store, folder and self._key(folder))
        except ERRORS as exc:
            raise away(self.url, f"list {folder or 'what is there'}", exc) from None
        folders = [self._name(path).rpartition("/")[2] for path in found["common_prefixes"]]
        objects = {
            self._name(row["path"]).rpartition("/")[2]: row["size"] for row in found["objects"]
        }
        return sorted(folders), objects

    def now(self) -> datetime:
        """What time it is there: only that may be compared with the times of what was written there."""
        key = f".clock-{uuid4().hex}"
        self.put(key, b"")
        try:
            return obstore.head(self._store, self._key(key))["last_modified"]
        except ERRORS as exc:
            raise away(self.url, "ask for the time", exc) from None
        finally:
            self.delete([key])

    def _key(self, name: str) -> str:
        return _NOT_IN_AZURE.sub(lambda one: f"%{ord(one[0]):02X}", name) if self._quotes else name

    def _name(self, key: str) -> str:
        return unquote(key) if self._quotes else key


def _version(meta: Any) -> Version:
    return {name: meta[name] for name in ("e_tag", "version") if meta[name]}
