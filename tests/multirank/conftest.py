"""The warm process, whose children are the ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.warm import Warm


@pytest.fixture(scope="package")
def warm() -> Iterator[Warm]:
    """A process with torch imported; its forked children may be killed."""
    with Warm() as process:
        yield process
