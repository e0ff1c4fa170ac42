"""The engine's log is no news while faults are injected; processes that end are forks of a warm one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.promises import quietly
from tests.forks import Forks

__all__ = ["forks", "quietly"]


@pytest.fixture(scope="package")
def forks() -> Iterator[Forks]:
    with Forks() as forks:
        yield forks
