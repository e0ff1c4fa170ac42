"""What copies the files of a step without an engine: `cp -r`, and rsync to a daemon on loopback."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_core.bench.meeting import free_port

CP, RSYNC = "cp", "rsync"
COPIES = (CP, RSYNC)
TITLES = {CP: "cp -r", RSYNC: "rsync -a"}
SETTINGS = {
    CP: "the files of one node's step, into memory",
    RSYNC: "the same, to a daemon on loopback that writes into memory; nothing is synced",
}

_STARTS_WITHIN_S = 10.0


def copy_seconds(tool: str, source: Path, into: Path) -> float | None:
    """How long a directory takes into another one, of which nothing is left; None: it is not installed."""
    if shutil.which(tool) is None:
        return None
    target = into / f"{tool}-{os.getpid()}"
    target.mkdir()
    try:
        if tool == CP:
            return _timed([CP, "-r", str(source), str(target)])
        with _daemon(target) as url:
            return _timed([RSYNC, "-a", str(source), url])
    finally:
        shutil.rmtree(target)


def _timed(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - began


@contextmanager
def _daemon(folder: Path) -> Iterator[str]:
    """The URL of a directory that rsync writes into."""
    port = free_port()
    config = folder / ".rsyncd.conf"
    user = f"uid = {os.getuid()}\ngid = {os.getgid()}\n" if os.getuid() == 0 else ""
    config.write_text(
        f"{user}use chroot = no\npid file = {folder}/.rsyncd.pid\nlog file = /dev/null\n"
        f"[kept]\npath = {folder}\nread only = no\n"
    )
    command = [RSYNC, "--daemon", "--no-detach", f"--config={config}"]
    with subprocess.Popen([*command, "--address=127.0.0.1", f"--port={port}"]) as daemon:
        try:
            _await(port)
            yield f"rsync://127.0.0.1:{port}/kept/"
        finally:
            daemon.terminate()


def _await(port: int) -> None:
    deadline = time.monotonic() + _STARTS_WITHIN_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
