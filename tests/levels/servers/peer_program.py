"""A peer that is killed ahead of its n-th file operation: `peer_program.py N COUNT DIR --bind ... FILE`.

How many operations there have been is written to COUNT, before each. A kill of a process loses nothing that
was written, synced or not: so it does not wait for the disk.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from ckpt_core.levels import PeerServer, parse_address, read_keys
from tests.store.harness import QuickFiles, interrupted


def main(n: int, count_file: Path, folder: Path, address: str, token: Path) -> None:
    """Serve until killed."""
    lock, count = threading.Lock(), 0

    def before(name: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        with lock:
            if count == n:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            count_file.write_text(str(count))

    files = interrupted(QuickFiles, before)
    with PeerServer(folder, read_keys(token), parse_address(address), files=files) as server:
        print(f"serving at http://{server.address}", flush=True)
        signal.pause()


if __name__ == "__main__":
    number, where, kept, _, bind, _, secret = sys.argv[1:]
    main(int(number), Path(where), Path(kept), bind, Path(secret))
