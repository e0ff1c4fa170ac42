"""The user's own program as it trains: started anew for each turn, watched through its file of events."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path

import psutil

from ckpt_core.errors import CkptError, ConfigError
from ckpt_core.options import ENV_PREFIX
from ckpt_core.policy import tuning
from ckpt_core.system.interrupts import Held, holding
from ckpt_core.tune.driver import NEVER, Driver, Turn
from ckpt_core.tune.events import Events
from ckpt_core.tune.settings import EVERY_MARK, ROOT_MARK, TuneSettings

_POLL_S = 0.05
_GRACE_S = 20.0
_LOG_LINES = 5
_NO_SAVES = 10**9
"""An interval that no turn lives to see."""


class Program(Driver):
    """Runs the command; each turn has a root of its own below `folder`, which is removed after it."""

    def __init__(self, folder: Path, settings: TuneSettings) -> None:
        self._folder = folder
        self._command = settings.command
        self._timeout_s = settings.timeout_s
        self._turns = 0
        self.chooses_interval = any(EVERY_MARK in part for part in settings.command)
        self.last = Events()

    def run(self, turn: Turn) -> tuning.Trace:
        """Start the program, watch it until the turn is over, and end it."""
        self._turns += 1
        folder = self._folder / f"turn-{self._turns}"
        folder.mkdir()
        try:
            events = self._watch(turn, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        os.sync()
        self.last = events
        return events.trace()

    def close(self) -> None:
        """Nothing runs between turns."""

    def _watch(self, turn: Turn, folder: Path) -> Events:
        path, log_path = folder / "events.jsonl", folder / "output.txt"
        environ = os.environ | {f"{ENV_PREFIX}EVENTS_FILE": str(path)}
        if turn.candidate is not None:
            environ |= dict(line.split("=", 1) for line in tuning.as_environment(turn.candidate))
        events = Events()
        with log_path.open("wb") as log, holding() as held:
            process = _start(self._arguments(turn, folder / "root"), environ, log.fileno())
            try:
                with held.allowed():
                    self._follow(process, events, path, turn)
            finally:
                _end(process, held)
        if not _is_over(events, turn):
            # It ended by itself, perhaps with its last save.
            events.read(path)
        self._judge(events, turn, process, log_path)
        return events

    def _arguments(self, turn: Turn, root: Path) -> list[str]:
        every = str(_NO_SAVES if turn.every == NEVER else turn.every)
        return [
            part.replace(ROOT_MARK, str(root)).replace(EVERY_MARK, every) for part in self._command
        ]

    def _follow(
        self, process: subprocess.Popen[bytes], events: Events, path: Path, turn: Turn
    ) -> None:
        """Until the turn is over, the program has ended, or it shows no sign of life."""
        seen, alive_s = 0, time.monotonic()
        while not _has_ended(process) and not _is_over(events, turn):
            time.sleep(_POLL_S)
            events.read(path)
            if events.lines > seen:
                seen, alive_s = events.lines, time.monotonic()
                if turn.candidate is not None:
                    check_obeyed(events, turn.candidate)
            elif time.monotonic() - alive_s > self._timeout_s:
                raise ConfigError(
                    f"the program told nothing for {self._timeout_s:g} s: raise --timeout-s if it takes "
                    f"so long, or run the command by hand; {_NO_EVENTS if not seen else 'it hangs'}"
                )

    def _judge(
        self, events: Events, turn: Turn, process: subprocess.Popen[bytes], log_path: Path
    ) -> None:
        """Raise for a turn that is worth nothing."""
        if events.failure:
            raise CkptError(f"a save of the program failed: {events.failure}")
        if _is_over(events, turn):
            return
        lines = log_path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        said = f"; its last words: {' | '.join(lines)}" if lines else ""
        if process.returncode:
            raise ConfigError(f"the program ended with {process.returncode}{said}")
        if not events.lines:
            raise ConfigError(f"the program ended, and {_NO_EVENTS}{said}")
        had = f"{events.commits} commits and {events.barriers} barriers"
        need = f"{turn.saves} commits" if turn.saves else f"{turn.iterations + 1} barriers"
        raise ConfigError(
            f"the program ended after {had}, and a turn needs {need}: let it train for more steps, or "
            f"save more often ({EVERY_MARK} in the command lets the tuner choose)"
        )


_NO_EVENTS = (
    "it wrote no events, which a Checkpointer does that is made with Options.from_env(), since the "
    "tuner hands its settings over in CKPT_CORE_* variables"
)


def check_obeyed(events: Events, candidate: tuning.Candidate) -> None:
    """Raise ConfigError when the program sets by itself what the tuner is to choose."""
    for name, value in tuning.as_values(candidate).items():
        found = events.options.get(name, value)
        if found != value:
            raise ConfigError(
                f"the program sets {name}={found!r} itself, where {ENV_PREFIX}{name.upper()} says {value}: "
                f"leave it to Options.from_env(), or tune the rest with --{name.replace('_', '-')} {found}"
            )


def _is_over(events: Events, turn: Turn) -> bool:
    if turn.saves:
        return events.commits >= turn.saves or bool(events.failure)
    return events.barriers > turn.iterations


def _start(arguments: list[str], environ: dict[str, str], log: int) -> subprocess.Popen[bytes]:
    try:
        # A group of its own: Ctrl-C comes to the tuner alone, which then ends the program.
        return subprocess.Popen(
            arguments,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    except OSError as exc:
        raise ConfigError(f"the command {arguments[0]!r} cannot be run: {exc.strerror}") from exc


def _end(process: subprocess.Popen[bytes], held: Held) -> None:
    """End the program and whatever it has started: asked first, made to after a while, or on Ctrl-C."""
    family = _family(process)
    process.terminate()
    try:
        with held.allowed():
            _await_end(process)
    finally:
        process.kill()
        process.wait()
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, timeout=_GRACE_S)


def _await_end(process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _GRACE_S
    while not _has_ended(process) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Not by `poll`: Ctrl-C within it may leave its lock taken, and `wait` would never return."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    reaped = process.returncode is not None
    return reaped or os.waitid(os.P_PID, process.pid, flags) is not None


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        return list(psutil.Process(process.pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []
