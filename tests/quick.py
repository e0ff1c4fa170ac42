"""What `pytest --quick` leaves out: whatever needs a framework, ranks, a kill or a machine of its own.

`nox -s quick` runs the rest. Whole files, so that nothing of what is left out is even imported.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent

FOLDERS = ("crash", "deepspeed", "examples", "horovod", "interrupts", "lightning", "multirank")
FILES = ("test_kill*.py", "test_*ranks*.py", "test_distributed.py", "test_*_suite.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="without frameworks, ranks and kills")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """None leaves the decision to others."""
    return True if config.getoption("--quick") and is_left_out(collection_path) else None


def is_left_out(path: Path) -> bool:
    """Whether these tests are none of the quick ones."""
    inside = path.relative_to(TESTS)
    return not {*inside.parts}.isdisjoint(FOLDERS) or any(map(inside.match, FILES))
