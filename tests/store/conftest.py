"""An open store on a root of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_core.store import StepStore
from tests.store.harness import make_store


@pytest.fixture
def store(root: Path) -> Iterator[StepStore]:
    """Keeps the two newest steps and two slots."""
    opened = make_store(root)
    opened.open()
    yield opened
    opened.close()
