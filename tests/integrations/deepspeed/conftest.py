"""The process that ranks are forked from, started once for all tests that kill ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.crash.warm import Warm

Ranks = Callable[..., list[dict[str, Any]]]
"""`ranks("module.function", ranks=2, kill=None, **arguments)`: what became of each rank."""


@pytest.fixture(scope="package")
def nursery() -> Iterator[Warm]:
    """A process that has imported DeepSpeed and has one thread."""
    environ = {"DS_ACCELERATOR": "cpu"}
    with Warm("tests.integrations.deepspeed.crashing", environ=environ) as process:
        yield process


@pytest.fixture(scope="package")
def ranks(nursery: Warm) -> Ranks:
    """Runs a function on ranks that nobody watches over."""

    def run(
        call: str, *, ranks: int = 2, kill: dict[str, Any] | None = None, **arguments: Any
    ) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = nursery.call(
            "tests.integrations.deepspeed.crashing:run_ranks",
            call=call,
            ranks=ranks,
            arguments=arguments,
            kill=kill,
        )
        return found

    return run
