"""Signatures of requests to an object store (AWS Signature, version 4), of whoever sends and whoever checks.

A request to a peer may name, where others have the SHA-256 of the body, an AES-GMAC of it, by a key that is
made for this one request of the token's: whoever has no token cannot make a body for it, as little as with
SHA-256, and it takes a tenth of the time.

Source: "Authenticating Requests: Using the Authorization Header", the reference of Amazon S3; GMAC: NIST
SP 800-38D.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Self
from urllib.parse import parse_qsl, quote, urlsplit

ALGORITHM = "AWS4-HMAC-SHA256"
MOMENT = "%Y%m%dT%H%M%SZ"
"""How `x-amz-date` tells the time, in UTC."""

NOTHING = hashlib.sha256(b"").hexdigest()
"""`x-amz-content-sha256` of a request without a body."""


_MAC = re.compile(r"GMAC-([0-9a-f]{32})-([0-9a-f]{32})")


class BodyMac:
    """The AES-GMAC of one body; fed as a hash of `hashlib` is. Needs the package `cryptography`.

    Args:
        secret: of whoever sends and whoever checks.
        nonce: 32 hex digits, drawn for this one body: no key is used twice.
    """

    def __init__(self, secret: str, nonce: str) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        self._nonce = nonce
        key = hmac.digest(secret.encode(), f"ckpt-core body {nonce}".encode(), "sha256")
        self._of = Cipher(algorithms.AES128(key[:16]), modes.GCM(bytes(12))).encryptor()

    @classmethod
    def begin(cls, secret: str) -> Self:
        """Of a body that is to be sent."""
        return cls(secret, secrets.token_hex(16))

    @staticmethod
    @cache
    def is_there() -> bool:
        """Whether it can be computed here."""
        return importlib.util.find_spec("cryptography") is not None

    @staticmethod
    def named(content: str) -> tuple[str, str] | None:
        """Nonce and tag that `x-amz-content-sha256` names; None: it names something else."""
        found = _MAC.fullmatch(content)
        return None if found is None else (found[1], found[2])

    def update(self, data: memoryview) -> None:
        """The next bytes."""
        self._of.authenticate_additional_data(data)

    def hexdigest(self) -> str:
        """The tag. Called once, at the end."""
        self._of.finalize()
        return self._of.tag.hex()

    def content(self) -> str:
        """What `x-amz-content-sha256` is to say. Likewise."""
        return f"GMAC-{self._nonce}-{self.hexdigest()}"


UNSIGNED = "UNSIGNED-PAYLOAD"
"""The same, where the transport is what guards a body."""


def sum_of(pieces: Iterable[memoryview]) -> str:
    """The same of a body, in pieces."""
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


Sign = Callable[[str, str, str], Mapping[str, str]]
"""Method, URL and the sum of the body -> the headers of a request that is made now."""


def signer(settings: Mapping[str, str]) -> Sign:
    """By `signed`."""
    return lambda method, url, content: signed(
        method, url, settings, when=datetime.now(UTC), content=content
    )


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
