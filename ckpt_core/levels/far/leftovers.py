"""Uploads in parts that a kill has cut off: S3 keeps their parts, unseen, and asks money for them.

The client offers no way to see them, so this speaks S3 itself, which Google's store does, too.
Azure keeps them for a week. Nothing is done there, nor where credentials are a role's and nobody here knows
how to ask for those: a lifecycle rule of the bucket does the same.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.parse import quote, urlencode

from ckpt_core.levels.far.asking import Asking, asking, field
from ckpt_core.levels.far.clients import split
from ckpt_core.levels.far.door import Copy
from ckpt_core.levels.signing import NOTHING
from ckpt_core.options import PEER

logger = logging.getLogger(__name__)

OLD = timedelta(hours=24)
"""Nobody sends one file for so long, except with a very small `bandwidth`; and then it is only sent again."""

_TIMEOUT_S = 10.0
_PAUSE_S = 0.2
_UPLOAD = re.compile(r"<Upload>(.*?)</Upload>", re.DOTALL)
_PART = re.compile(r"<Part>(.*?)</Part>", re.DOTALL)
_OURS = re.compile(r"[^/]+/([0-9a-f]{8})/.+")

FAILURES = (OSError, HTTPException, ValueError, KeyError, TypeError)
"""What the network does; what is no answer of S3; what the environment lacks."""


@dataclass(frozen=True)
class Leftover:
    """An upload that was not completed.

    Attributes:
        key: its object's, below the level.
        name: S3's.
        age: by the server's own clock.
    """

    key: str
    name: str
    age: timedelta


@dataclass(frozen=True)
class Part:
    """What S3 has of an upload; `tag` is the MD5 of its bytes, unless it encrypts them by a key of yours."""

    nbytes: int
    tag: str


class Leftovers:
    """What was begun under a level. What asks raises `FAILURES`.

    Attributes:
        asking: how the store is asked.
        place: path of the level in it, quoted, with a slash at its end.
    """

    def __init__(self, url: str, asking: Asking) -> None:
        scheme, bucket, prefix = split(url)
        self.asking, self._url = asking, url
        self._below = f"{prefix}/" if prefix else ""
        self._bucket = f"/{bucket}"
        self.place = f"{self._bucket}/{quote(self._below)}"
        direct = [urllib.request.ProxyHandler({})] if scheme == PEER else []
        self._opener = urllib.request.build_opener(*direct)

    @classmethod
    def of(cls, url: str) -> Leftovers | None:
        """Those of a level; None where they cannot be asked for."""
        how = asking(url)
        return None if how is None else cls(url, how)

    def files(self, mine: Callable[[str], bool]) -> list[Leftover]:
        """Those of files of copies that nobody else sends, the youngest first."""
        return [one for one in self.listed() if _OURS.fullmatch(one.key) and mine(one.key)]

    def listed(self, key: str = "") -> list[Leftover]:
        """Those of objects whose key begins so, the youngest first."""
        query = {"prefix": self._below + key, "uploads": ""}
        found: list[Leftover] = []
        for text, date in self._pages(self._bucket, query, ("key-marker", "upload-id-marker")):
            now = parsedate_to_datetime(date)
            for upload in _UPLOAD.findall(text):
                whole, name, began = (
                    field(upload, one) for one in ("Key", "UploadId", "Initiated")
                )
                if whole.startswith(self._below):
                    age = now - datetime.fromisoformat(began)
                    found.append(Leftover(whole.removeprefix(self._below), name, age))
        return sorted(found, key=lambda one: one.age)

    def parts(self, one: Leftover) -> dict[int, Part]:
        """By their numbers."""
        place, query = self.place + quote(one.key), {"uploadId": one.name}
        return {
            int(field(part, "PartNumber")): Part(
                int(field(part, "Size")), field(part, "ETag").strip('"')
            )
            for text, _ in self._pages(place, query, ("part-number-marker",))
            for part in _PART.findall(text)
        }

    def abort(self, gone: Iterable[Leftover]) -> int:
        """Have their parts deleted, but those that the store refuses to delete; how many went. Never raises.

        Where no answer comes, the rest stays: nobody is kept waiting for each.
        """
        count = 0
        with contextlib.suppress(*FAILURES):
            for one in gone:
                with contextlib.suppress(HTTPError):
                    self._ask("DELETE", self.place + quote(one.key), {"uploadId": one.name})
                    count += 1
        if count:
            text = "%s: the parts of %d uploads that were cut off have been deleted"
            logger.info(text, self._url, count)
        return count

    # -- inside ----------------------------------------------------------------------------------

    def _pages(
        self, place: str, query: dict[str, str], markers: tuple[str, ...]
    ) -> Iterator[tuple[str, str]]:
        while True:
            text, date = self._ask("GET", place, query)
            yield text, date
            if "<IsTruncated>true</IsTruncated>" not in text:
                return
            after = {one: field(text, f"Next{one.title().replace('-', '')}") for one in markers}
            if after.items() <= query.items():
                raise ValueError("a page that does not end")
            query = query | after

    def _ask(self, method: str, place: str, query: Mapping[str, str]) -> tuple[str, str]:
        """What the server answers, and its date. Asked once more where that may help."""
        url = f"{self.asking.home}{place}?{urlencode(query, quote_via=quote)}"
        for again in (True, False):
            headers = self.asking.sign(method, url, NOTHING)
            request = urllib.request.Request(url, method=method, headers=dict(headers))
            try:
                with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                    return answer.read().decode(), answer.headers["Date"]
            except OSError as exc:
                if isinstance(exc, HTTPError):
                    exc.close()
                if not again or not is_of_the_moment(getattr(exc, "code", 0)):
                    raise
                time.sleep(_PAUSE_S)
        raise AssertionError


def is_of_the_moment(status: int) -> bool:
    """Whether an answer, or none at all (0), says nothing of the next time."""
    return status in (0, 401, 408, 429) or status >= 500


def _nobodys(key: str) -> bool:
    return False


def abort_leftovers(
    url: str, keep: Collection[Copy] = (), *, mine: Callable[[str], bool] = _nobodys
) -> int:
    """Abort uploads under a level that began long ago; how many there were.

    Never raises, and never keeps anybody waiting for long: it only saves money.

    Args:
        mine: which files nobody else sends: of those all are aborted.
    """
    kept = {copy.folder for copy in keep}

    def goes(one: Leftover) -> bool:
        ours = _OURS.fullmatch(one.key)
        if ours is None:
            return False
        return mine(one.key) or (one.age > OLD and ours[1] not in kept)

    with contextlib.suppress(*FAILURES):
        leftovers = Leftovers.of(url)
        if leftovers is not None:
            return leftovers.abort([one for one in leftovers.listed() if goes(one)])
    return 0
