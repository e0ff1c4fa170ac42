"""The suite `transformers`: one quick run for all tests of its output. Nothing is asserted about times."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from ckpt_transformers_tools.bench import NAMES
from tests.bench.fit_suites import QuickRun
from tests.bench.quick import quick_fixtures

pytestmark = pytest.mark.timeout(300)

output, report = quick_fixtures(
    "--suite",
    "transformers",
    imported=["ckpt_transformers", "ckpt_transformers_tools.bench.fitting"],
)


class TestQuickRun(QuickRun):
    names = NAMES
    framework = "transformers"
