"""What is pickled as a whole: a save says what a restore will refuse."""

from __future__ import annotations

import collections
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt_core
from ckpt_core import Checkpointer
from ckpt_core.errors import UntrustedData
from ckpt_core.state import opaque


class Settings:
    """Of no kind that a checkpoint knows."""

    rate = 3


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opaque, "_told", set())


def _told(root: Path, caplog: pytest.LogCaptureFixture, *states: Any) -> list[str]:
    with caplog.at_level(logging.WARNING, "ckpt_core"), Checkpointer(root) as ck:
        for step, state in enumerate(states):
            ck.save(step, {"w": torch.ones(2)} | state).committed.result()
    return [record.getMessage() for record in caplog.records]


def test_a_save_says_once_for_a_type_what_only_a_trusting_restore_gives_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = _told(tmp_path, caplog, {"own": Settings()}, {"own": Settings(), "more": Settings()})
    (text,) = told
    assert text.startswith("'own' is a tests.state.test_opaque.Settings") and "trusted=True" in text
    with pytest.raises(UntrustedData):
        ckpt_core.load(tmp_path)
    assert ckpt_core.load(tmp_path, trusted=True)["more"].rate == 3


def test_nothing_is_said_of_what_every_restore_gives_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {
        "queue": collections.deque([1], maxlen=3),
        "counter": collections.Counter("aab"),
        "generators": [random.Random(1), np.random.RandomState(1), torch.Generator()],
        "objects": np.array([1, "x"], dtype=object),
    }
    assert not _told(tmp_path, caplog, state)
    assert ckpt_core.load(tmp_path).keys() == {"w", *state}


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_a_mapped_array_is_saved_by_its_values(
    mode: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "values"
    np.arange(1000, dtype=np.float32).tofile(file)
    mapped = np.memmap(file, dtype=np.float32, mode=mode)
    assert not _told(tmp_path / "root", caplog, {"values": mapped, "part": mapped[10:20]})
    found = ckpt_core.load(tmp_path / "root")
    assert np.array_equal(found["values"], mapped) and np.array_equal(found["part"], mapped[10:20])
    live = np.zeros(1000, np.float32)
    with Checkpointer(tmp_path / "root") as ck:
        ck.restore({"w": torch.ones(2), "values": live, "part": np.zeros(10, np.float32)})
    assert np.array_equal(live, mapped)
