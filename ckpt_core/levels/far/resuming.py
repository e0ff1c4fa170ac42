"""Uploads to S3 and to Google that were cut off are gone on with: parts that are there are not sent again.

    resuming.take_up(mine)                       what an earlier life of this agent had begun
    there = resuming.begun(key, nbytes)          so many bytes at its beginning need not travel
    done = resuming.put(key, blocks, nbytes)     False: there is nothing to go on with, send all of it

A part counts if its length is right; and its tag is compared with the MD5 of the bytes here before it is
believed. Stores that encrypt by other keys than their own have other tags: there all of it is sent again, by
the client.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

from ckpt_core.levels.far.causes import away
from ckpt_core.levels.far.clients import is_set, is_unsigned, split
from ckpt_core.levels.far.door import Away
from ckpt_core.levels.far.leftovers import (
    FAILURES,
    Leftover,
    Leftovers,
    Part,
    is_of_the_moment,
)
from ckpt_core.levels.far.part_sending import PartSending, Pieces, SendFailed, Way, cut
from ckpt_core.levels.far.parts import PART_BYTES, part_bytes
from ckpt_core.levels.signing import UNSIGNED, sum_of
from ckpt_core.system.threads import own_lock

logger = logging.getLogger(__name__)

_TRIES = 3
"""Of one upload: then all of it is sent again."""

_OF_THE_MOMENT = re.compile("ExpiredToken|TokenRefreshRequired|RequestTimeTooSkewed|RequestTimeout")
_OTHER_PARTS = ("AWS_SERVER_SIDE_ENCRYPTION", "AWS_SSE_", "AWS_CHECKSUM_ALGORITHM")
"""Variables by which the client makes parts of a kind that is not known here."""


class _OtherTags(SendFailed):
    """A store whose tags are not the MD5 of the bytes."""


@dataclass
class _Known:
    """What is known of an upload of one file.

    Attributes:
        is_mine: nobody else is at it, so that it may be aborted.
        leftovers: who has told of `parts`; None: nobody has, for this try.
    """

    upload: Leftover
    is_mine: bool
    tries: int = 0
    leftovers: Leftovers | None = None
    parts: Mapping[int, Part] = field(default_factory=dict)


class Resuming:
    """Thread-safe; one file is sent by one thread."""

    def __init__(self, url: str, *, request_s: float, retries: int) -> None:
        self._url, self._request_s, self._retries = url, request_s, retries
        self._known: dict[str, _Known] = {}
        self._failed: set[str] = set()
        self._has_other_tags = False
        self._lock = own_lock()

    @staticmethod
    def fits(url: str) -> bool:
        """Whether what lies there can be gone on with: requests of our own know S3's ways, and no proxy."""
        named = urllib.request.getproxies_environment().keys() & {"http", "https", "all"}
        other = any(name.upper().startswith(_OTHER_PARTS) for name in os.environ)
        hosted = is_set("AWS_VIRTUAL_HOSTED_STYLE_REQUEST")
        return split(url)[0] in ("s3", "gs") and not (named or other or hosted)

    def take_up(self, mine: Callable[[str], bool]) -> None:
        """Find what was begun of files that nobody else sends; of each the youngest is kept. Never raises."""
        with suppress(*FAILURES):
            leftovers = Leftovers.of(self._url)
            if leftovers is None:
                return
            found = leftovers.files(mine)
            with self._lock:
                for one in found:
                    self._known.setdefault(one.key, _Known(one, is_mine=True))
                kept = {known.upload.name for known in self._known.values()}
            leftovers.abort(one for one in found if one.name not in kept)

    def give_up(self) -> None:
        """Nothing is to be sent any more: what was not gone on with is aborted. Never raises."""
        with self._lock:
            left = [known.upload for known in self._known.values() if known.is_mine]
            self._known = {}
            self._failed.clear()
        self._abort(left)

    def failed(self, key: str) -> None:
        """The client could not send it: before it tries again, what it left there is looked for."""
        with self._lock:
            self._failed.add(key)

    def begun(self, key: str, nbytes: int) -> int:
        """How many bytes at the beginning of an object are there, for `put` to go on behind.

        Raises:
            Away: it could not be told now, and is asked again; after some tries all is sent.
        """
        with self._lock:
            known = self._known.get(key)
            again = key in self._failed and not self._has_other_tags
        if nbytes <= PART_BYTES or (known is None and not again):
            return 0
        if known is not None:
            known.tries += 1
        try:
            leftovers = Leftovers.of(self._url)
            if known is None and leftovers is not None:
                known = self._found(leftovers, key)
            if known is None:
                return 0
            if leftovers is None:
                raise OSError("no credentials now")
            known.parts = _whole(leftovers.parts(known.upload), nbytes)
        except FAILURES as exc:
            status = getattr(exc, "code", 0)
            if known is None:
                return 0
            if known.tries >= _TRIES or not is_of_the_moment(status):
                self._forget(key)
                return 0
            failure = SendFailed(f"{type(exc).__name__} status: {status or 503}")
            raise _for_now(away(self._url, f"see what is there of {key}", failure)) from None
        if not known.parts or known.tries > _TRIES or self._has_other_tags:
            self._forget(key)
            return 0
        known.leftovers = leftovers
        return _front(known.parts, nbytes)

    def put(self, key: str, blocks: Iterable[memoryview], nbytes: int) -> bool:
        """Send what an upload lacks, after `begun`; False: there is none. What `blocks` raises comes out.

        Raises:
            Away: it could not be sent, and is tried again; from the beginning, if that may help.
        """
        with self._lock:
            known = self._known.get(key)
        if known is None or known.leftovers is None:
            return False
        leftovers, known.leftovers = known.leftovers, None
        logger.info("%s: %s is gone on with: %d parts are there", self._url, key, len(known.parts))
        sending = PartSending(self._way(leftovers, key))
        failure: SendFailed | None = None
        try:
            parts = _checked(cut(blocks, nbytes), known.parts)
            sending.complete(known.upload.name, parts, _known_by(known.parts))
        except SendFailed as exc:
            failure = exc
        finally:
            sending.close()
        if failure is None:
            with self._lock:
                self._known.pop(key, None)
            return True
        self._has_other_tags |= isinstance(failure, _OtherTags)
        passes = is_of_the_moment(failure.status) or _OF_THE_MOMENT.search(str(failure))
        if passes and known.tries < _TRIES:
            raise _for_now(away(self._url, f"write {key}", failure)) from None
        self._forget(key)
        text = f"what was begun of {key} is not taken any more: all of it is sent again"
        raise Away(f"{self._url}: {text}")

    # -- inside ----------------------------------------------------------------------------------

    def _found(self, leftovers: Leftovers, key: str) -> _Known | None:
        """What the client has left when it failed; or what somebody else is at, with the same bytes."""
        upload = next((one for one in leftovers.listed(key) if one.key == key), None)
        with self._lock:
            self._failed.discard(key)
            if upload is None:
                return None
            return self._known.setdefault(key, _Known(upload, is_mine=False, tries=1))

    def _way(self, leftovers: Leftovers, key: str) -> Way:
        home = urlsplit(leftovers.asking.home)
        return Way(
            f"{home.scheme}://{home.netloc}",
            home.path + leftovers.place + quote(key),
            leftovers.asking.sign,
            _unsigned if is_unsigned(leftovers.asking.home) else sum_of,
            self._request_s,
            self._retries,
        )

    def _forget(self, key: str) -> None:
        """All of it is to be sent again."""
        with self._lock:
            known = self._known.pop(key, None)
        if known is not None and known.is_mine:
            self._abort([known.upload])

    def _abort(self, gone: list[Leftover]) -> None:
        with suppress(*FAILURES):
            leftovers = Leftovers.of(self._url) if gone else None
            if leftovers is not None:
                leftovers.abort(gone)


def _for_now(failure: Away) -> Away:
    """The client has credentials of its own: whether they are refused is for it to find out."""
    failure.hopeless = False
    return failure


def _checked(parts: Iterator[list[memoryview]], there: Mapping[int, Part]) -> Iterator[Pieces]:
    """The same parts; before any of those that are there is believed, one of them is compared.

    Raises:
        _OtherTags: it is none.
    """
    first, is_there = min(there), _known_by(there)
    for number, pieces in enumerate(parts, 1):
        if number == first and not is_there(number, pieces):
            raise _OtherTags("a tag that is not the MD5 of the bytes here", 400)
        yield pieces


def _known_by(parts: Mapping[int, Part]) -> Callable[[int, Pieces], str]:
    """What tells the tag of a part that is there with just these bytes."""

    def is_there(number: int, pieces: Pieces) -> str:
        part = parts.get(number)
        if part is None:
            return ""
        found = hashlib.md5(usedforsecurity=False)
        for piece in pieces:
            found.update(piece)
        return f'"{part.tag}"' if found.hexdigest() == part.tag else ""

    return is_there


def _unsigned(pieces: Pieces) -> str:
    return UNSIGNED


def _whole(parts: Mapping[int, Part], nbytes: int) -> dict[int, Part]:
    """Those that have the length that they have here."""
    size = part_bytes(nbytes)
    count = -(-nbytes // size)
    last = nbytes - (count - 1) * size
    return {
        number: part
        for number, part in parts.items()
        if 1 <= number <= count and part.nbytes == (size if number < count else last)
    }


def _front(parts: Mapping[int, Part], nbytes: int) -> int:
    count = 0
    while count + 1 in parts:
        count += 1
    return min(nbytes, count * part_bytes(nbytes))
