"""Moto's S3 server as a process of its own on loopback: what others think that S3 does. Slow."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import urllib.request
from importlib.util import find_spec
from typing import Self

import pytest

from tests.levels.servers.faulty import BUCKET, s3_environ

MISSING = [name for name in ("obstore", "moto", "flask_cors") if find_spec(name) is None]
REASON = f"missing: {', '.join(MISSING)} (pip install 'ckpt-core[remote]' 'moto[server]')"
REQUIRED = bool(os.environ.get("REQUIRE_INTEGRATIONS"))

needs_store = pytest.mark.skipif(bool(MISSING) and not REQUIRED, reason=REASON)
"""For every test that talks to an object store; where REQUIRE_INTEGRATIONS is set (nox) it fails instead."""


class MotoServer:
    """Serves from construction until `close`, on a port that the system chooses."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            self.port = self._port()
            self.make_bucket(BUCKET)
        except BaseException:
            self.close()
            raise

    def url(self, prefix: str = "run") -> str:
        """A level here."""
        return f"s3://{BUCKET}/{prefix}"

    def environ(self) -> dict[str, str]:
        """What a client has to find in its environment."""
        return s3_environ(self.port)

    def make_bucket(self, name: str) -> None:
        """A new bucket."""
        url = f"http://127.0.0.1:{self.port}/{name}"
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        direct.open(urllib.request.Request(url, method="PUT"), timeout=30).close()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _port(self) -> int:
        stderr = self._process.stderr
        assert stderr is not None
        said: list[str] = []
        for line in stderr:
            said.append(line)
            if match := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                # Its log goes on, and a full pipe would stop it.
                threading.Thread(target=stderr.read, daemon=True).start()
                return int(match[1])
        raise AssertionError("moto said no port: " + "".join(said))
