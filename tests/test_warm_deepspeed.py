"""Builds of DeepSpeed's extensions: a lock that a killed build has left keeps nobody waiting."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = Path(__file__).parents[1] / ".ci" / "warm_deepspeed.py"

# As torch's FileBaton takes it.
BUILD = """
import os, sys
os.chdir(sys.argv[2])
os.open(sys.argv[1], os.O_CREAT | os.O_EXCL) if sys.argv[1] else None
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("warm_deepspeed", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    folder = tmp_path / "py311_cpu" / "cpu_adam"
    folder.mkdir(parents=True)
    return folder / "lock"


@contextmanager
def building(lock: Path | str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that builds, and is killed."""
    command = [sys.executable, "-c", BUILD, str(lock), str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True) as process:  # type: ignore[call-overload]
        try:
            assert process.stdout.readline() == "locked\n"
            yield process
        finally:
            process.kill()


def test_the_lock_of_a_killed_build_is_removed(program: ModuleType, lock: Path) -> None:
    with building(lock, lock.parents[2]):
        pass
    program.unlock(lock.parents[2])
    assert not lock.exists()


def test_the_lock_of_a_build_that_runs_is_kept(
    program: ModuleType, lock: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with building(lock, lock.parents[2]):
        program.unlock(lock.parents[2])
        assert lock.exists()
    assert "waiting for that build" in capsys.readouterr().out


def test_compilers_of_a_killed_build_end_before_its_lock_is_removed(
    program: ModuleType, lock: Path
) -> None:
    lock.touch()
    with building("", lock.parent) as compiler:
        threading.Timer(0.3, compiler.kill).start()
        program.unlock(lock.parents[2])
        assert not lock.exists()
        assert compiler.wait() == -signal.SIGKILL
