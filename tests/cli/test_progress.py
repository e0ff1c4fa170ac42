"""How far a long command is: shown beside the answer, never in it."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ckpt_core.cli.meanwhile import meanwhile
from ckpt_core.observe import progress

Cli = Callable[..., Any]


@pytest.mark.parametrize("command", ["verify", "export", "push", "pull", "diff"])
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
            "diff": [ckpts, ckpts],
        }[command]
        answer = cli(command, *arguments, *options)
        assert answer.code == 0
        told = re.findall(r"^.*: [\d.]+ \w+ of [\d.]+ \w+$", answer.err, re.MULTILINE)
        assert bool(told) == (not options), answer.err
        assert " KiB of " not in answer.out


def test_diff_tells_it_to_the_last_byte_of_all_ranks(
    cli: Cli, ckpts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LINES_S", 0.0)
    told = re.findall(r"^compared: (.*) of (.*)$", cli("diff", ckpts, ckpts).err, re.MULTILINE)
    assert told[-1][0] == told[-1][1]


@pytest.mark.parametrize(("terminal", "lines"), [(False, ["one thing", "another"]), (True, [])])
def test_what_a_measurement_does_is_told_in_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], terminal: bool, lines: list[str]
) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal)
    with meanwhile(console, shown=True) as tell:
        tell("one thing")
        tell("another")
    assert capsys.readouterr().err.splitlines() == lines
    assert isinstance(console.file, io.StringIO)
    assert ("another" in console.file.getvalue()) is terminal


def test_what_a_measurement_does_is_not_told_where_nobody_wants_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    with meanwhile(console, shown=False) as tell:
        tell("one thing")
    assert isinstance(console.file, io.StringIO)
    assert capsys.readouterr().err + console.file.getvalue() == ""
