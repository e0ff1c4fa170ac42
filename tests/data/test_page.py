"""The page about data: its example runs, and resumes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_the_example_of_the_page_runs_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        names: dict[str, object] = {}
        exec(compile(blocks[0], str(PAGE), "exec"), names)
        assert names["step"] == 39
        total = names["total"]
        assert isinstance(total, torch.Tensor)
        assert total.item() == 3 * sum(range(100))
