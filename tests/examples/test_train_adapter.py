"""An adapter on a frozen model: frozen weights are written once; a killed job ends in the same bits."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.examples.runs import DEVICES, EXAMPLES, Alone
from tests.forks import Forks

EXAMPLE = EXAMPLES / "train_adapter.py"
STEPS, EVERY = 12, 2


@pytest.mark.parametrize("device", DEVICES)
def test_a_killed_job_ends_in_the_same_bits_and_its_steps_share_the_frozen_weights(
    device: str, tmp_path: Path
) -> None:
    (tmp_path / "untouched").mkdir()
    (tmp_path / "killed").mkdir()
    untouched = Alone(tmp_path / "untouched", EXAMPLE, STEPS, EVERY, device=device)
    assert untouched.run_to_its_end().resumed is None
    steps = sorted(untouched.root.glob("step-*"))
    last = {path.name: path.stat() for path in steps[-1].glob("shard-*")}
    moving, still = last["shard-00000-0.safetensors"], last["shard-00000-1.safetensors"]
    assert still.st_nlink == len(steps) == 2
    assert moving.st_size < still.st_size / 10

    with Forks() as forks:
        killed = replace(untouched, folder=tmp_path / "killed", forks=forks)
        first = killed.run(until=lambda line: line.startswith("step 8:"))
        assert first.returncode == -signal.SIGKILL, first.output
        again = killed.run_to_its_end()
    assert again.resumed is not None and 0 < again.resumed <= 8
    assert killed.result.read_bytes() == untouched.result.read_bytes()
