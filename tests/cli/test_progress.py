"""How far a long command is: shown beside the answer, never in it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.cli import progress
from ckpt_core.cli.progress import progress_bar

Cli = Callable[..., Any]
MIB = 2**20
_BAR = """
from ckpt_core.cli import progress
progress._SHORT_S = {short}
with progress.progress_bar() as show:
    for done in range(5):
        show("step", done * 2**20, 5 * 2**20)
"""


def test_what_is_short_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as show:
        for done in range(5):
            show("step", done * MIB, 5 * MIB)
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_there_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LINES_S", 0.0)
    with progress_bar() as show:
        show("step", MIB, 5 * MIB)
    assert capsys.readouterr() == ("", "step: 1.0 MiB of 5.0 MiB\n")


@pytest.mark.parametrize("command", ["verify", "export", "push", "pull"])
def test_each_command_tells_it_unless_it_must_not(
    cli: Cli, ckpts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(progress, "_LINES_S", 0.0)
    for number, options in enumerate(([], ["--no-progress"])):
        out = tmp_path / f"{number}"
        arguments = {
            "verify": [ckpts],
            "export": [ckpts, f"{out}.pt"],
            "push": [ckpts, "--to", out],
            "pull": [ckpts, "--to", out],
        }[command]
        answer = cli(command, *arguments, *options)
        assert answer.code == 0
        told = re.findall(r"^.*: [\d.]+ \w+ of [\d.]+ \w+$", answer.err, re.MULTILINE)
        assert bool(told) == (not options), answer.err
        assert " KiB of " not in answer.out


@pytest.mark.parametrize(("short", "shown"), [("0.0", True), ("60.0", False)])
def test_on_a_terminal_there_is_a_bar_after_a_second(short: str, shown: bool) -> None:
    ours, theirs = pty.openpty()
    try:
        made = subprocess.run(
            [sys.executable, "-c", _BAR.format(short=short)],
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
            timeout=60,
            check=True,
        )
        os.set_blocking(ours, False)
        found = b"".join(_read(ours))
    finally:
        os.close(theirs)
        os.close(ours)
    assert made.returncode == 0
    assert (b"5.0 MiB" in found) is shown


def _read(fd: int) -> list[bytes]:
    parts: list[bytes] = []
    while True:
        try:
            parts.append(os.read(fd, 65536))
        except BlockingIOError:
            return parts
