"""Uploads in parts that a kill has cut off: S3 keeps their parts, unseen, and asks money for them.

The client offers no way to see them, so this speaks S3 itself, and signs (AWS Signature, version 4).
Google keeps them, too, and Azure for a week. There nothing is done, nor where credentials are a role's and
botocore, which knows how to ask for those, is not installed: a lifecycle rule of the bucket does the same.
"""

from __future__ import annotations

import contextlib
import html
import importlib.util
import logging
import re
import urllib.request
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from urllib.parse import quote, urlencode, urlsplit

from ckpt_core.levels.far.clients import endpoint, peer_settings, s3_settings, split
from ckpt_core.levels.far.door import Copy
from ckpt_core.levels.signing import ALGORITHM, MOMENT, NOTHING, signature
from ckpt_core.options import PEER

logger = logging.getLogger(__name__)

OLD = timedelta(hours=24)
"""Nobody sends one file for so long, except with a very small `bandwidth`; and then it is only sent again."""

_TIMEOUT_S = 10.0
_UPLOAD = re.compile(r"<Upload>(.*?)</Upload>", re.DOTALL)
_OURS = re.compile(r"[^/]+/([0-9a-f]{8})/.+")


def _nobodys(key: str) -> bool:
    return False


def abort_leftovers(
    url: str, keep: Collection[Copy] = (), *, mine: Callable[[str], bool] = _nobodys
) -> int:
    """Abort uploads under a level that began long ago, by the server's own clock; how many there were.

    Never raises, and never keeps anybody waiting for long: it only saves money.

    Args:
        mine: which files nobody else sends: of those all are aborted.
    """
    scheme, bucket, prefix = split(url)
    settings = peer_settings() if scheme == PEER else s3_settings()
    if scheme == "s3" and "access_key_id" not in settings:
        settings |= _keys_of_a_role()
    if scheme not in ("s3", PEER) or "access_key_id" not in settings:
        return 0
    home = endpoint(url) or f"https://s3.{settings['region']}.amazonaws.com"
    direct = [urllib.request.ProxyHandler({})] if scheme == PEER else []
    opener = urllib.request.build_opener(*direct)
    below = f"{prefix}/" if prefix else ""
    kept = {copy.folder for copy in keep}
    count = 0
    # OSError: what the network does; ValueError: what is no answer of S3.
    with contextlib.suppress(OSError, HTTPException, ValueError, KeyError):
        place = f"{home.rstrip('/')}/{bucket}"
        text, now = _ask(opener, "GET", place, {"prefix": below, "uploads": ""}, settings)
        for upload in _UPLOAD.findall(text):
            key, name, began = (_field(upload, one) for one in ("Key", "UploadId", "Initiated"))
            ours = _OURS.fullmatch(key.removeprefix(below))
            if ours is None or not key.startswith(below):
                continue
            old = datetime.fromisoformat(began) < now - OLD
            if mine(ours[0]) or (old and ours[1] not in kept):
                _ask(opener, "DELETE", f"{place}/{quote(key)}", {"uploadId": name}, settings)
                count += 1
    if count:
        logger.info("%s: the parts of %d uploads that were cut off have been deleted", url, count)
    return count


def _keys_of_a_role() -> dict[str, str]:
    """{}: there is none, or nobody here can ask for them."""
    if importlib.util.find_spec("botocore") is None:
        return {}
    session = importlib.import_module("botocore.session").get_session()
    try:
        found = session.get_credentials()
        keys = None if found is None else found.get_frozen_credentials()
    except Exception as exc:  # whatever the place of a role does
        logger.debug("no credentials of a role: %s", type(exc).__name__)
        return {}
    if keys is None:
        return {}
    token = {"session_token": keys.token} if keys.token else {}
    return {"access_key_id": keys.access_key, "secret_access_key": keys.secret_key, **token}


def signed(
    method: str,
    url: str,
    settings: Mapping[str, str],
    *,
    when: datetime,
    content: str = NOTHING,
    wanted: str = "",
) -> dict[str, str]:
    """Headers of a request, the signature among them.

    Args:
        content: the sum of its body.
        wanted: a range, as `bytes=0-9`.
        url: quoted.
        settings: access_key_id, secret_access_key, region; session_token where there is one.
    """
    place = urlsplit(url)
    day, moment = when.strftime("%Y%m%d"), when.strftime(MOMENT)
    headers = {"host": place.netloc, "x-amz-content-sha256": content, "x-amz-date": moment}
    if wanted:
        headers["range"] = wanted
    if token := settings.get("session_token"):
        headers["x-amz-security-token"] = token
    scope = f"{day}/{settings['region']}/s3/aws4_request"
    secret = settings["secret_access_key"]
    sign = signature(method, place.path, place.query, headers, secret=secret, scope=scope)
    credential = f"Credential={settings['access_key_id']}/{scope}"
    names = f"SignedHeaders={';'.join(sorted(headers))}"
    return {**headers, "Authorization": f"{ALGORITHM} {credential}, {names}, Signature={sign}"}


def _ask(
    opener: urllib.request.OpenerDirector,
    method: str,
    place: str,
    query: Mapping[str, str],
    settings: Mapping[str, str],
) -> tuple[str, datetime]:
    """What the server answers, and its time."""
    url = f"{place}?{urlencode(query, quote_via=quote)}"
    headers = signed(method, url, settings, when=datetime.now(UTC))
    request = urllib.request.Request(url, method=method, headers=headers)
    with opener.open(request, timeout=_TIMEOUT_S) as answer:
        return answer.read().decode(), parsedate_to_datetime(answer.headers["Date"])


def _field(text: str, name: str) -> str:
    found = re.search(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
    if found is None:
        raise ValueError(name)
    return html.unescape(found[1])
