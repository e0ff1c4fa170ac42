"""Ctrl-C and SIGTERM at every line of what owns processes and folders: they come once, and leave neither."""

from __future__ import annotations

import gc
import itertools
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

from ckpt_core.bench import machine
from ckpt_core.errors import ConfigError
from ckpt_core.system import interrupts
from ckpt_core.system.interrupts import Terminated, holding, terminated_as_by_ctrl_c
from ckpt_core.tune import program, running
from ckpt_core.tune.settings import TuneSettings
from tests.interrupts.commands import end_at_a_step

OURS = [module.__file__ for module in (running, program, interrupts)]
ENDLESS, SHORT = "import time; time.sleep(600)", "pass"

both = pytest.mark.parametrize(
    ("number", "end"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")]
)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def in_destructor(frame: FrameType | None) -> bool:
    """Whether Python itself would drop what is raised here."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


class CtrlC:
    """A signal at the n-th line of these files."""

    def __init__(self, files: list[str], line: int, number: int = signal.SIGINT) -> None:
        self._files, self._left, self._number = files, line, number

    @property
    def sent(self) -> bool:
        """Whether there were so many lines."""
        return self._left <= 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in self._files or in_destructor(frame):
            return None
        if event == "line":
            self._left -= 1
            if self._left == 0:
                signal.raise_signal(self._number)
        return self

    def within(self, run: Callable[[], object]) -> str:
        """How `run` ended."""
        before = handlers()
        # Else the lines of a generator that is closed as garbage count, where Python drops what is raised.
        gc.disable()
        try:
            with terminated_as_by_ctrl_c():
                try:
                    sys.settrace(self)
                    run()
                finally:
                    sys.settrace(None)
        except Terminated:
            return "terminated"
        except KeyboardInterrupt:
            return "interrupted"
        except ConfigError:
            return "failed"
        finally:
            gc.enable()
            assert handlers() == before
        return "done"


def tune_at(
    line: int, disk: Path, code: str, files: list[str], number: int = signal.SIGINT
) -> tuple[bool, str]:
    """Whether the signal was sent, and how the tuner ended; nothing of it is left."""
    settings = TuneSettings(root=disk, command=(sys.executable, "-I", "-S", "-c", code, "{root}"))
    before = psutil.Process().children(recursive=True)
    ctrl_c = CtrlC(files, line, number)
    how = ctrl_c.within(lambda: running.tune(settings))
    left = [one for one in psutil.Process().children(recursive=True) if one not in before]
    for process in left:
        process.kill()
    assert (left, list(disk.iterdir())) == ([], []), f"left by Ctrl-C at line {line}"
    return ctrl_c.sent, how


@pytest.mark.parametrize(("code", "most"), [(ENDLESS, 90), (SHORT, 1000)])
@both
def test_the_tuner_leaves_nothing_at_whatever_line_it_is_interrupted(
    tmp_path: Path, code: str, most: int, number: int, end: str
) -> None:
    for line in range(1, most):
        sent, how = tune_at(line, tmp_path, code, OURS, number)
        assert how == (end if sent else "failed"), line
        if not sent:
            break
    assert line > 60


def test_a_program_that_is_just_being_started_is_ended_too(tmp_path: Path) -> None:
    for line in itertools.count(1, 9):
        sent, how = tune_at(line, tmp_path, SHORT, [subprocess.__file__])
        if not sent:
            break
        assert how == "interrupted"
    assert line > 60


@both
def test_the_folder_of_a_benchmark_goes_at_whatever_line_it_is_interrupted(
    tmp_path: Path, number: int, end: str
) -> None:
    def work() -> None:
        with machine.work_folder(tmp_path) as folder:
            (folder / "file").touch()

    for line in itertools.count(1):
        ctrl_c = CtrlC([machine.__file__, interrupts.__file__, __file__], line, number)
        how = ctrl_c.within(work)
        assert list(tmp_path.iterdir()) == []
        assert how == (end if ctrl_c.sent else "done")
        if not ctrl_c.sent:
            break
    assert line > 10


def test_ctrl_c_that_is_ignored_stays_so_and_sigterm_comes() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with holding() as held, held.allowed():
            signal.raise_signal(signal.SIGINT)
        with terminated_as_by_ctrl_c(), holding() as held:
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(Terminated), held.allowed():
                raise AssertionError("it was noted, and comes before this")
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_what_somebody_else_makes_of_sigterm_is_not_put_off_and_stays(when: str) -> None:
    came: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = signal.getsignal(signal.SIGTERM)
    try:
        if when == "before":
            signal.signal(signal.SIGTERM, handle)
        with terminated_as_by_ctrl_c():
            signal.signal(signal.SIGTERM, handle)
            with holding():
                signal.raise_signal(signal.SIGTERM)
                assert came == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is handle
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_benchmark_that_is_ended_leaves_no_file_and_no_process(
    tmp_path: Path, number: int, code: int
) -> None:
    arguments = ["bench", "--quick", "--contender", "ckpt_core", "--root", tmp_path]
    ended = end_at_a_step(arguments, tmp_path, number)
    assert ended.code == code
    assert (list(tmp_path.iterdir()), ended.left) == ([], [])
    assert ended.started


def test_ctrl_c_twice_cuts_a_wait_short_and_still_comes_once() -> None:
    steps: list[str] = []

    def end(held: interrupts.Held) -> None:
        signal.raise_signal(signal.SIGINT)
        try:
            with held.allowed():
                steps.append("waited")
        finally:
            steps.append("ended")

    def run() -> None:
        with holding() as held:
            try:
                with held.allowed():
                    signal.raise_signal(signal.SIGINT)
                    steps.append("went on")
            finally:
                end(held)

    def run_in_a_folder() -> None:
        with holding() as held:
            try:
                run()
            finally:
                with held.allowed():
                    steps.append("removed")

    with pytest.raises(KeyboardInterrupt):
        run_in_a_folder()
    assert steps == ["ended", "removed"]
