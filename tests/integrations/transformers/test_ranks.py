"""What several ranks are told, and save together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckpt_core
from ckpt_transformers import export
from tests.forks import Forks
from tests.integrations.transformers.jobs import gpt
from tests.integrations.transformers.ranks import Program

PROGRAM = "tests.integrations.transformers.ranks_program"


def _told(forks: Forks, folder: Path, kind: str) -> list[str]:
    """What each rank was warned of."""
    assert Program(forks, PROGRAM, ranks=2, KIND=kind).run(folder) == [0, 0]
    return [(folder / f"told-{rank}.json").read_text() for rank in range(2)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "warned"), [("dispatched", "a run"), ("split", None), ("skipping", "what skip_first")]
)
def test_a_loader_that_skips_too_little_in_a_resume_is_told_of_once(
    kind: str, warned: str | None, forks: Forks, tmp_path: Path
) -> None:
    told = _told(forks, tmp_path, kind)
    assert [f"dispatch_batches=True: {warned or ''}" in texts for texts in told] == [
        bool(warned),
        False,
    ]


@pytest.mark.timeout(900)
def test_an_adapter_of_which_a_rank_holds_nothing_is_exported(forks: Forks, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    _told(forks, tmp_path, "thin adapter")
    folder = export(tmp_path / "ckpts", tmp_path / "adapter")
    trained = ckpt_core.load(tmp_path / "ckpts", only=["model"])["model"]
    mine = load_file(folder / "adapter_model.safetensors")
    assert len(mine) == 4
    for name, value in mine.items():
        assert torch.equal(value, trained[name.replace(".weight", ".default.weight")]), name
    peft.PeftModel.from_pretrained(gpt(), folder)
