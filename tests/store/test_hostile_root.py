"""A root that somebody else has filled: pipes, devices, links and nonsense wherever a name of ours is."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt_core import Checkpointer, CkptError, Options, committed_directories, load, verify
from ckpt_core.cli import main
from ckpt_core.store.lock import owner_of

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("prepared") / "root"
    with Checkpointer(root, Options(keep_last=2)) as ck:
        for step in (1, 2, 3):
            ck.save(step, {"w": torch.ones(2000)}).committed.result(60)
        ck.pin(2)
    return root


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _directory(path: Path) -> None:
    path.mkdir()
    (path / "x").write_text("x")


def _circle(path: Path) -> None:
    path.symlink_to(path.name)


def _nonsense(path: Path) -> None:
    path.write_bytes(b"[" * 4096)


def _huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**42)


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": _pipe,
    "device": _device,
    "directory": _directory,
    "circle": _circle,
    "nonsense": _nonsense,
    "huge": _huge,
}
PLACES = (
    ".lock",
    ".pins",
    ".slots",
    ".inflight",
    ".corrupt",
    "latest",
    ".pins/000000000003",
    ".pins/99999999999999999999999",
    ".slots/0123456789abcdef",
    ".inflight/000000000009-00000000",
    ".inflight/000000000009-00000000.replaced",
    ".inflight/000000000009-00000000.replaced/manifest.json",
    "step-000000000004",
    "step-000000000003/manifest.json",
    "step-000000000003/rank-00000.json",
    "step-000000000003/shard-00000-0.safetensors",
    "tag/manifest.json",
)


def put(root: Path, place: str, kind: str) -> None:
    path = root / place
    path.parent.mkdir(exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    KINDS[kind](path)


def command(*arguments: object) -> None:
    before, sys.argv = sys.argv, ["ckpt-core", *map(str, arguments)]
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = before
    assert ended.value.code in (0, 1, 2, None)


def train(root: Path) -> None:
    with Checkpointer(root, Options(keep_last=2, on_error="warn", timeout=60)) as ck:
        ck.restore({"w": torch.zeros(2000)})
        error = ck.save(9, {"w": torch.ones(2000)}).committed.exception(60)
        assert error is None or isinstance(error, CkptError), error


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_whatever_lies_in_a_root_nothing_hangs_and_errors_are_ours(
    place: str, kind: str, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    shutil.copytree(prepared, root)
    put(root, place, kind)
    owner_of(root)
    for call in (committed_directories, load, verify, train):
        with contextlib.suppress(CkptError):
            call(root)
    for name in ("ls", "show"):
        command(name, root)
    # Imports of frameworks, which are the same for every root, are tried in tests/cli/test_doctor.py.
    command("doctor", root, "--quick", "--json")
    assert "Traceback" not in capsys.readouterr().err


def test_the_owner_of_a_lock_may_be_any_text(tmp_path: Path) -> None:
    for text in (
        "[" * 4000,
        '{"pid": ' + "9" * 4000 + "}",
        "null",
        '{"pid": [[["x"]]]}',
        "\x00\xff",
    ):
        (tmp_path / ".lock").write_text(text)
        assert isinstance(owner_of(tmp_path), dict)
    (tmp_path / ".lock").write_text(json.dumps({"pid": 1}))
    assert owner_of(tmp_path) == {"pid": 1}
