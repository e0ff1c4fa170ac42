"""A quick run of a suite through the real command line, once for all tests of its output."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from ckpt_core.cli.bench import bench
from tests.bench.forks import forked


def ckpt_core_bench(arguments: Sequence[str], *, columns: int = 500) -> Result:
    """`ckpt-core bench` with these arguments, on a terminal of that width."""
    application = typer.Typer()
    application.command()(bench)
    return CliRunner().invoke(application, arguments, env={"COLUMNS": str(columns)})


def quick_run(folder: Path, *arguments: str, imported: Sequence[str] = ()) -> Path:
    """Run below `folder`, which then holds root, out.json, out.png, stdout and stderr; the folder.

    Args:
        folder: exists.
        arguments: of the command.
        imported: by one process for all that are measured, which are forks of it (`tests.bench.forks`).
    """
    (folder / "root").mkdir()
    arguments = (*arguments, "--quick", "--root", str(folder / "root"))
    outputs = ("--json", str(folder / "out.json"), "--plot", str(folder / "out.png"))
    with forked(*imported):
        result = ckpt_core_bench([*arguments, *outputs], columns=200)
    (folder / "stdout").write_text(result.stdout)
    (folder / "stderr").write_text(result.stderr)
    assert result.exit_code == 0, result.output
    return folder


def report_of(output: Path) -> dict[str, Any]:
    """The JSON of a quick run."""
    loaded: dict[str, Any] = json.loads((output / "out.json").read_text())
    return loaded


def reason_without(*modules: str, worker: str, asked: str) -> str:
    """Why a worker cannot run where these modules are missing: in a process of its own.

    Args:
        modules: that cannot be imported.
        worker: "module:Class".
        asked: of the class, as source.
    """
    module, _, name = worker.partition(":")
    code = (
        "import json, pathlib, sys\n"
        f"sys.modules.update(dict.fromkeys({modules!r}))\n"
        f"from {module} import {name}\n"
        f"print(json.dumps({name}{asked}))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    reason: str = json.loads(done.stdout.splitlines()[-1])["reason"]
    return reason


def quick_fixtures(*arguments: str, imported: Sequence[str] = ()) -> tuple[Any, Any]:
    """For a test module: `output, report = quick_fixtures(...)`, the folder and the JSON of one quick run."""

    @pytest.fixture(scope="module")
    def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return quick_run(tmp_path_factory.mktemp("bench"), *arguments, imported=imported)

    @pytest.fixture(scope="module")
    def report(output: Path) -> dict[str, Any]:
        return report_of(output)

    return output, report


_BUGS_OF_PEERS = ("KeyError: <class 'type'> (in _state_dict_stager.py",)
"""Of DCP's asynchronous staging, in torch 2.11."""


def ran(report: dict[str, Any]) -> set[str]:
    """The contenders that ran to their end."""
    return {name for name, entry in report["contenders"].items() if entry["reason"] is None}


def broken_peers(report: dict[str, Any]) -> set[str]:
    """Contenders that failed of a known bug of theirs: shown with it, and no fault of the suite."""
    entries = {name: str(entry["reason"]) for name, entry in report["contenders"].items()}
    return {name for name, said in entries.items() if any(bug in said for bug in _BUGS_OF_PEERS)}


def assert_all_ran(report: dict[str, Any], names: Iterable[str], *, framework: str) -> None:
    """Contenders are these, each ran to the end, and says under which release and how it is set up."""
    assert list(report["contenders"]) == list(names)
    for name, entry in report["contenders"].items():
        assert entry["reason"] is None, (name, entry["reason"])
        assert entry["version"].startswith(f"{framework} ") and entry["settings"]
