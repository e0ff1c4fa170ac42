"""A peer's server in this process, and requests to it, signed or not, without any client of ours."""

from __future__ import annotations

import hashlib
import http.client
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ckpt_core.levels import Address, PeerServer
from ckpt_core.levels.signing import ALGORITHM, MOMENT, signature
from ckpt_core.levels.tokens import Keys
from ckpt_core.system.files import Files

KEYS = Keys("ACCESS", "seCret")
EMPTY = hashlib.sha256(b"").hexdigest()


@contextmanager
def served(folder: Path, *, files: Files | None = None, **options: Any) -> Iterator[PeerServer]:
    """A server on a port that the system chooses."""
    with PeerServer(folder, KEYS, Address("127.0.0.1", 0), files=files, **options) as server:
        yield server


@dataclass
class Heard:
    """An answer."""

    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def code(self) -> str:
        """S3's word for what is wrong."""
        found = re.search(b"<Code>(.*?)</Code>", self.body)
        return found[1].decode() if found else ""


def headers_of(
    method: str,
    target: str,
    body: bytes = b"",
    *,
    keys: Keys = KEYS,
    when: datetime | None = None,
    more: dict[str, str] | None = None,
    unsigned: dict[str, str] | None = None,
) -> dict[str, str]:
    """Headers of a request as a client with the token signs them.

    Args:
        more: further headers, signed.
        unsigned: further ones that are not.
    """
    moment = (when or datetime.now(UTC)).strftime(MOMENT)
    path, _, query = target.partition("?")
    content = hashlib.sha256(body).hexdigest()
    headers = {
        "host": "peer",
        "x-amz-date": moment,
        "x-amz-content-sha256": content,
        **(more or {}),
    }
    scope = f"{moment[:8]}/us-east-1/s3/aws4_request"
    sign = signature(method, path, query, headers, secret=keys.secret_access_key, scope=scope)
    names = ";".join(sorted(headers))
    credential = f"Credential={keys.access_key_id}/{scope}"
    text = f"{ALGORITHM} {credential}, SignedHeaders={names}, Signature={sign}"
    return {**headers, **(unsigned or {}), "authorization": text}


def send(
    server: PeerServer, method: str, target: str, body: bytes, headers: dict[str, str]
) -> Heard:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", server.address.port, timeout=30)
    try:
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        if "content-length" not in headers and "transfer-encoding" not in headers:
            connection.putheader("content-length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        return Heard(answer.status, answer.read(), {k.lower(): v for k, v in answer.getheaders()})
    finally:
        connection.close()


def ask(server: PeerServer, method: str, target: str, body: bytes = b"", **options: Any) -> Heard:
    """One request as a client with the token makes it."""
    return send(server, method, target, body, headers_of(method, target, body, **options))


def put(server: PeerServer, key: str, body: bytes, **more: str) -> Heard:
    """Write an object."""
    named = {name.replace("_", "-"): value for name, value in more.items()}
    return ask(server, "PUT", f"/steps/{key}", body, more=named)


def files_below(folder: Path) -> dict[str, bytes]:
    """What a directory holds, the lock aside."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
