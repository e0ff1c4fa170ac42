"""Forks are to whoever starts them what the command would be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forks import Forks

TELLS = """
import os, sys
print(sys.argv, __name__, os.getcwd(), os.environ["WORD"], os.getsid(0) == os.getpid(), flush=True)
sys.stderr.write(sys.stdin.readline())
sys.exit(7)
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as forks:
        yield forks


@pytest.mark.parametrize("kind", ["-c", "-m", "file"])
def test_it_has_the_words_the_folder_the_variables_and_the_pipes_that_it_is_given(
    forks: Forks, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "told.py"
    path.write_text(TELLS)
    command = {"-c": ["-c", TELLS], "-m": ["-m", "told"], "file": [path]}[kind]
    process = forks.popen(
        [sys.executable, *command, "word"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=os.environ | {"WORD": "given"},
        start_new_session=True,
        text=True,
    )
    said, errors = process.communicate("asked\n", timeout=60)
    name = "-c" if kind == "-c" else str(path)
    assert said == f"{[name, 'word']} __main__ {tmp_path} given True\n"
    assert (errors, process.returncode) == ("asked\n", 7)


def test_its_end_is_seen_however_it_comes(forks: Forks) -> None:
    hangs = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
    for sent in (signal.SIGKILL, signal.SIGTERM):
        with forks.popen(hangs, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "1\n"
            assert process.poll() is None
            process.send_signal(sent)
        assert process.returncode == -sent
    raises = [sys.executable, "-W", "error", "-c", "import warnings; warnings.warn('oh')"]
    process = forks.popen(raises, stderr=subprocess.PIPE, text=True)
    assert "UserWarning: oh" in process.communicate(timeout=60)[1]
    assert process.returncode == 1
