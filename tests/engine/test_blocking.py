"""blocking=True: a save returns when its step is committed, or raises what failed it."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, Options, PersistError
from tests.crash.promises import check_clean, quietly
from tests.crash.states import make_state, options, step_state
from tests.faults.layers import FaultAt, Stuck

__all__ = ["quietly"]


def blocking(**changes: Any) -> Options:
    return options(blocking=True, **changes)


def test_the_step_is_there_when_save_returns(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, blocking()) as ck:
        for step in (1, 2, 3):
            handle = ck.save(step, make_state(step))
            assert handle.committed.done() and ck.latest_step() == step
            assert step_state(tmp_path, step) == (step, 0)


def test_the_step_is_there_when_the_open_forms_are_sealed(tmp_path: Path) -> None:
    state = make_state(1)
    tensors = {name: state[name] for name in ("weight", "moment")}
    with Checkpointer(tmp_path, blocking()) as ck:
        save = ck.begin(1, tensors)
        save.stage(tensors)
        assert save.seal(state).committed.done() and ck.steps() == (1,)
        files = ck.begin_files(2, "tag", pointer="latest")
        files.add("model.pt", tensors)
        assert files.seal().committed.done()
        assert (tmp_path / "latest").read_text() == "tag"
        assert torch.load(tmp_path / "tag" / "model.pt")["weight"].equal(state["weight"])


@pytest.mark.parametrize("on_error", ["raise", "warn"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failure_is_raised_by_that_very_save_and_by_no_other(
    tmp_path: Path, code: int, on_error: str
) -> None:
    fault = FaultAt(None, code, lasting=True, names=("pwrite",))
    with Checkpointer(tmp_path, blocking(on_error=on_error), files=fault.files()) as ck:
        ck.save(1, make_state(1))
        fault.n = 0
        with pytest.raises(PersistError, match="step 2 was not saved") as caught:
            ck.save(2, make_state(2))
        assert caught.value.step == 2 and caught.value.path is not None
        assert ck.steps() == (1,)
        save = ck.begin(3, {"w": torch.ones(5000)})
        save.stage("w")
        with pytest.raises(PersistError, match="step 3 was not saved"):
            save.seal()
        files = ck.begin_files(4, "tag")
        files.add("model.pt", torch.ones(5000))
        with pytest.raises(PersistError, match="step 4 was not saved"):
            files.seal()
        fault.mend()
        ck.save(5, make_state(5))
        assert ck.steps() == (1, 5)
    check_clean(tmp_path)


def test_a_disk_that_hangs_ends_the_wait_at_the_timeout(tmp_path: Path) -> None:
    stuck = Stuck("sync")
    with Checkpointer(tmp_path, blocking(timeout=5.0), files=stuck.files()) as ck:
        ck.save(1, make_state(1))
        stuck.engage()
        began = time.monotonic()
        with pytest.raises(PersistError, match="stuck or too slow"):
            ck.save(2, make_state(2))
        assert time.monotonic() - began < 60
        assert ck.steps() == (1,)
        stuck.release()


def test_the_wait_counts_as_a_stall(tmp_path: Path) -> None:
    fault = Stuck("sync")
    with Checkpointer(tmp_path, blocking(timeout=5.0), files=fault.files()) as ck:
        fault.engage()
        with pytest.raises(PersistError):
            ck.save(1, make_state(1))
        assert ck.gauges.stall.seconds >= 5.0
        fault.release()
        before = ck.gauges.stall.seconds
        handle = ck.save(2, make_state(2))
        assert 0 < handle.stall_s <= ck.gauges.stall.seconds - before
    with Checkpointer(tmp_path, blocking()) as ck:
        machine = ck.gauges.machine()
        assert (machine["blocking"], machine["pipelined"]) == (True, True)


def test_an_error_of_save_itself_is_as_ever(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, blocking()) as ck:
        with pytest.raises(ValueError, match="step="):
            ck.save(-1, make_state(1))
        ck.save(1, make_state(1))
        assert ck.steps() == (1,)
