"""An adapter on a frozen model: frozen weights are written once; a killed job ends in the same bits."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.examples.runs import DEVICES, EXAMPLES, LIMIT_S, Job, Run

EXAMPLE = EXAMPLES / "train_adapter.py"
STEPS, EVERY = 12, 2


@dataclass(frozen=True)
class Adapter(Job):
    """The job of this example."""

    def run(self, *, kill_at: int | None = None) -> Run:
        """The command to its end, or until it says that it is at a step."""
        command = [sys.executable, str(EXAMPLE), *self.arguments(steps=STEPS, every=EVERY)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            output = ""
            try:
                for line in process.stdout:
                    output += line
                    if kill_at is not None and line.startswith(f"step {kill_at}:"):
                        process.send_signal(signal.SIGKILL)
                process.wait(LIMIT_S)
            finally:
                process.kill()
        return Run(process.returncode, output)


@pytest.mark.parametrize("device", DEVICES)
def test_a_killed_job_ends_in_the_same_bits_and_its_steps_share_the_frozen_weights(
    device: str, tmp_path: Path
) -> None:
    (tmp_path / "untouched").mkdir()
    (tmp_path / "killed").mkdir()
    untouched = Adapter(tmp_path / "untouched", device=device)
    run = untouched.run()
    assert run.returncode == 0 and run.resumed is None, run.output
    steps = sorted(untouched.root.glob("step-*"))
    last = {path.name: path.stat() for path in steps[-1].glob("shard-*")}
    moving, still = last["shard-00000-0.safetensors"], last["shard-00000-1.safetensors"]
    assert still.st_nlink == len(steps) == 2
    assert moving.st_size < still.st_size / 10

    killed = Adapter(tmp_path / "killed", device=device)
    assert killed.run(kill_at=8).returncode == -signal.SIGKILL
    again = killed.run()
    assert again.returncode == 0, again.output
    assert again.resumed is not None and 0 < again.resumed <= 8
    assert killed.result.read_bytes() == untouched.result.read_bytes()
