"""Runs of a scenario above a Recorder."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ckpt_core import Checkpointer, CkptError
from tests.crash.power import Recorder
from tests.crash.scenarios import Run, Scenario
from tests.crash.states import options


def recorded(
    plan: Scenario, root: Path, *, skip: str | None = None, fail: str | None = None
) -> Recorder:
    """A run of a scenario; the power may fail at any sync after "start"."""
    recorder = Recorder(skip=skip, fail=fail)
    files = recorder.files(plan.base)

    def acknowledge(step: int, mark: int) -> None:
        recorder.note("acknowledged", step, mark)

    plan.prepare(root, files, acknowledge)
    recorder.note("start")
    with contextlib.suppress(CkptError):  # the save whose sync failed
        plan.run(root, files, acknowledge, recorder.note)
    recorder.note("pinned", None)
    return recorder


def recorded_restart(plan: Scenario, root: Path, *, after: int, skip: str | None) -> Recorder:
    """The same, but the process is killed after some renames; the power may fail after its restart."""
    recorder = Recorder(skip=skip)
    files = recorder.files(plan.base)

    def acknowledge(step: int, mark: int) -> None:
        recorder.note("acknowledged", step, mark)

    plan.prepare(root, files, acknowledge)
    recorder.die_after(after)
    try:
        plan.run(root, files, acknowledge)
    except Exception:
        assert recorder.dead
    recorder.note("start")
    recorder.revive()
    with Checkpointer(root, options(), files=files) as ck:
        plan.go_on(Run(ck, acknowledge))
    return recorder
