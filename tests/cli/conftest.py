"""A root with a few steps, and the command itself, run in this process or as one of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_core import Checkpointer, Options, RngState
from ckpt_core.cli import main
from ckpt_core.system.files import Files
from tests.cli.far_places import (  # noqa: F401
    alone,
    at_faulty,
    at_place,
    faulty,
    place,
)
from tests.cli.several import JOB
from tests.restore.ranks import write_ranks

STEPS = (10, 20, 30)
TOP = Path(__file__).parents[2]


@dataclass(frozen=True)
class Answer:
    """What a run of the command gave."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Answer]:
    """Run `ckpt-core ARGUMENTS` here; whatever it raises but SystemExit fails the test."""

    def run(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["ckpt-core", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        code = ended.value.code
        return Answer(code if isinstance(code, int) else 0, out, err)

    return run


@pytest.fixture
def process() -> Callable[..., Answer]:
    """Run `python -m ckpt_core ARGUMENTS` as a process, without a terminal."""

    def run(*arguments: object, **environ: str) -> Answer:
        made = subprocess.run(
            [sys.executable, "-m", "ckpt_core", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd=TOP,
            env={**os.environ, **environ},
            timeout=120,
            check=False,
        )
        return Answer(made.returncode, made.stdout.decode(), made.stderr.decode())

    return run


class Tied(nn.Module):
    """A model whose first and last layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index: torch.Tensor) -> Any:
        return self.head(self.norm(self.embed(index)))


def make_state() -> dict[str, Any]:
    """A model, its optimizer after a step, and plain values."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(8)).square().sum().backward()
    optimizer.step()
    config = {"shape": (1, 2), "limit": float("inf"), 3: b"xy", "name": "run 1"}
    return {
        "model": model,
        "optimizer": optimizer,
        "rng": RngState(),
        "epoch": 3,
        "config": config,
    }


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 10, 20 and 30; the model trains in between, and 20 is pinned."""
    root = tmp_path_factory.mktemp("cli") / "ckpts"
    state = make_state()
    with Checkpointer(root, Options(keep_last=None)) as checkpointer:
        for step in STEPS:
            checkpointer.save(step, state).committed.result(60)
            state["optimizer"].step()
        checkpointer.pin(20)
    return root


@pytest.fixture
def ckpts(original: Path, tmp_path: Path) -> Path:
    """A copy of that root, to do with as one likes."""
    return Path(shutil.copytree(original, tmp_path / "ckpts"))


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Save a state as the one step of a new root; the path of the step."""

    def run(state: Any, name: str = "one", **options: Any) -> Path:
        with Checkpointer(tmp_path / name, Options(**options)) as checkpointer:
            return checkpointer.save(7, state).committed.result(60)

    return run


@pytest.fixture
def damage() -> Callable[[Path, int], None]:
    """Flip one byte of a file."""

    def run(path: Path, offset: int) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 1]))

    return run


@dataclass
class Heard:
    """How many bytes of files were read since `nbytes` was last set."""

    nbytes: int = 0


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    """What is read of steps from here on."""
    found, preadv = Heard(), Files.preadv

    def counted(files: Files, *arguments: Any) -> int:
        got = preadv(files, *arguments)
        found.nbytes += got
        return got

    monkeypatch.setattr(Files, "preadv", counted)
    return found


# -- steps of several ranks --------------------------------------------------------------------


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of four ranks; not to be changed."""
    return write_ranks(tmp_path_factory.mktemp("ranks") / "four", 7, JOB)


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """A step of four ranks, to do with as one likes."""
    return write_ranks(tmp_path / "four", 7, JOB)


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """What the second of two nodes has of that step."""
    return write_ranks(tmp_path / "node", 7, JOB, members=[2, 3])
