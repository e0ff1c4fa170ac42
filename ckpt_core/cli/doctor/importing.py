"""The process that imports, run by its path: torch once, then a child for each program, which has it already.

    python importing.py '{"name": "program", ...}' SECONDS

One line of JSON on standard output for each child that has ended: its name, status, output and errors. Where
torch cannot be imported, nothing can be that needs it: this process ends as the import does.
"""

import gc
import json
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any, BinaryIO

MARK = "ckpt-core doctor: "
"""In front of what is told, between what imports print."""

_POLL_S = 0.01


def main() -> None:
    """Import, fork, and tell."""
    programs: dict[str, str] = json.loads(sys.argv[1])
    until_s = time.monotonic() + float(sys.argv[2])
    gc.disable()  # imports make hundreds of thousands of objects, and hardly a cycle
    import torch  # noqa: F401

    with suppress(Exception):  # it fails again where it is needed, and is told there
        from ckpt_core import Checkpointer  # noqa: F401
    gc.freeze()  # so that no child looks at these, which would copy their pages
    running: dict[int, tuple[str, BinaryIO, BinaryIO]] = {}
    for name, program in programs.items():
        out, err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 - closed by _tell
        child = os.fork()
        if child == 0:
            return _import(program, out, err)
        running[child] = (name, out, err)
    while running and time.monotonic() < until_s:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in running:
            _tell(*running.pop(child), os.waitstatus_to_exitcode(status))
        else:
            time.sleep(_POLL_S)
    for child in running:
        os.kill(child, signal.SIGKILL)


def _import(program: str, out: BinaryIO, err: BinaryIO) -> None:
    """Run a program; this process, a child, ends as the program lets it."""
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    sys.argv = ["-c"]
    told: dict[str, Any] = {}
    exec(program, {"__name__": "__main__", "told": told})
    gc.freeze()  # likewise, as this process ends
    sys.stdout.write(f"\n{MARK}{json.dumps(told)}\n")


def _tell(name: str, out: BinaryIO, err: BinaryIO, code: int) -> None:
    said = []
    for file in (out, err):
        file.seek(0)
        said.append(file.read().decode(errors="replace"))
        file.close()
    print(f"\n{MARK}{json.dumps([name, code, *said])}", flush=True)


if __name__ == "__main__":
    main()
