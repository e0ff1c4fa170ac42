"""Azurite, the emulator of Azure's blob storage, as a process of its own on loopback.

It comes from npm and is no part of the tests' environment: tests that need it are skipped where it is not.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
from datetime import UTC, datetime, timedelta
from urllib.parse import quote, urlencode

import pytest

from tests.levels.servers.faulty import BUCKET, SECRET
from tests.levels.servers.spoken import SpokenServer, put_nothing

PROGRAM = shutil.which(os.environ.get("CKPT_AZURITE") or "azurite-blob") or ""
REASON = "missing: azurite-blob, on PATH or named by CKPT_AZURITE (npm install -g azurite; it needs node)"
ACCOUNT = "ckptaccount"
KEY = base64.b64encode(SECRET.encode()).decode()

_VERSION = "2019-12-12"
_OPTIONS = (
    *("--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"),
    *("--blobHost", "127.0.0.1", "--blobPort", "0"),
)

needs_azurite = pytest.mark.skipif(not PROGRAM, reason=REASON)


class AzuriteServer(SpokenServer):
    """See `SpokenServer`; keeps all in memory.

    Attributes:
        prefix: where the levels of a test are; tests that share a server set one of their own.
    """

    def __init__(self) -> None:
        self.prefix = "run"
        environ = {**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
        super().__init__([PROGRAM, *_OPTIONS], environ, says="listens on ")

    def begin(self) -> None:
        self.make_container(BUCKET)

    @property
    def endpoint(self) -> str:
        """Where the account is."""
        return f"http://127.0.0.1:{self.port}/{ACCOUNT}"

    def url(self, prefix: str | None = None) -> str:
        """A level here."""
        return f"az://{BUCKET}/{prefix or self.prefix}"

    def environ(self) -> dict[str, str]:
        """What a client has to find in its environment."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
        }

    def connection_string(self) -> str:
        """The same in one text, as Azure's portal gives it."""
        return (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
            f"BlobEndpoint={self.endpoint};"
        )

    def sas(self, permissions: str, *, hours: float = 1.0) -> str:
        """A shared access signature of the container: for those who have no key."""
        end = _after(hours)
        place = ("", end, f"/blob/{ACCOUNT}/{BUCKET}", "", "", "", _VERSION, "c", *[""] * 6)
        return _signed(
            {"sp": permissions, "se": end, "sv": _VERSION, "sr": "c"}, permissions, *place
        )

    def make_container(self, name: str) -> None:
        """A new container."""
        end = _after(1.0)
        fields = {"sp": "c", "ss": "b", "srt": "c", "se": end, "sv": _VERSION}
        token = _signed(fields, ACCOUNT, "c", "b", "c", "", end, "", "", _VERSION, "")
        put_nothing(f"{self.endpoint}/{name}?restype=container&{token}")


def _after(hours: float) -> str:
    return (datetime.now(UTC) + timedelta(hours=hours)).strftime("%Y-%m-%dT%H:%M:%SZ")


def _signed(fields: dict[str, str], *lines: str) -> str:
    """Fields of a query, and the signature of what they mean: Azure says which lines, in which order."""
    key = base64.b64decode(KEY)
    digest = base64.b64encode(hmac.digest(key, "\n".join(lines).encode(), hashlib.sha256))
    return urlencode({**fields, "sig": digest.decode()}, quote_via=quote)
