"""The parent's side of one Horovod job: launched once, it trains whatever it is told, until it is closed.

    horovodrun --gloo -np 2 worker     the ranks call back over a local socket and are given requests

Every request goes to all ranks at once, so that an error on one of them is known at once too, and none of
them spins in a broadcast while it has nothing to do.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

from ckpt_core.bench.remote import ContenderFailed, Line, environment_for_children, log_tail
from ckpt_core.bench.team import Team

RANKS = 2
"""More than this machine may have cores would measure the cores; fewer have nothing to reduce."""

ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
_MODULE = "ckpt_horovod_tools.bench.worker"
# What the script `horovodrun` runs, with this interpreter, and with no cache in the user's home.
_LAUNCHER = (sys.executable, "-m", "horovod.runner.launch", "--gloo", "--disable-cache")
_GRACE_S = 30.0
_KILL_GRACE_S = 15.0
"""Horovod's launcher gives its ranks 5 s to end."""

_PEER = struct.Struct("iII")


class Pair(Team):
    """Running ranks. Close it, or use it in a `with` block.

    Attributes:
        joined: what the ranks said when they had come.
    """

    def __init__(self, name: str, folder: Path, timeout_s: float) -> None:
        """Launch the job; returns when all ranks have called back.

        Args:
            name: not used: the ranks serve every way.
            folder: existing, empty directory of this job.
            timeout_s: deadline of the start, and of each request.

        Raises:
            ContenderFailed: the launcher ended, or a rank did not come.
        """
        super().__init__(folder / "files", timeout_s)
        self._log = folder / "horovodrun.log"
        self._lines: dict[int, Line] = {}
        self._ranks: dict[int, _Process] = {}
        self.root.mkdir()
        # Not below `folder`: the name of a socket has a hundred characters at most.
        with tempfile.TemporaryDirectory(prefix="ckpt-core-bench-") as private:
            address = os.path.join(private, "ranks")
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                listener.listen(RANKS)
                self._launcher = self._launch(address)
                try:
                    self._meet(listener)
                    self.joined = self.ask("hello")
                except BaseException:
                    self.kill()
                    raise

    def _launch(self, address: str) -> subprocess.Popen[bytes]:
        worker = (sys.executable, "-m", _MODULE, str(self.root), address)
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*_LAUNCHER, "-np", str(RANKS), *worker],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment_for_children(ENVIRONMENT),
                start_new_session=True,
            )

    def _meet(self, listener: socket.socket) -> None:
        """Wait for all ranks to call back."""
        deadline = time.monotonic() + self.timeout_s
        ended = os.pidfd_open(self._launcher.pid)
        try:
            while len(self._lines) < RANKS:
                ready = wait([listener, ended], max(0.0, deadline - time.monotonic()))
                if listener in ready:
                    self._welcome(listener, deadline)
                elif ready:
                    raise ContenderFailed(f"horovodrun ended at the start: {log_tail(self._log)}")
                else:
                    missing = RANKS - len(self._lines)
                    raise ContenderFailed(
                        f"{missing} of {RANKS} ranks did not come in {self.timeout_s:.0f} s"
                    )
        finally:
            os.close(ended)

    def _welcome(self, listener: socket.socket, deadline: float) -> None:
        accepted, _ = listener.accept()
        told = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        process = _Process(_PEER.unpack(told)[0])
        connection = Connection(accepted.detach())
        try:
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                raise ContenderFailed("a rank came and did not say which one it is")
            rank: int = json.loads(connection.recv_bytes())["rank"]
        except (ContenderFailed, EOFError, OSError) as exc:
            connection.close()
            process.kill()
            raise ContenderFailed(f"a rank ended at the start: {log_tail(self._log)}") from exc
        self._ranks[rank] = process
        self._lines[rank] = Line(
            f"rank-{rank}", connection, timeout_s=self.timeout_s, log=self._log
        )

    @property
    def lines(self) -> list[Line]:
        """To the ranks, in their order."""
        return [self._lines[rank] for rank in sorted(self._lines)]

    @property
    def pids(self) -> list[int]:
        """Processes in rank order."""
        return [self._ranks[rank].pid for rank in sorted(self._ranks)]

    def kill(self) -> None:
        """End launcher and ranks, whatever they wait for; idempotent."""
        self._hang_up()
        while self._ranks:
            self._ranks.popitem()[1].kill()
        if self._launcher.poll() is None:
            # With its ranks gone it ends by itself, and it ends those that had not come yet.
            self._launcher.terminate()
            self._end_launcher(_KILL_GRACE_S)

    def close(self) -> None:
        """Let all ranks end; idempotent."""
        self._hang_up()
        with suppress(subprocess.TimeoutExpired):  # whatever they wait for, they only have to end
            self._launcher.wait(_GRACE_S)
        self.kill()

    def _hang_up(self) -> None:
        while self._lines:
            self._lines.popitem()[1].close()

    def _end_launcher(self, grace_s: float) -> None:
        try:
            self._launcher.wait(grace_s)
        except subprocess.TimeoutExpired:
            # It leads its own group; those of its ranks end when they find it gone.
            os.killpg(self._launcher.pid, signal.SIGKILL)
            self._launcher.wait()


class _Process:
    """A rank, which is no child of this process: held by a descriptor, so that its number means it alone."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def kill(self) -> None:
        """End it if it still runs. Called once."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)
        os.close(self._fd)
