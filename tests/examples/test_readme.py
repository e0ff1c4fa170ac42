"""The program of README.md runs as it stands, and goes on where it ended."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from ckpt_core import committed_steps

TOP = Path(__file__).parents[2]


def test_the_program_of_the_readme_runs_as_it_stands_and_goes_on(tmp_path: Path) -> None:
    text = (TOP / "README.md").read_text()
    program = next(code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    for _ in range(2):
        subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
    assert committed_steps(tmp_path / "ckpts") == (200, 250)
