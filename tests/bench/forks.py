"""Measured processes as forks of one that has imported what they would: most of what they do is to import.

    with forked("deepspeed"):
        quick_run(...)

Within it `Remote` asks a process that has imported these modules for a fork of itself, which serves requests
as `python -m ckpt_core.bench.serving` does, and ends as any Python does. A run that tries everything
(`CKPT_PLACES=all`) starts each process anew.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

from ckpt_core.bench import remote
from tests import places

_MODULE = "tests.bench.forks"
_MOST = 1 << 20
_ENDS_S = 60.0


@contextmanager
def forked(*modules: str) -> Iterator[None]:
    """Have each `Remote` be such a fork."""
    if places.run_number() == "all":
        yield
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", _MODULE, str(theirs.fileno()), *modules]
    server = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    started: list[Forked] = []

    def start(arguments: Sequence[str], **more: Any) -> Forked:
        started.append(Forked(ours, arguments, **more))
        return started[-1]

    instead = SimpleNamespace(**vars(subprocess) | {"Popen": start})
    try:
        with mock.patch.object(remote, "subprocess", instead):
            yield
    finally:
        ours.close()
        server.wait(_ENDS_S)
        for one in started:
            one.forget()


class Forked:
    """What `Remote` needs of a `Popen`."""

    def __init__(
        self,
        server: socket.socket,
        arguments: Sequence[str],
        *,
        stdin: int,
        stdout: IO[bytes],
        stderr: IO[bytes],
        env: Mapping[str, str],
        pass_fds: Sequence[int],
    ) -> None:
        assert stdin == subprocess.DEVNULL and stdout is stderr
        python, dash_m, module, *given, inherited = arguments
        assert (python, dash_m, module) == (sys.executable, "-m", "ckpt_core.bench.serving")
        assert [int(inherited)] == [*pass_fds]
        request = json.dumps({"given": given, "env": dict(env)}).encode()
        socket.send_fds(server, [request], [stdout.fileno(), *pass_fds])
        answer = server.recv(_MOST)
        assert answer, "the process that forks has died"
        self.pid = int(answer)
        # Before the server is told that it may reap: until then the number means this fork.
        self._open = os.pidfd_open(self.pid)
        server.send(b"seen")

    def wait(self, timeout: float) -> None:
        """Until it has ended."""
        if not select.select([self._open], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a fork", timeout)

    def kill(self) -> None:
        """As `Popen` does."""
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        """As `Popen` does."""
        self._send(signal.SIGTERM)

    def _send(self, which: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._open, which)

    def forget(self) -> None:
        """Nobody asks any more."""
        os.close(self._open)


# -- the process that forks ------------------------------------------------------------------------


def serve(asked: socket.socket) -> list[str] | None:
    """Fork for each request; None at the end, and in each fork the arguments that it shall serve with."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(asked, _MOST, 2)
        if not request:
            return None
        assert len(os.listdir("/proc/self/task")) == 1, "no thread survives a fork"
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pid = os.fork()
        if pid == 0:
            asked.close()
            return _become(json.loads(request), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        asked.send(str(pid).encode())
        assert asked.recv(_MOST)
        signal.signal(signal.SIGCHLD, _reap)
        _reap()


def _reap(*_: object) -> None:
    """Whoever has ended; their seconds are ours then, and our parent's."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become(request: dict[str, Any], log: int, connection: int) -> list[str]:
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["env"])
    return [*request["given"], str(connection)]


def main(descriptor: int, modules: Sequence[str]) -> None:
    """Serve until nobody asks any more."""
    import gc

    from ckpt_core.bench import serving

    for name in ("torch", "ckpt_core.checkpointer", *modules):
        importlib.import_module(name)
    gc.freeze()
    with socket.socket(fileno=descriptor) as asked:
        given = serve(asked)
    if given is not None:
        sys.modules["__main__"] = serving  # what processes that it spawns import
        serving.main(given)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
