"""What is not installed is not tested: said here, and not allowed where REQUIRE_INTEGRATIONS is set (nox)."""

from __future__ import annotations

import os

import pytest

from tests.integrations.frameworks import FRAMEWORKS, installed


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_framework_is_installed_so_that_its_tests_run(name: str) -> None:
    if installed(name):
        return
    assert not os.environ.get("REQUIRE_INTEGRATIONS"), f"{name} is missing: {FRAMEWORKS[name]}"
    pytest.skip(f"{name} is missing, and so are its tests: {FRAMEWORKS[name]}")
