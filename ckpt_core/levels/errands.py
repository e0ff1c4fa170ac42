"""What the process that trains has done by another one: whatever needs a connection to a further level.

    answer = run_errand("steps", {"url": "s3://bucket/run"}, timeout_s=30)

A client of an object store has threads of its own, and a process that trains may fork at any time (loaders of
data do). So each such call is made by a fresh Python that imports no torch, takes a request from its
standard input, says how far it is in lines on its standard output, and gives its answer in the last one.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ckpt_core.errors
from ckpt_core.errors import CkptError, ConfigError, CorruptCheckpoint
from ckpt_core.levels.far import Away

Json = Any
Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""

_ERRANDS = {
    "check": "ckpt_core.levels.claiming:check",
    "claim": "ckpt_core.levels.claiming:claim",
    "steps": "ckpt_core.levels.bringing:steps",
    "bring": "ckpt_core.levels.bringing:bring",
    "directory": "ckpt_core.levels.named_bringing:serve",
}
"""What can be asked for: a function of the request and a `Progress`, whose answer is JSON."""

_END_S = 5.0


def run_errand(
    name: str, request: Json, *, timeout_s: float, progress: Progress | None = None
) -> Json:
    """Have something done by a process of its own, and wait for it.

    Args:
        timeout_s: longest time without a word from it.
        progress: told how far it is, on a thread of this call.

    Raises:
        CkptError: what it raised there, of the same class where that needs no more than a text; `Away` when
            it said nothing for `timeout_s`, or died.
    """
    arguments, environ = child("errand", name)
    process = subprocess.Popen(
        arguments,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C in the terminal is for whoever waits
    )
    try:
        return _converse(process, name, request, timeout_s, progress)
    finally:
        _end(process)


def serve_errand(name: str) -> int:
    """The other side: called by `python -m ckpt_core.levels errand NAME`; the exit status."""
    request = json.loads(sys.stdin.buffer.read())
    try:
        answer = errand(name)(request, _tell_progress)
    except CkptError as exc:
        hopeless = isinstance(exc, Away) and exc.hopeless
        about = {"error": type(exc).__name__, "text": str(exc), "hopeless": hopeless}
        _say({**about, "path": None if exc.path is None else str(exc.path)})
        return 1
    _say({"answer": answer})
    return 0


def errand(name: str) -> Callable[[Json, Progress], Json]:
    """What is done for an errand, to be done here: where no client of an object store is needed."""
    module, _, function = _ERRANDS[name].partition(":")
    found: Callable[[Json, Progress], Json] = getattr(importlib.import_module(module), function)
    return found


def child(*arguments: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment of `python -m ckpt_core.levels ...`, with this very release of ours."""
    home = str(Path(ckpt_core.errors.__file__).resolve().parents[1])
    paths = [home, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return [sys.executable, "-m", "ckpt_core.levels", *arguments], environ


# -- inside ----------------------------------------------------------------------------------------


def _converse(
    process: subprocess.Popen[bytes],
    name: str,
    request: Json,
    timeout_s: float,
    progress: Progress | None,
) -> Json:
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    last: dict[str, Any] = {}
    spoken = threading.Event()
    errors: list[bytes] = []

    def listen() -> None:
        for line in process.stdout or ():
            word = json.loads(line)
            if "done" in word and progress is not None:
                try:
                    progress(word["done"], word["total"])
                except Exception:  # nobody waits any more
                    process.kill()
                    return
            last.update(word)
            spoken.set()

    def drain() -> None:
        errors.extend(process.stderr or ())

    threads = [threading.Thread(target=target, daemon=True) for target in (listen, drain)]
    for thread in threads:
        thread.start()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(request).encode())
        process.stdin.close()
    while True:
        spoken.clear()
        threads[0].join(0.0 if last.keys() & {"answer", "error"} else min(timeout_s, 0.05))
        if not threads[0].is_alive() or last.keys() & {"answer", "error"}:
            break
        if not spoken.wait(timeout_s):
            raise Away(f"nothing was heard of {name!r} for {timeout_s:g} s: it was given up")
    if "answer" in last:
        return last["answer"]
    if "error" in last:
        raise _error(last)
    threads[1].join(_END_S)
    said = b"".join(errors[-5:]).decode(errors="replace").strip()
    raise Away(f"the process for {name!r} died: {said or 'it said nothing'}")


def _error(last: dict[str, Any]) -> CkptError:
    kind = getattr(ckpt_core.errors, last["error"], None)
    if kind is ConfigError:
        return ConfigError(last["text"])
    if kind is CorruptCheckpoint:
        return CorruptCheckpoint(last["text"], path=last.get("path") or "")
    if last["error"] == "Away" or kind is None:
        return Away(last["text"], hopeless=bool(last.get("hopeless")))
    with contextlib.suppress(TypeError):
        error = kind(last["text"])
        assert isinstance(error, CkptError)
        return error
    return CkptError(last["text"])


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _tell_progress(done: int, total: int) -> None:
    _say({"done": done, "total": total})


def _say(word: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(word) + "\n")
    sys.stdout.flush()
