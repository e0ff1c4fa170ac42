"""How processes end: whatever was started is finished, and a dead writer leaves no lock."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_core import Checkpointer
from tests.crash.promises import check_clean
from tests.crash.states import make_state, options, step_state
from tests.faults.layers import Delays
from tests.forks import Forks

_WAIT_S = 120


@contextlib.contextmanager
def program(forks: Forks, name: str, root: Path) -> Iterator[subprocess.Popen[str]]:
    """A running program of `programs`; killed at the end if it still runs."""
    process = forks.popen(
        [sys.executable, "-m", "tests.faults.programs", name, root],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=_WAIT_S)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=_WAIT_S)
    return process.returncode, out + err


def assert_saved(root: Path, *steps: int) -> None:
    with Checkpointer(root, options()) as ck:
        assert ck.steps() == steps
    for step in steps:
        assert step_state(root, step) == (step, 0)
    check_clean(root, spare_slots=4)


def test_a_script_that_ends_without_close_loses_nothing_that_it_started(
    forks: Forks, root: Path
) -> None:
    with program(forks, "leave_without_close", root) as process:
        assert ended(process) == (0, "")
    assert_saved(root, 2, 3)


def test_a_loop_that_raises_loses_nothing_that_it_started(forks: Forks, root: Path) -> None:
    with program(forks, "leave_by_an_error", root) as process:
        code, text = ended(process)
    assert code == 1 and "ZeroDivisionError: the loop failed" in text
    assert_saved(root, 2, 3)


def test_children_of_multiprocessing_lose_nothing_that_they_started(
    forks: Forks, root: Path
) -> None:
    root.mkdir()
    with program(forks, "leave_a_child", root) as process:
        assert ended(process) == (0, "")
    for kind in ("1", "2"):
        assert_saved(root / kind, 2, 3)


def test_workers_of_a_data_loader_disturb_no_save(forks: Forks, root: Path) -> None:
    with program(forks, "use_a_data_loader", root) as process:
        assert ended(process) == (0, "")
    assert_saved(root, 2, 3)


def test_a_forked_worker_that_outlives_a_killed_writer_does_not_hold_the_lock(
    forks: Forks, root: Path
) -> None:
    with program(forks, "leave_a_worker", root) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline().split()[1])
        try:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(_WAIT_S)
            os.kill(worker, 0)  # it lives
            with Checkpointer(root, options()) as ck:
                ck.save(2, make_state(2)).committed.result(_WAIT_S)
                assert ck.steps() == (1, 2)
        finally:
            os.kill(worker, signal.SIGKILL)


def test_sigterm_lets_the_loop_save_once_more_and_leave(forks: Forks, root: Path) -> None:
    with program(forks, "obey_sigterm", root) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert ended(process) == (0, "saved\n")
    assert_saved(root, 1, 5000)


def test_a_loop_that_ignores_sigterm_is_ended_after_the_grace_period(
    forks: Forks, root: Path
) -> None:
    with program(forks, "ignore_sigterm", root) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        code, _ = ended(process)
    assert code == 128 + signal.SIGTERM
    assert_saved(root, 1)


def test_close_finishes_what_is_in_flight(forks: Forks, root: Path) -> None:
    ck = Checkpointer(root, options(in_flight=3, keep_last=None), files=Delays(0.05).files())
    handles = [ck.save(step, make_state(step)) for step in (1, 2, 3)]
    ck.close()
    assert all(handle.committed.done() for handle in handles)
    assert [handle.committed.result() for handle in handles]
    assert_saved_all(root)


def assert_saved_all(root: Path) -> None:
    for step in (1, 2, 3):
        assert step_state(root, step) == (step, 0)


@pytest.mark.parametrize("times", [1, 3])
def test_a_checkpointer_may_be_closed_and_opened_again_at_once(times: int, root: Path) -> None:
    for number in range(times):
        with Checkpointer(root, options(keep_last=None)) as ck:
            ck.save(number, make_state(number))
    assert [step_state(root, number)[0] for number in range(times)] == list(range(times))
