"""Who may ask: whoever signs with the keys of the job's token, now, for this very request."""

from __future__ import annotations

import hashlib
import hmac
import re
from datetime import UTC, datetime, timedelta
from typing import Protocol

from ckpt_core.levels.serving.wire import Refusal, Request
from ckpt_core.levels.signing import ALGORITHM, MOMENT, BodyMac, signature
from ckpt_core.levels.tokens import Keys

HOLDS = timedelta(minutes=15)
"""A signature that somebody has overheard is worth nothing after that."""

_AUTHORIZATION = re.compile(
    rf"{ALGORITHM} Credential=([^/,]+)/([0-9]{{8}}/[a-z0-9-]+/s3/aws4_request), ?"
    r"SignedHeaders=([a-z0-9;-]+), ?Signature=([0-9a-f]{64})"
)
_ALWAYS = {"host", "x-amz-date", "x-amz-content-sha256"}
_ACTED_ON = {"range", "if-match", "if-none-match", "content-md5", "expect", "transfer-encoding"}
"""Where they are there they have to be signed, as all that begins with x-amz-."""


def check_allowed(request: Request, keys: Keys, *, now: datetime | None = None) -> None:
    """Be sure that somebody with the token asks for exactly this. Reads no body.

    Raises:
        Refusal: 403, and nothing is done.
    """
    found = _AUTHORIZATION.fullmatch(request.headers.get("authorization", ""))
    if found is None:
        raise Refusal(403, "AccessDenied")
    access, scope, names, given = found.groups()
    signed = names.split(";")
    # As bytes: a stranger's may be beyond ASCII, which texts are not compared with.
    if not hmac.compare_digest(access.encode(), keys.access_key_id.encode()):
        raise Refusal(403, "InvalidAccessKeyId")
    acted_on = {name for name in request.headers if name in _ACTED_ON or name.startswith("x-amz-")}
    if not _ALWAYS | acted_on <= {*signed} <= {*request.headers} or len({*signed}) != len(signed):
        raise Refusal(403, "SignatureDoesNotMatch")
    headers = {name: " ".join(request.headers[name].split()) for name in signed}
    wanted = signature(
        request.method,
        request.path,
        request.query,
        headers,
        secret=keys.secret_access_key,
        scope=scope,
    )
    if not hmac.compare_digest(given, wanted):
        raise Refusal(403, "SignatureDoesNotMatch")
    _check_moment(headers["x-amz-date"], scope, now or datetime.now(UTC))


class Sum(Protocol):
    """Of a body, as it comes."""

    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


def check_content_is_signed(request: Request) -> str:
    """The sum of the body, which is signed; without it somebody on the way could change the body.

    Raises:
        Refusal: there is none; 501: it is of a kind that is not known here.
    """
    text = request.headers["x-amz-content-sha256"]
    if re.fullmatch("[0-9a-f]{64}", text):
        return text
    is_mac = request.method == "PUT" and BodyMac.named(text) is not None
    if text.startswith("STREAMING-") or (is_mac and not BodyMac.is_there()):
        raise Refusal(501, "NotImplemented")
    if not is_mac:
        raise Refusal(403, "AccessDenied")
    return text


def content_sum(request: Request, keys: Keys) -> tuple[str, Sum]:
    """What the sum of the body has to be, and what is to be fed with it."""
    text = check_content_is_signed(request)
    named = BodyMac.named(text)
    if named is None:
        return text, hashlib.sha256()
    nonce, tag = named
    return tag, BodyMac(keys.secret_access_key, nonce)


def _check_moment(text: str, scope: str, now: datetime) -> None:
    try:
        moment = datetime.strptime(text, MOMENT).replace(tzinfo=UTC)
    except ValueError:
        raise Refusal(403, "AccessDenied") from None
    if abs(now - moment) > HOLDS or not scope.startswith(text[:8]):
        raise Refusal(403, "RequestTimeTooSkewed")
