"""Folders of frameworks that are not installed are left out; `test_installed.py` says so."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_core import Checkpointer
from tests.integrations.frameworks import FRAMEWORKS, installed

collect_ignore = [name for name in FRAMEWORKS if not installed(name)]


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The states that the engine was told of before a save; a save finds the memory that was made for it."""
    told: list[dict[str, Any]] = []
    prepare_as_usual, save_as_usual = Checkpointer.prepare, Checkpointer.save

    def prepare(self: Checkpointer, state: Any, **how: Any) -> None:
        told.append(state)
        prepare_as_usual(self, state, **how)

    def save(self: Checkpointer, step: int, state: Any, **how: Any) -> Any:
        memory = self._engine.pipeline.memory
        before = memory._pool
        handle = save_as_usual(self, step, state, **how)
        assert not told or memory._pool is before
        return handle

    monkeypatch.setattr(Checkpointer, "prepare", prepare)
    monkeypatch.setattr(Checkpointer, "save", save)
    return told
