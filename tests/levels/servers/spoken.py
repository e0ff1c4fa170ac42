"""A server that is a program of others: it says on which port of loopback it listens."""

from __future__ import annotations

import re
import subprocess
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Self


class SpokenServer:
    """Serves from construction until `close`, on a port that the system chooses.

    Args:
        command: what is started.
        environ: its environment.
        says: what it prints ahead of its port.

    Attributes:
        port: where it listens.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], *, says: str) -> None:
        self._process = subprocess.Popen(
            command,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            self.port = self._port(says)
            self.begin()
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """Make what tests expect to be there."""

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _port(self, says: str) -> int:
        stdout = self._process.stdout
        assert stdout is not None
        said: list[str] = []
        for line in stdout:
            said.append(line)
            if match := re.search(rf"{says}http://127\.0\.0\.1:(\d+)", line):
                # What it says later must not fill the pipe and stop it.
                threading.Thread(target=stdout.read, daemon=True).start()
                return int(match[1])
        raise AssertionError("the server said no port: " + "".join(said))


def put_nothing(url: str) -> None:
    """An empty PUT, past any proxy."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    direct.open(urllib.request.Request(url, method="PUT"), timeout=30).close()
