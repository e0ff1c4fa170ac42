"""The integration translates: it knows public names of ckpt_core alone, and has no threads of its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ckpt_core
import ckpt_horovod

MODULES = sorted(Path(ckpt_horovod.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_only_public_names_of_the_engine_are_imported(module: Path) -> None:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ckpt_core"):
            assert node.module in ("ckpt_core", "ckpt_core.data"), f"line {node.lineno}"
            if node.module == "ckpt_core":
                assert {alias.name for alias in node.names} <= set(ckpt_core.__all__)
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
            assert not any(name.startswith("ckpt_core.") for name in names), f"line {node.lineno}"


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.name)
def test_there_are_no_threads_and_no_files(module: Path) -> None:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            assert name not in ("open", "Thread", "ThreadPoolExecutor"), f"line {node.lineno}"
            assert method not in ("Thread", "write_text", "write_bytes", "mkdir"), (
                f"line {node.lineno}"
            )


def test_every_name_of_the_door_is_there_and_is_described() -> None:
    assert sorted(ckpt_horovod.__all__) == list(ckpt_horovod.__all__)
    for name in ckpt_horovod.__all__:
        assert getattr(ckpt_horovod, name).__doc__, name


def test_the_door_holds_what_users_need() -> None:
    assert {"DistributedOptimizer", "coordination"} <= set(ckpt_horovod.__all__)
