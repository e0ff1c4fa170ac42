"""A quick run of a suite through the real command line, once for all tests of its output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner, Result

from ckpt_core.cli.bench import bench


def ckpt_core_bench(arguments: Sequence[str], *, columns: int = 500) -> Result:
    """`ckpt-core bench` with these arguments, on a terminal of that width."""
    application = typer.Typer()
    application.command()(bench)
    return CliRunner().invoke(application, arguments, env={"COLUMNS": str(columns)})


def quick_run(folder: Path, *arguments: str) -> Path:
    """Run below `folder`, which then holds root, out.json, out.png and stdout; the folder."""
    (folder / "root").mkdir()
    arguments = (*arguments, "--quick", "--root", str(folder / "root"))
    outputs = ("--json", str(folder / "out.json"), "--plot", str(folder / "out.png"))
    result = ckpt_core_bench([*arguments, *outputs], columns=200)
    (folder / "stdout").write_text(result.stdout)
    assert result.exit_code == 0, result.output
    return folder


def report_of(output: Path) -> dict[str, Any]:
    """The JSON of a quick run."""
    loaded: dict[str, Any] = json.loads((output / "out.json").read_text())
    return loaded
