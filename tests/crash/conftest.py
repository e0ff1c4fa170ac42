"""The warm process, started once for all tests that kill."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.promises import quietly
from tests.crash.warm import Warm

__all__ = ["quietly", "warm"]


@pytest.fixture(scope="package")
def warm() -> Iterator[Warm]:
    """A process whose children may be killed."""
    with Warm() as process:
        yield process
