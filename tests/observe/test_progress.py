"""How far a reader of many bytes is: what is shown where, and that nothing comes of it if it cannot be."""

from __future__ import annotations

import logging
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import ckpt_core
from ckpt_core import Checkpointer, Options
from ckpt_core.observe import progress, progress_bar
from tests.restore.processes import Rank, run_ranks

MIB = 2**20
STATE = {"weight": torch.arange(MIB)}
SHOWING = """
import os, sys
from ckpt_core.observe import progress
progress._SHORT_S = {short}
{first}
with progress.progress_bar() as show:
    for done in range(5):
        progress._DRAWN_S = 0.0
        show("step", done * 2**20, 5 * 2**20)
sys.exit(7)
"""


def test_what_is_short_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(tell=print) as show:
        for done in range(5):
            show("step", done * MIB, 5 * MIB)
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LINES_S", 0.0)
    told: list[str] = []
    with progress_bar(tell=told.append) as show:
        show("step", MIB, 5 * MIB)
    show("step", 2 * MIB, 5 * MIB)
    assert told == ["step: 1.0 MiB of 5.0 MiB"]


@contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    """Our end and the end of a program."""
    ends = pty.openpty()
    try:
        yield ends
    finally:
        for fd in ends:
            os.close(fd)


def shown_on(ours: int) -> bytes:
    os.set_blocking(ours, False)
    parts: list[bytes] = []
    while True:
        try:
            parts.append(os.read(ours, 65536))
        except BlockingIOError:
            return b"".join(parts)


def run(program: str, stderr: int, **values: object) -> int:
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    command = [sys.executable, "-c", program.format(**values)]
    return subprocess.run(command, stderr=stderr, env=environ, timeout=60, check=False).returncode


@pytest.mark.parametrize(("short", "shown"), [(0.0, True), (60.0, False)])
def test_on_a_terminal_there_is_a_bar_after_a_second(short: float, shown: bool) -> None:
    with terminal() as (ours, theirs):
        assert run(SHOWING, theirs, short=short, first="") == 7
        found = shown_on(ours)
    assert (b"5.0 MiB" in found) is shown
    assert found.endswith(b"\x1b[2K") is shown
    assert b"\n" not in found


@pytest.mark.parametrize(
    "first",
    [
        "os.close(2)",
        "sys.stderr.close()",
        "sys.stderr = None",
        "sys.stderr = open('/dev/full', 'w')",
    ],
)
def test_where_nothing_can_be_shown_the_work_goes_on(first: str) -> None:
    with terminal() as (_, theirs):
        assert run(SHOWING, theirs, short=0.0, first=f"progress._LINES_S = 0.0; {first}") == 7


def test_a_terminal_that_was_stopped_keeps_nobody_waiting() -> None:
    with terminal() as (ours, theirs):
        termios.tcflow(theirs, termios.TCOOFF)
        assert run(SHOWING, theirs, short=0.0, first="") == 7
        termios.tcflow(theirs, termios.TCOON)
        assert shown_on(ours) == b""


# -- of a restore --------------------------------------------------------------------------------


@pytest.fixture
def log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> pytest.LogCaptureFixture:
    """The log, which is told of how far something is, however short it was."""
    monkeypatch.setattr(progress, "_LINES_S", 0.0)
    caplog.set_level(logging.INFO, "ckpt_core")
    return caplog


def saved(root: Path) -> Path:
    with Checkpointer(root) as ck:
        for step in (5, 6):
            ck.save(step, STATE)
    return root


def of(log: pytest.LogCaptureFixture) -> set[str]:
    return {line.partition(":")[0] for line in log.messages if line.endswith("of 8.0 MiB")}


def test_a_restore_tells_of_each_step_that_it_tries(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    (shard,) = saved(tmp_path).glob("step-*6/*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with Checkpointer(tmp_path) as ck, pytest.warns(UserWarning, match="step 6 was not restored"):
        ck.restore(STATE)
    assert of(log) == {"restoring step 6", "restoring step 5"}


def test_it_is_off_by_an_option_and_by_the_environment(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path)
    for options in (Options(progress=False), Options.from_env({"CKPT_CORE_PROGRESS": "no"})):
        with Checkpointer(tmp_path, options) as ck:
            assert ck.restore(STATE) is not None
    ckpt_core.load(tmp_path, progress=False)
    assert not of(log)


def test_a_load_tells_it_too(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    ckpt_core.load(saved(tmp_path / "run"))
    assert of(log) == {"loading run"}


def test_what_is_brought_from_a_level_is_told(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path / "far")
    with Checkpointer(tmp_path / "near", levels=[str(tmp_path / "far")]) as ck:
        assert ck.restore(STATE) is not None
    assert of(log) == {"bringing step 6", "restoring step 6"}


def _restores_and_loads(me: Rank) -> None:
    told: list[str] = []
    log = logging.getLogger("ckpt_core")
    log.setLevel(logging.INFO)
    log.addFilter(lambda one: not told.append(one.getMessage()))  # type: ignore[func-returns-value]
    progress._LINES_S = 0.0
    assert me.restorer(shown=True).restore(STATE) is not None
    ckpt_core.load(me.root)
    said = {line.partition(":")[0] for line in told}
    first = {"restoring step 6 on rank 0 of 2", "loading ckpts"}
    assert said == (first if me.info.rank == 0 else set())


def test_of_several_ranks_the_first_one_tells(tmp_path: Path) -> None:
    saved(tmp_path / "ckpts")
    run_ranks(2, tmp_path, _restores_and_loads)
