"""A process with torch imported and one thread, whose forked children may die cheaply.

`python -m tests.crash.warm` reads one request a line and answers one a line; `Warm` is its other end.
Each request runs in a child of its own, so that the warm process never gets a second thread.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

CHILD_LIMIT_S = 60
"""A child that lives longer hangs: SIGALRM ends it, and the test fails."""


def forked(action: Callable[[], None]) -> tuple[int, str]:
    """Run `action` in a forked child; the signal that ended it (0: none) and what went wrong."""
    with tempfile.TemporaryFile() as log:
        pid = os.fork()
        if pid == 0:
            _run_child(action, log)
        _, status = os.waitpid(pid, 0)
        log.seek(0)
        text = log.read().decode(errors="replace")
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status), text
    if os.WEXITSTATUS(status) != 0:
        return 0, text or f"the child ended with {os.WEXITSTATUS(status)}"
    return 0, ""


def _run_child(action: Callable[[], None], log: Any) -> None:
    code = 1
    try:
        signal.alarm(CHILD_LIMIT_S)
        action()
        code = 0
    except BaseException:
        log.write(traceback.format_exc().encode())
        log.flush()
    finally:
        os._exit(code)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Call `module:function` with the arguments of a request, in a child."""

    def action() -> None:
        signal.alarm(0)
        module, _, name = request["call"].partition(":")
        result = getattr(importlib.import_module(module), name)(**request["arguments"])
        json.dump(result, told)
        told.flush()

    # No pipe: the child is waited for before anything is read, and one holds no more than 64 KiB.
    with tempfile.TemporaryFile("w+") as told:
        sent, problem = forked(action)
        told.seek(0)
        text = told.read()
    return {"signal": sent, "problem": problem, "result": json.loads(text) if text else []}


class Warm:
    """Starts the warm process and talks to it. A context manager.

    Args:
        modules: imported there too, none of which may start a thread.
        environ: variables of that process.
    """

    def __init__(self, *modules: str, environ: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.warm", *modules],
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environ or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(self, function: str, **arguments: Any) -> Any:
        """What `module:function(**arguments)` returned there; AssertionError with its traceback."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"call": function, "arguments": arguments}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the warm process has died"
        reply = json.loads(line)
        assert not reply["problem"] and not reply["signal"], reply["problem"] or reply
        return reply["result"]

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)


def main() -> None:
    """Serve requests until the other end closes."""
    import torch

    from tests.crash import killing
    from tests.crash.promises import quiet

    assert killing is not None  # imported once, here, and not in every child
    torch.set_num_threads(1)
    quiet()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a stray print must not look like an answer
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # no child need look for garbage among what is imported
    for line in sys.stdin:
        out.write(json.dumps(answer(json.loads(line))) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
