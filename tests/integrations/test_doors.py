"""The integrations translate: they know public names of ckpt_core alone, and have no threads of their own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ckpt_core

TOP = Path(__file__).parents[2]
TOOLS = "_tools"
"""Packages that end so are parts of the commands of `ckpt-core`, not of the integration."""
MODULES = sorted(
    path
    for path in (TOP / "integrations").glob("ckpt_*/*.py")
    if not path.parent.name.endswith(TOOLS)
)


WRITES = "ckpt_transformers/exporting.py"
"""Writes a directory that the user has asked for, once."""

LISTENS = "ckpt_lightning/rescue.py"
"""Hears that another rank has failed while training hangs in a collective."""


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


@pytest.fixture(params=MODULES, ids=_name)
def module(request: pytest.FixtureRequest) -> ast.Module:
    path: Path = request.param
    return ast.parse(path.read_text())


def test_only_public_names_of_the_engine_are_imported(module: ast.Module) -> None:
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ckpt_core"):
            assert node.module in ("ckpt_core", "ckpt_core.data"), f"line {node.lineno}"
            if node.module == "ckpt_core":
                assert {alias.name for alias in node.names} <= set(ckpt_core.__all__)


def test_there_are_no_threads_and_no_files(
    module: ast.Module, request: pytest.FixtureRequest
) -> None:
    writes, listens = (f"[{one}]" in request.node.name for one in (WRITES, LISTENS))
    for node in ast.walk(module):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            assert name not in ("open", "Thread", "ThreadPoolExecutor"), f"line {node.lineno}"
            files = () if writes else ("write_text", "write_bytes", "mkdir")
            threads = () if listens else ("Thread",)
            assert method not in (*threads, *files), f"line {node.lineno}"
