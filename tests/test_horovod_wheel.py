"""How Horovod gets into the environment of the tests, and that the guide tells users to do the same."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOP = Path(__file__).parents[1]
PROGRAM = TOP / ".ci" / "horovod_wheel.py"


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("horovod_wheel", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build(program: ModuleType) -> Any:
    return program.Build(
        horovod="0.28.1", torch="2.13.0+cpu", python="cpython-311", machine="x86_64", recipe="abc"
    )


def _leave_a_wheel(folder: Path) -> None:
    (folder / "horovod-0.28.1-py3-none-any.whl").write_bytes(b"whole")


def _must_not_run(folder: Path) -> None:
    pytest.fail(f"a second build, into {folder}")


def _guide() -> str:
    page = (TOP / "docs" / "horovod.md").read_text()
    return page.partition("## Installing")[2].partition("\n## ")[0]


@pytest.mark.parametrize("field", ["horovod", "torch", "python", "machine", "recipe"])
def test_a_wheel_is_shared_only_where_nothing_differs(build: Any, field: str) -> None:
    assert dataclasses.replace(build).name == build.name
    assert dataclasses.replace(build, **{field: "another"}).name != build.name


def test_the_recipe_is_the_toolchain_file_and_the_settings(program: ModuleType) -> None:
    recipes = {
        program.recipe(b"-std=c++17", {"HOROVOD_WITH_GLOO": "1"}),
        program.recipe(b"-std=c++20", {"HOROVOD_WITH_GLOO": "1"}),
        program.recipe(b"-std=c++17", {"HOROVOD_WITH_GLOO": "1", "HOROVOD_WITH_MPI": "1"}),
    }
    assert len(recipes) == 3


def test_the_wheel_is_for_the_torch_that_is_installed(program: ModuleType) -> None:
    import torch

    assert program.build_for_this_environment().torch == torch.__version__


def test_a_wheel_is_built_once(program: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "key"
    wheel = program.cached_wheel(folder, _leave_a_wheel)
    assert wheel.read_bytes() == b"whole"
    assert program.cached_wheel(folder, _must_not_run) == wheel
    assert [path.name for path in folder.parent.iterdir()] == ["key"]


def test_a_build_that_fails_leaves_nothing_to_be_taken(program: ModuleType, tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        _leave_a_wheel(folder)
        sys.exit("compiler error")

    with pytest.raises(SystemExit, match="compiler error"):
        program.cached_wheel(tmp_path / "key", fail)
    assert list(tmp_path.iterdir()) == []


def test_a_build_that_was_killed_leaves_nothing_to_be_taken(
    program: ModuleType, tmp_path: Path
) -> None:
    code = """
import os, runpy, signal, sys
from pathlib import Path

def half(folder):
    (folder / "horovod-0.28.1-py3-none-any.whl").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

runpy.run_path(sys.argv[1])["cached_wheel"](Path(sys.argv[2]), half)
"""
    folder = tmp_path / "key"
    subprocess.run([sys.executable, "-c", code, PROGRAM, folder], check=False, timeout=60)
    assert len(list(tmp_path.glob(".building-*/*.whl"))) == 1
    assert program.cached_wheel(folder, _leave_a_wheel).read_bytes() == b"whole"


def test_of_two_builds_at_once_both_succeed(program: ModuleType, tmp_path: Path) -> None:
    def overtaken(folder: Path) -> None:
        program.cached_wheel(tmp_path / "key", _leave_a_wheel)
        _leave_a_wheel(folder)

    wheel = program.cached_wheel(tmp_path / "key", overtaken)
    assert wheel.read_bytes() == b"whole"
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, Path.home() / ".cache/ckpt-core/wheels"),
        ({"XDG_CACHE_HOME": ""}, Path.home() / ".cache/ckpt-core/wheels"),
        ({"XDG_CACHE_HOME": "/xdg"}, Path("/xdg/ckpt-core/wheels")),
        ({"XDG_CACHE_HOME": "/xdg", "CKPT_WHEEL_CACHE": "/mine"}, Path("/mine")),
    ],
)
def test_the_cache_is_where_the_environment_says(
    program: ModuleType, environment: dict[str, str], folder: Path
) -> None:
    assert program.cache_folder(environment) == folder


def test_what_the_machine_lacks_has_debians_name(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program.missing_packages({})[:2] == ["g++", "make"]
    assert program.cmake_version() < program.OLDEST_CMAKE


def test_settings_of_horovod_that_the_name_does_not_tell_are_left_out(program: ModuleType) -> None:
    environment = program.build_environment({"PATH": "/bin", "HOROVOD_GPU_OPERATIONS": "NCCL"})
    assert "HOROVOD_GPU_OPERATIONS" not in environment
    assert environment["PATH"].endswith(":/bin")


def test_the_guide_says_what_is_done_here(program: ModuleType) -> None:
    guide = _guide()
    command = re.search(r"^CMAKE_TOOLCHAIN_FILE=(?:.*\\\n)+.*$", guide, re.MULTILINE)
    assert command is not None
    words = command[0].replace("\\\n", " ").split()
    variables = dict(word.split("=", 1) for word in words[: words.index("pip")])
    assert variables == {"CMAKE_TOOLCHAIN_FILE": "$PWD/cxx17.cmake", **program.SETTINGS}
    arguments = words[words.index("pip") :]
    assert set(program.PIP_OPTIONS) < set(arguments)
    assert arguments[-1] == f"horovod=={program.pinned('horovod')}"


def test_the_guide_has_the_lines_of_the_toolchain_file(program: ModuleType) -> None:
    lines = program.TOOLCHAIN.read_text().splitlines()
    code = "\n".join(line for line in lines if not line.startswith("#"))
    assert f"cat > cxx17.cmake <<'EOF'\n{code}\nEOF\n" in _guide()


def test_the_guide_finds_the_toolchain_file_of_an_installed_package(program: ModuleType) -> None:
    code = re.search(r'`python -c "([^`]+)"`', _guide())
    assert code is not None
    search = {"PYTHONPATH": str(TOP / "integrations")}
    done = subprocess.run(
        [sys.executable, "-c", code[1]], env=search, capture_output=True, text=True, timeout=60
    )
    assert Path(done.stdout.strip()).samefile(program.TOOLCHAIN), done.stderr
