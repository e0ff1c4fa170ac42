"""Signatures of requests to an object store (AWS Signature, version 4), of whoever sends and whoever checks.

Source: "Authenticating Requests: Using the Authorization Header", the reference of Amazon S3.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from urllib.parse import parse_qsl, quote

ALGORITHM = "AWS4-HMAC-SHA256"
MOMENT = "%Y%m%dT%H%M%SZ"
"""How `x-amz-date` tells the time, in UTC."""

NOTHING = hashlib.sha256(b"").hexdigest()
"""`x-amz-content-sha256` of a request without a body."""


def signature(
    method: str, path: str, query: str, headers: Mapping[str, str], *, secret: str, scope: str
) -> str:
    """The signature of a request, in hex digits.

    Args:
        path: quoted, as it is sent.
        query: likewise; the order of its fields does not matter.
        headers: those that are signed, by names in lower case; `x-amz-date` and `x-amz-content-sha256` are
            among them.
        scope: "<day>/<region>/s3/aws4_request".
    """
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    names = ";".join(sorted(headers))
    content = headers["x-amz-content-sha256"]
    request = "\n".join([method, path, _in_order(query), lines, names, content])
    digest = hashlib.sha256(request.encode()).hexdigest()
    key = f"AWS4{secret}".encode()
    moment = headers["x-amz-date"]
    for part in (*scope.split("/"), f"{ALGORITHM}\n{moment}\n{scope}\n{digest}"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key.hex()


def _in_order(query: str) -> str:
    fields = parse_qsl(query, keep_blank_values=True, errors="surrogateescape")
    quoted = [(_quoted(name), _quoted(value)) for name, value in fields]
    return "&".join(f"{name}={value}" for name, value in sorted(quoted))


def _quoted(text: str) -> str:
    return quote(text, safe="-_.~", errors="surrogateescape")
