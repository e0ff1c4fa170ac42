"""The recipe of the page about spot machines, where a machine is lost with all that it had, and to its end.

Each run is a process; the machine is its root, its agent and itself.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ckpt_core
from ckpt_core.store import committed_steps
from tests.crash.warm import forked
from tests.docs.snippets import TOP, blocks_of
from tests.levels.trainers import end_agent, processes, until

MORE = 30


def recipe(root: Path, store: Path) -> str:
    """The code of the page, with these places, and a step of training where it leaves one out."""
    (block,) = [one for one in blocks_of(TOP / "docs/spot.md") if one.language == "python"]
    text = block.text
    for shown, here in (
        ("/local/run", str(root)),
        ("s3://bucket/run", str(store)),
        ("        ...\n", "        train(step)\n"),
    ):
        assert text.count(shown) == 1, shown
        text = text.replace(shown, here)
    return text


class Machine:
    """Runs the recipe in processes; `first` holds the first step that each has trained."""

    def __init__(self, folder: Path) -> None:
        self.root, self.store, self._log = folder / "root", folder / "store", folder / "log"
        self._code = recipe(self.root, self.store)

    @property
    def first(self) -> list[int]:
        return [int(line.split()[0]) for line in self._log.read_text().splitlines()]

    def run(self, total_steps: int, on_step: Callable[[int], None] = lambda step: None) -> int:
        """Start it anew, and train to the end; the signal that ended it."""
        state = {"w": torch.zeros(1000)}
        began: list[int] = []

        def train(step: int) -> None:
            if not began:
                assert state["w"].eq(step - 1).all()
                began.append(step)
                with self._log.open("a") as log:
                    log.write(f"{step}\n")
            time.sleep(0.01)
            state["w"] = torch.full((1000,), float(step))
            on_step(step)

        names = {"state": state, "total_steps": total_steps, "train": train}
        sent, problem = forked(lambda: exec(self._code, names))
        assert not problem, problem
        return sent

    def die(self, step: int) -> None:
        """Without notice, once the store has a step: the processes at once, then the disk."""
        if committed_steps(self.store):
            for pid in (*processes(self.root), os.getpid()):
                os.kill(pid, signal.SIGKILL)

    def lose_disk(self) -> None:
        until(lambda: not processes(self.root), "the end of the agent")
        shutil.rmtree(self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Whose agent is ended."""
    made = Machine(tmp_path)
    yield made
    end_agent(made.root)


def test_a_machine_that_is_lost_with_its_root_costs_no_more_than_what_was_not_yet_in_the_store(
    machine: Machine,
) -> None:
    assert machine.run(10**9, machine.die) == signal.SIGKILL
    newest = committed_steps(machine.store)[-1]
    machine.lose_disk()
    total = newest + MORE
    assert machine.run(total) == 0
    assert machine.first == [1, newest + 1]
    assert committed_steps(machine.store)[-1] == total, "the end of the run is there"
    until(lambda: not processes(machine.root), "the end of the agent")
    assert committed_steps(machine.root)[-1] == total
    machine.lose_disk()
    assert machine.run(total) == 0
    assert machine.first == [1, newest + 1], "nothing is left to do"
    assert ckpt_core.load(machine.root)["w"].eq(total).all()


def test_a_machine_with_notice_loses_no_step(machine: Machine) -> None:
    def stop(step: int) -> None:
        if step == 13:
            os.kill(os.getpid(), signal.SIGTERM)

    assert machine.run(10**9, stop) == 0
    machine.lose_disk()
    assert machine.run(20) == 0
    assert machine.first == [1, 14]
