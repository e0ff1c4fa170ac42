"""Agents that end with the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.levels.agents import Agents


@pytest.fixture
def agents() -> Iterator[Agents]:
    """Those of this test."""
    started = Agents()
    yield started
    started.end_all()
