"""Parts of contenders that a quick run does not reach."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt_core.bench.contenders import NAMES, OURS, SHARING, Profile, State, contender_class
from ckpt_core.bench.contenders.dcp import ThreadTrials
from ckpt_core.bench.contenders.raw_disk import RawDisk


@pytest.fixture
def state() -> State:
    return {"a": torch.zeros(300_000), "b": torch.zeros(7)}


@pytest.mark.parametrize("name", [*NAMES, *SHARING])
def test_every_name_leads_to_a_class_of_that_name(name: str) -> None:
    assert contender_class(name).name == name


def test_ours_comes_first() -> None:
    assert NAMES[0] == OURS


def test_the_disk_is_measured_without_fio(
    tmp_path: Path, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = RawDisk.available(tmp_path)
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr("shutil.which", lambda name: None)
    disk = RawDisk(Profile(tmp_path))
    assert "threads" in disk.settings
    seconds = disk.save(state, 1).persist_s
    assert seconds is not None
    assert seconds > 0
    assert (tmp_path / "raw").stat().st_size == 1_200_128  # 300,007 floats, up to a whole page
    read_s = disk.load_into(state)
    assert read_s is not None
    assert read_s > 0


def test_thread_trials_settle_on_one_of_the_numbers_tried() -> None:
    trials = ThreadTrials()
    for expected in (2, 2, 4):
        assert trials.begin() == expected
        trials.end()
    assert trials.begin() in (2, 4)
