"""What is pickled as a whole: a save says what a restore will refuse."""

from __future__ import annotations

import collections
import datetime as dt
import logging
import random
import zoneinfo
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt_core
from ckpt_core import Checkpointer
from ckpt_core.errors import ConfigError, UntrustedData
from ckpt_core.state import opaque


class Settings:
    """Of no kind that a checkpoint knows."""

    rate = 3


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opaque, "_told", set())
    monkeypatch.setattr(opaque, "_looked_bytes", {}, raising=False)


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


@pytest.mark.parametrize("before", [1, 40])
def test_a_value_that_needs_trust_is_told_of_also_after_harmless_ones_of_its_type(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: int
) -> None:
    harmless = {
        "own": np.array(["a"], dtype=object),
        "d": collections.defaultdict(list, a=1),
        "when": dt.datetime(2026, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1), "CET")),
    }
    needing = {
        "own": np.array([Settings()], dtype=object),
        "d": collections.defaultdict(Settings, a=1),
        "when": dt.datetime(2026, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")),
    }
    told = _told(tmp_path, caplog, {"first": [harmless] * before}, needing, needing)
    assert [text.split()[0] for text in told] == ["'own'", "'d'", "'when'"]
    with pytest.raises(UntrustedData):
        ckpt_core.load(tmp_path)


def test_values_of_a_type_that_is_always_harmless_are_not_looked_at_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    monkeypatch.setattr(opaque, "read_harmless", lambda data: looks.append(len(data)))
    large = np.array(["a" * 100_000], dtype=object)
    small = [np.array([str(number)], dtype=object) for number in range(2000)]
    assert not _told(tmp_path, caplog, {"large": large}, {"large": large})
    assert len(looks) == 1
    opaque._looked_bytes.clear()
    assert not _told(tmp_path / "other", caplog, {"small": small})
    assert 100 < len(looks) < 1000
    assert sum(looks[1:]) < 70_000


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


@pytest.mark.parametrize("factory", [None, list, collections.OrderedDict, collections.deque])
def test_a_defaultdict_of_a_harmless_factory_comes_back_with_it(
    factory: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"d": collections.defaultdict(factory, a=torch.arange(3))}
    assert not _told(tmp_path, caplog, state)
    found = ckpt_core.load(tmp_path)["d"]
    assert found.default_factory is factory and torch.equal(found["a"], state["d"]["a"])


def test_a_factory_of_ones_own_is_told_of_and_needs_trust(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (text,) = _told(tmp_path, caplog, {"d": collections.defaultdict(Settings, a=1)})
    assert "trusted=True" in text and "test_opaque.Settings" in text
    with pytest.raises(UntrustedData, match="Settings"):
        ckpt_core.load(tmp_path)
    assert ckpt_core.load(tmp_path, trusted=True)["d"].default_factory is Settings


def test_a_class_that_is_harmless_by_itself_is_no_factory(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ck:
        ck.save(1, {"d": collections.defaultdict(random.Random, a=1)}).committed.result()
    with pytest.raises(UntrustedData, match=r"random\.Random"):
        ckpt_core.load(tmp_path)


ODD = np.dtype({"names": ["b", "a"], "formats": ["i4", "f4"], "offsets": [4, 0]})


@pytest.mark.parametrize(
    "value",
    [
        np.ones(3, ODD),
        np.ones(1, ODD)[0],
        ODD,
        np.ones(2, {"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 0]}),
        np.array([(None, 2)], [("a", object), ("b", "i4")]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_structures_that_have_no_description_are_told_of_and_need_trust(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: Any
) -> None:
    assert "numpy.dtype of fields" in _told(tmp_path, caplog, {"it": value})[0]
    with Checkpointer(tmp_path) as ck:
        with pytest.raises(UntrustedData, match=r"numpy\.dtype of fields"):
            ck.restore({"it": None, "w": None})
        found = ck.restore({"it": None, "w": None}, trusted=True)
    assert found is not None
    back = found.state["it"]
    assert str(back) == str(value) and getattr(back, "dtype", back) == getattr(
        value, "dtype", value
    )
    assert not (tmp_path / ".corrupt").exists()


@pytest.mark.parametrize("typed", [False, True])
def test_a_storage_is_refused_when_it_is_saved(typed: bool, tmp_path: Path) -> None:
    tensor = torch.ones(3)
    storage = (
        torch.TypedStorage(3, dtype=torch.float32, _internal=True)
        if typed
        else tensor.untyped_storage()
    )
    with Checkpointer(tmp_path) as ck, pytest.raises(ConfigError, match=r"'s' is a .*Storage"):
        ck.save(1, {"w": tensor, "s": storage})
