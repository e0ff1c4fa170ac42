"""The code of the pages about DeepSpeed runs as it stands there."""

from __future__ import annotations

from pathlib import Path

from tests.docs.prepared import pages_of
from tests.integrations.deepspeed.launch import torchrun


def test_the_code_of_each_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    arguments = ["-m", "tests.docs.program", str(tmp_path), *pages_of("deepspeed")]
    code, output = torchrun(arguments, ranks=1)
    assert code == 0, output
    newest = {path.parts[-3]: path.read_text() for path in tmp_path.glob("*/ckpts/latest")}
    assert newest == {"deepspeed": "global_step200", "from-deepspeed": "global_step300"}
