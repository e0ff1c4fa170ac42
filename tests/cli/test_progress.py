"""How far a long command is: shown beside the answer, never in it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.observe import progress

Cli = Callable[..., Any]


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
