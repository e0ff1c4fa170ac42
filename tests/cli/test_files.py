"""A root in which directories of files lie beside the steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ckpt_core import Checkpointer, Options
from tests.cli.conftest import Answer


def test_commands_tell_directories_of_files_from_steps(
    tmp_path: Path, cli: Callable[..., Answer]
) -> None:
    with Checkpointer(tmp_path, Options(chunk_bytes=4096)) as ck:
        save = ck.begin_files(7, "global_step7", pointer="latest")
        save.add("a.pt", {"w": torch.ones(3000)})
        path = save.seal().committed.result(60)
        ck.save(3, {"w": torch.ones(3)}).committed.result(60)
    listing = cli("ls", tmp_path)
    assert (listing.code, "global_step7" in listing.out) == (0, False)
    assert "step 3: ok" in cli("verify", tmp_path).out
    whole = cli("verify", path)
    assert (whole.code, "global_step7: ok" in whole.out) == (0, True)
    shown = cli("show", path)
    assert shown.code != 0
    assert "torch.load" in shown.err
    (path / "a.pt").write_bytes((path / "a.pt").read_bytes()[:-1])
    damaged = cli("verify", path)
    assert damaged.code != 0
    assert "global_step7: DAMAGED" in damaged.out
    assert "a.pt" in damaged.out
