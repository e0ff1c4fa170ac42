"""Python programs as forks of a process that has imported what they would: most of what they do is to import.

    with Forks("lightning.pytorch") as forks:
        process = forks.popen([sys.executable, "-m", "tests.a.program"], stdout=subprocess.PIPE)

A fork has a process id, an environment, a folder, pipes and an end of its own, as the command would have.
A run that tries everything (`CKPT_PLACES=all`) starts each anew.
"""

from __future__ import annotations

import atexit
import fcntl
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tests import places

_TOP = Path(__file__).parents[1]
_MOST = 1 << 20
_ENDS_S = 60.0
_ABOVE = 512
"""Descriptors that a fork is given come to lie above these, until each gets the number that it shall have."""


class Forks:
    """Starts programs that have imported these modules. A context manager; it starts when it is asked.

    Args:
        modules: none of them may start a thread.
        environ: variables that they read as they are imported.
    """

    def __init__(self, *modules: str, environ: Mapping[str, str] | None = None) -> None:
        self._modules = modules
        self._environ = {**os.environ, **(environ or {})}
        self._asked: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None

    def popen(self, command: Sequence[Any], **more: Any) -> subprocess.Popen[Any]:
        """What `subprocess.Popen` gives of a command of this Python, with no flag but "-W"."""
        words = [str(word) for word in command]
        if places.run_number() == "all":
            return subprocess.Popen(words, **more)
        assert words[0] == sys.executable, words
        return _Fork(self._ready(), words[1:], **more)

    def _ready(self) -> socket.socket:
        if self._asked is None:
            self._asked, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.forks", str(theirs.fileno()), *self._modules],
                cwd=_TOP,
                env=self._environ,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,  # as most forks have: Python looks once at what they are
                stdout=subprocess.PIPE,
            )
            theirs.close()
            atexit.register(self.close)
        return self._asked

    def close(self) -> None:
        """End the process that forks. At the end of this one, if it was forgotten."""
        asked, self._asked = self._asked, None
        if asked is not None and self._server is not None:
            asked.close()
            self._server.communicate(timeout=_ENDS_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Fork(subprocess.Popen[Any]):
    """A child of the process that forks, which tells its status."""

    def __init__(self, server: socket.socket, words: list[str], **more: Any) -> None:
        self._of, self._status = server, -1
        super().__init__(words, **more)

    def _execute_child(self, *given: Any) -> None:
        words, _, before, _, pass_fds, cwd, env, _, _, _, *pipes = given[:16]
        assert before is None, "nothing is called in a fork"
        self._status, told = os.pipe()
        ends = enumerate([pipes[0], pipes[3], pipes[5]])  # -1: ours
        descriptors = [*(number if end == -1 else end for number, end in ends), *pass_fds]
        request = {
            "words": words,
            "cwd": os.getcwd() if cwd is None else os.fspath(cwd),
            "env": dict(os.environ if env is None else env),
            "numbers": [0, 1, 2, *pass_fds],
            "session": given[21],
        }
        socket.send_fds(self._of, [json.dumps(request).encode()], [told, *descriptors])
        answer = self._of.recv(_MOST)
        assert answer, "the process that forks has died"
        self.pid, self._child_created = int(answer), True
        self._close_pipe_fds(*pipes[:6])  # type: ignore[attr-defined]
        os.close(told)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._status], [], [], 0)[0]:
            return 0, 0
        status = os.read(self._status, 16)
        os.close(self._status)
        assert status, "the process that forks has died"
        return self.pid, int(status)

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


# -- the process that forks ------------------------------------------------------------------------

_told: dict[int, int] = {}
"""Where the status of each fork is told."""


def _serve(asked: socket.socket) -> list[str] | None:
    """Fork for each request; None at the end, and in each fork the words of its command."""
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        request, (*descriptors,), _, _ = socket.recv_fds(asked, _MOST, 8)
        if not request:
            return None
        assert len(os.listdir("/proc/self/task")) == 1, "no thread survives a fork"
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        pid = os.fork()
        if pid == 0:
            asked.close()
            return _become(json.loads(request), *descriptors)
        _told[pid] = descriptors.pop(0)
        asked.send(str(pid).encode())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        for descriptor in descriptors:
            os.close(descriptor)


def _reap(*_: object) -> None:
    """Whoever has ended; their seconds are ours then, and our parent's."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            with suppress(BrokenPipeError):
                os.write(_told[found[0]], str(found[1]).encode())
            os.close(_told.pop(found[0]))


def _become(request: dict[str, Any], told: int, *descriptors: int) -> list[str]:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    for other in (told, *_told.values()):
        os.close(other)
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, _ABOVE) for each in descriptors]
    for number, each in zip(request["numbers"], moved, strict=True):
        os.dup2(each, number)
    for each in {*descriptors, *moved} - {*request["numbers"]}:
        os.close(each)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    if request["session"]:
        os.setsid()
    words: list[str] = request["words"]
    return words


def _run(words: list[str]) -> None:
    """As Python does with these words after its name."""
    asked_for = []
    while words[0] == "-W":
        asked_for.append(words[1])
        words = words[2:]
    sys.warnoptions += asked_for
    warnings._processoptions(asked_for)  # type: ignore[attr-defined]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main  # what processes that it spawns import
    if words[0] == "-m":
        sys.path[0], sys.argv = os.getcwd(), words[1:]
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    if words[0] == "-c":
        sys.path[0], sys.argv, path, code = os.getcwd(), ["-c", *words[2:]], "<string>", words[1]
    else:
        path, sys.argv = words[0], words
        sys.path[0], main.__file__, code = str(Path(path).parent), path, Path(path).read_text()
    exec(compile(code, path, "exec"), vars(main))


def _begin(descriptor: int, modules: Sequence[str]) -> list[str] | None:
    import gc

    for name in ("torch", "ckpt_core.checkpointer", *modules):
        importlib.import_module(name)
    gc.freeze()
    with socket.socket(fileno=descriptor) as asked:
        return _serve(asked)


if __name__ == "__main__":
    if (given := _begin(int(sys.argv[1]), sys.argv[2:])) is not None:
        _run(given)
