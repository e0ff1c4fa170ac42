"""The code of the pages about Horovod runs as it stands there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ckpt_core import committed_steps
from tests.docs.prepared import pages_of


def test_the_code_of_the_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.program", str(tmp_path), *pages_of("horovod")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert committed_steps(tmp_path / "horovod" / "ckpts")[-1] == 200
