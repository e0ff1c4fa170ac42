"""Jobs that close right behind saves that fail; each function runs in every rank."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

from ckpt_core import Checkpointer, CkptError
from ckpt_core.system.files import Files
from tests.crash.layers import CHANGES, hooked
from tests.multirank.crew import Rank
from tests.multirank.jobs import make_state, options

SLOW_S = 0.15


def closes_behind_failures(who: Rank, root: str, cases: list[list[Any]]) -> int:
    """For each case a good save, one that fails, and the end."""
    for number, case in enumerate(cases):
        with contextlib.suppress(CkptError):
            _run_case(who, Path(root) / str(number), *case)
    return len(cases)


def _run_case(who: Rank, root: Path, how: str, failing: int, slow: int, operation: str) -> None:
    broken = threading.Event()

    def hook(name: str, args: tuple[Any, ...], act: Any) -> Any:
        if broken.is_set() and who.rank == failing and how == "disk" and name == "pwrite":
            raise OSError(28, os.strerror(28), "disk")
        if broken.is_set() and who.rank == slow and name == operation:
            time.sleep(SLOW_S)
        return act()

    files = hooked(Files, hook, CHANGES)
    with Checkpointer(root, options(on_error="warn"), coordination=who.meet(), files=files) as ck:
        ck.save(1, make_state(0, 1)).committed.result(60)
        broken.set()
        state = make_state(0, 2)
        if how == "refuses" and who.rank == failing:
            state["odd"] = threading.Lock()
        ck.save(2, state)
