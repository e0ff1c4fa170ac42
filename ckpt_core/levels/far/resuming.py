"""Uploads to S3 and to Google that were cut off are gone on with: parts that are there are not sent again.

    resuming.take_up(mine)                       what an earlier life of this agent had begun
    there = resuming.begun(key, nbytes)          so many bytes at its beginning need not travel
    done = resuming.put(key, blocks, nbytes)     False: there is nothing to go on with, send all of it

A part counts if its length is right; and its tag is compared with the MD5 of the bytes here before it is
believed. Stores that encrypt by other keys than their own have other tags: there all of it is sent again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from ckpt_core.levels.far.clients import away, is_unsigned, split
from ckpt_core.levels.far.leftovers import FAILURES, Leftover, Leftovers, Part, tell_aborted
from ckpt_core.levels.far.part_sending import PartSending, Pieces, SendFailed, Way, cut
from ckpt_core.levels.far.parts import PART_BYTES, part_bytes
from ckpt_core.levels.signing import UNSIGNED, sum_of

logger = logging.getLogger(__name__)

_TRIES = 3
"""Of one upload: then all of it is sent again."""


@dataclass
class _Begun:
    upload: Leftover
    parts: Mapping[int, Part]
    tries: int = 0


class Resuming:
    """Thread-safe; one file is sent by one thread. Nothing of it raises but what `put` says."""

    def __init__(self, url: str, *, request_s: float, retries: int) -> None:
        self._url, self._request_s, self._retries = url, request_s, retries
        self._left: dict[str, Leftover] = {}
        self._begun: dict[str, _Begun] = {}
        self._failed: set[str] = set()
        self._lock = threading.Lock()

    @staticmethod
    def fits(url: str) -> bool:
        """Whether what lies there can be gone on with: requests of our own know S3's ways, and no proxy."""
        named = urllib.request.getproxies_environment().keys() & {"http", "https", "all"}
        hosted = os.environ.get("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "").lower() in ("true", "1")
        return split(url)[0] in ("s3", "gs") and not named and not hosted

    def take_up(self, mine: Callable[[str], bool]) -> None:
        """Find what was begun of files that nobody else sends; of each the youngest is kept."""
        count = 0
        with suppress(*FAILURES):
            leftovers = Leftovers.of(self._url)
            for one in leftovers.listed() if leftovers is not None else ():
                if not mine(one.key):
                    continue
                with self._lock:
                    kept = self._left.setdefault(one.key, one)
                if kept is not one and leftovers is not None:
                    leftovers.abort(one)
                    count += 1
        tell_aborted(self._url, count)

    def give_up(self) -> None:
        """Nothing is to be sent any more: what was not gone on with is aborted."""
        with self._lock:
            left = [*self._left.values(), *(one.upload for one in self._begun.values())]
            self._left, self._begun = {}, {}
            self._failed.clear()
        tell_aborted(self._url, sum(map(self._abort, left)))

    def failed(self, key: str) -> None:
        """The client could not send it: before it tries again, what it left there is looked for."""
        with self._lock:
            self._failed.add(key)

    def begun(self, key: str, nbytes: int) -> int:
        """How many bytes at the beginning of an object are there, for `put` to go on behind."""
        if nbytes <= PART_BYTES:
            return 0
        with self._lock:
            known, one = self._begun.get(key), self._left.pop(key, None)
            again = key in self._failed
            self._failed.discard(key)
        upload = known.upload if known is not None else one
        if upload is None and not again:
            return 0
        with suppress(*FAILURES):
            leftovers = Leftovers.of(self._url)
            if leftovers is not None and upload is None:
                upload = next((one for one in leftovers.listed(key) if one.key == key), None)
            if leftovers is not None and upload is not None:
                parts = _whole(leftovers.parts(upload), nbytes)
                tries = known.tries if known is not None else 0
                with self._lock:
                    self._begun[key] = _Begun(upload, parts, tries)
                if parts:
                    return _front(parts, nbytes)
        self._drop(key)
        return 0

    def put(self, key: str, blocks: Iterable[memoryview], nbytes: int) -> bool:
        """Send what an upload lacks, after `begun`; False: there is none. What `blocks` raises comes out.

        Raises:
            Away: it could not be sent, and is tried again; from the beginning, if that may help.
        """
        with self._lock:
            known = self._begun.get(key)
        leftovers = None
        with suppress(*FAILURES):
            leftovers = Leftovers.of(self._url) if known is not None else None
        if known is None or leftovers is None:
            return False
        known.tries += 1
        logger.info("%s: %s is gone on with: %d parts are there", self._url, key, len(known.parts))
        home, place = urlsplit(leftovers.asking.home), leftovers.place + quote(key)
        vouch = _unsigned if is_unsigned(leftovers.asking.home) else sum_of
        way = Way(
            f"{home.scheme}://{home.netloc}",
            home.path + place,
            leftovers.asking.sign,
            vouch,
            self._request_s,
            self._retries,
        )
        sending = PartSending(way)
        try:
            sending.complete(known.upload.name, cut(blocks, nbytes), known_by(known.parts))
        except SendFailed as exc:
            # A refusal is of this upload, as far as can be told: of the next one it is the client's to tell.
            if known.tries == _TRIES or 400 <= exc.status < 500:
                self._drop(key)
            raise away(self._url, f"write {key}", exc) from None
        finally:
            sending.close()
        with self._lock:
            self._begun.pop(key, None)
        return True

    def _drop(self, key: str) -> None:
        with self._lock:
            known = self._begun.pop(key, None)
        if known is not None:
            self._abort(known.upload)

    def _abort(self, upload: Leftover) -> bool:
        with suppress(*FAILURES):
            leftovers = Leftovers.of(self._url)
            if leftovers is not None:
                leftovers.abort(upload)
                return True
        return False


def known_by(parts: Mapping[int, Part]) -> Callable[[int, Pieces], str]:
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
