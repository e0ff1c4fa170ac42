"""What the process that trains has done by another one: whatever needs a connection to a further level.

    errands = Errands()
    answer = errands.run("steps", {"levels": ["s3://bucket/run"], ...}, timeout_s=30)
    errands.close()

A client of an object store has threads of its own, and a process that trains may fork at any time (loaders of
data do). So each such call is made by a fresh Python that imports no torch. It takes requests, a line each,
from its standard input, says how far it is on its standard output, and gives its answer in the last line.
Starting it takes longer than most errands: it is kept for the next one for a while.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import ckpt_core.errors
from ckpt_core.errors import CkptError, ConfigError, CorruptCheckpoint
from ckpt_core.levels.far.door import Away
from ckpt_core.system.interrupts import holding

Json = Any
Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""

_ERRANDS = {
    "check": "ckpt_core.levels.claiming:check",
    "claim": "ckpt_core.levels.claiming:claim",
    "steps": "ckpt_core.levels.bring.bringing:steps",
    "times": "ckpt_core.levels.bring.bringing:times",
    "bring": "ckpt_core.levels.bring.bringing:bring",
    "directory": "ckpt_core.levels.bring.named_bringing:serve",
}
"""What can be asked for: a function of the request and a `Progress`, whose answer is JSON."""

KEPT_S = 30.0
"""How long a process that has nothing to do is kept: 40 MB, and the time that starting another one takes."""

_END_S = 5.0
_LAST = {"answer", "error"}
_LAST_WORDS_BYTES = 4096


class Errands:
    """Has things done by a process of its own, one at a time, and keeps it for the next. Starts nothing."""

    def __init__(self) -> None:
        self._idle: list[_Process] = []
        self._home = Home()

    def run(
        self, name: str, request: Json, *, timeout_s: float, progress: Progress | None = None
    ) -> Json:
        """Have something done, and wait for it. A Ctrl-C comes out of the waiting, and ends the process.

        Args:
            timeout_s: longest time without a word from it.
            progress: told how far it is, on a thread of this call.

        Raises:
            CkptError: what it raised there, of the same class where that needs no more than a text; `Away`
                when it said nothing for `timeout_s`, or died.
        """
        with holding() as held:
            process = self._taken() or _Process.start(self._home)
            try:
                with held.allowed():
                    last = _converse(process, name, request, timeout_s, progress)
                self._idle.append(process)
            except BaseException:
                process.end()
                raise
            process.rested_s = time.monotonic()
        if "answer" in last:
            return last["answer"]
        raise _error(last)

    def look(self) -> None:
        """End the process if nothing was asked of it for long. Called now and then, by any thread."""
        process = self._taken()
        if process is None:
            return
        if time.monotonic() - process.rested_s < KEPT_S:
            self._idle.append(process)
        else:
            process.end()

    def close(self) -> None:
        """End the process. Idempotent; it may be used again."""
        with holding():
            while (process := self._taken()) is not None:
                process.end()

    def _taken(self) -> _Process | None:
        """The one that is kept, if it lives."""
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread was faster
                process = self._idle.pop()
                if process.popen.poll() is None:
                    return process
                process.end()
        return None


def run_errand(
    name: str, request: Json, *, timeout_s: float, progress: Progress | None = None
) -> Json:
    """One errand, by a process that ends with it. As `Errands.run`."""
    errands = Errands()
    try:
        return errands.run(name, request, timeout_s=timeout_s, progress=progress)
    finally:
        errands.close()


def serve_errands() -> int:
    """The other side: called by `python -m ckpt_core.levels errands`; ends with its input."""
    for line in sys.stdin.buffer:
        asked = json.loads(line)
        try:
            _say({"answer": errand(asked["name"])(asked["request"], _tell_progress)})
        except CkptError as exc:
            hopeless = isinstance(exc, Away) and exc.hopeless
            about = {"error": type(exc).__name__, "text": str(exc), "hopeless": hopeless}
            _say({**about, "path": None if exc.path is None else str(exc.path)})
        # While nobody waits: what a restore, which often follows, would wait for.
        errand("bring")
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
    # Not what lies where the program is at work: a `secrets.py` there is no module of Python's.
    return [sys.executable, "-P", "-m", "ckpt_core.levels", *arguments], environ


class Home:
    """Where this process works now. Names in the environment, as that of a token's file, may begin there, so
    that what is started later is started there, wherever the program has gone since."""

    def __init__(self) -> None:
        self._path: str | None = None
        with contextlib.suppress(OSError):  # it has been removed
            self._path = os.getcwd()

    def path(self) -> str | None:
        """As `subprocess.Popen` takes it; None where it is no more."""
        return self._path if self._path and os.path.isdir(self._path) else None


# -- inside ----------------------------------------------------------------------------------------


@dataclass
class _Process:
    """A process that does errands.

    Attributes:
        popen: its pipes.
        said: a file in memory with what it has said of itself: why it died.
        rested_s: since when it has nothing to do.
    """

    popen: subprocess.Popen[bytes]
    said: int
    rested_s: float = 0.0

    @classmethod
    def start(cls, home: Home) -> _Process:
        arguments, environ = child("errands")
        said = os.memfd_create("errands")
        try:
            popen = subprocess.Popen(
                arguments,
                env=environ,
                cwd=home.path(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                start_new_session=True,  # a Ctrl-C in the terminal is for whoever waits
            )
        except BaseException:
            os.close(said)
            raise
        return cls(popen, said)

    def end(self) -> None:
        """At once. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            if self.popen.poll() is None:
                self.popen.kill()
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        said, self.said = self.said, -1
        if said >= 0:
            os.close(said)

    def last_words(self) -> str:
        size = os.fstat(self.said).st_size
        said = os.pread(self.said, _LAST_WORDS_BYTES, max(0, size - _LAST_WORDS_BYTES))
        return b"".join(said.splitlines(keepends=True)[-5:]).decode(errors="replace").strip()


def _converse(
    process: _Process, name: str, request: Json, timeout_s: float, progress: Progress | None
) -> dict[str, Any]:
    """Ask for an errand; the last that is heard of it: an `answer` or an `error`."""
    popen = process.popen
    assert popen.stdin is not None and popen.stdout is not None
    # Danger: an interrupt in the wait of an Event leaves its lock as it should not be; here it cannot.
    words: SimpleQueue[dict[str, Any] | None] = SimpleQueue()

    def listen() -> None:
        try:
            for line in popen.stdout or ():
                word = json.loads(line)
                if "done" in word and progress is not None:
                    progress(word["done"], word["total"])
                words.put(word)
                if word.keys() & _LAST:
                    break
        except Exception:  # nobody waits any more; or it was killed in the middle of a word
            popen.kill()
        words.put(None)

    thread = threading.Thread(target=listen, name="ckpt-errand", daemon=True)
    thread.start()
    with contextlib.suppress(BrokenPipeError):
        popen.stdin.write(json.dumps({"name": name, "request": request}).encode() + b"\n")
        popen.stdin.flush()
    try:
        while (word := words.get(timeout=timeout_s)) is not None:
            if word.keys() & _LAST:
                return word
    except Empty:
        text = f"nothing was heard of {name!r} for {timeout_s:g} s: it was given up"
        raise Away(text) from None
    with contextlib.suppress(subprocess.TimeoutExpired):
        popen.wait(_END_S)
    said = process.last_words() or "it said nothing"
    raise Away(f"the process for {name!r} died: {said}")


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


def _tell_progress(done: int, total: int) -> None:
    _say({"done": done, "total": total})


def _say(word: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(word) + "\n")
    sys.stdout.flush()
