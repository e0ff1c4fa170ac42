"""Suites are found, also those that measure an integration."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ckpt_core.bench.suites import names
from tests.bench.quick import ckpt_core_bench

FRAMEWORKS = ("deepspeed", "horovod", "lightning", "transformers")


def test_every_suite_is_in_the_help() -> None:
    output = ckpt_core_bench(["--help"]).output
    assert set(FRAMEWORKS) < set(names())
    for name in names():
        assert name in output


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_process_that_measures_imports_no_framework(name: str) -> None:
    code = (
        "import sys\n"
        "from ckpt_core.bench.suites import suite_of\n"
        f"suite_of({name!r})\n"
        f"print([n for n in ('torch', '{name}', 'ckpt_{name}') if n in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
