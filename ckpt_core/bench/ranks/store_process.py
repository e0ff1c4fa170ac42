"""A TCPStore in a process of its own, whose processor time can be read from outside.

Started as `python -m ckpt_core.bench.ranks.store_process`; it prints its port and ends with its input.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from ckpt_core.bench.closing import Closing
from ckpt_core.bench.meeting import connected, host_store
from ckpt_core.bench.remote import environment_for_children

_GRACE_S = 30.0


class StoreProcess(Closing):
    """The running store. Close it, or use it in a `with` block."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment_for_children(),
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def client(self) -> Any:
        """A new connection to it."""
        return connected(self.port, wait=False)

    def cpu_s(self) -> float:
        """Processor time that it has used so far."""
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")
        return sum([int(task.read_text().split()[0]) for task in tasks]) * 1e-9

    def close(self) -> None:
        """End it; idempotent."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def main() -> None:
    """Entry of the process."""
    store = host_store()
    print(store.port, flush=True)
    sys.stdin.read()
    del store


if __name__ == "__main__":
    main()
