"""Moto's S3 server as a process of its own on loopback: what others think that S3 does. Slow."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import pytest

from tests.levels.servers.faulty import BUCKET, s3_environ
from tests.levels.servers.spoken import SpokenServer, put_nothing

MISSING = [name for name in ("obstore", "moto", "flask_cors") if find_spec(name) is None]
REASON = f"missing: {', '.join(MISSING)} (pip install 'ckpt-core[remote]' 'moto[server]')"
REQUIRED = bool(os.environ.get("REQUIRE_INTEGRATIONS"))

needs_store = pytest.mark.skipif(bool(MISSING) and not REQUIRED, reason=REASON)
"""For every test that talks to an object store; where REQUIRE_INTEGRATIONS is set (nox) it fails instead."""


class MotoServer(SpokenServer):
    """See `SpokenServer`."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        super().__init__(command, os.environ, says="")

    def begin(self) -> None:
        self.make_bucket(BUCKET)

    def url(self, prefix: str = "run") -> str:
        """A level here."""
        return f"s3://{BUCKET}/{prefix}"

    def environ(self) -> dict[str, str]:
        """What a client has to find in its environment."""
        return s3_environ(self.port)

    def make_bucket(self, name: str) -> None:
        """A new bucket."""
        put_nothing(f"http://127.0.0.1:{self.port}/{name}")
