"""Real processes share an epoch by their process group; another number of them takes the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.data_helpers import check_each_once, ids, loaders, lockstep
from tests.data.rank_job import BATCHES, LENGTH, SIZE

TOP = Path(__file__).parents[2]


@pytest.mark.timeout(120)
def test_two_processes_begin_an_epoch_and_three_others_end_it(tmp_path: Path) -> None:
    crew = []
    try:
        for rank in range(2):
            command = [sys.executable, "-m", "tests.data.rank_job", str(rank), "2", str(tmp_path)]
            crew.append(subprocess.Popen(command, cwd=TOP))
        assert [process.wait(100) for process in crew] == [0, 0]
    finally:
        for process in crew:
            process.kill()
            process.wait()
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert told[0]["state"] == told[1]["state"]
    assert told[0]["state"]["consumed"] == 2 * SIZE * BATCHES
    assert told[0]["batches"] == -(-LENGTH // 2 // SIZE)

    others = loaders(LENGTH, 3, SIZE)
    for loader in others:
        loader.load_state_dict(told[0]["state"])
    rest = [sample for row in lockstep(others) for sample in ids(row)]
    check_each_once(told[0]["seen"] + told[1]["seen"] + rest, LENGTH, spare=2)
    assert {loader.epoch for loader in others} == {1}
