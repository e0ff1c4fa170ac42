"""A user's function that ends its thread by `sys.exit()`, called on a thread of ours."""

from __future__ import annotations

import errno
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, Options, PersistError
from ckpt_core.observe import Event, EventName
from ckpt_core.system.files import Files

OPTIONS = Options(timeout=60, on_error="warn")
STATE = {"w": torch.arange(1000.0)}


class Troubled(Files):
    """Writes of leaves fail, or hang, until they are let go."""

    def __init__(self, *, hangs: bool) -> None:
        self.go_on = threading.Event()
        self._hangs = hangs

    def write_mapped(self, *args: Any) -> Any:
        self._trouble()
        return super().write_mapped(*args)

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._trouble()
        super().pwrite(fd, data, offset)

    def _trouble(self) -> None:
        if self._hangs:
            assert self.go_on.wait(60)
        if not self.go_on.is_set():
            raise OSError(errno.EIO, "the disk is broken")


def _exit(*_: Any) -> None:
    sys.exit(3)


@pytest.mark.parametrize("which", ["staged", "committed"])
def test_a_callback_that_exits_ends_no_thread_of_ours(which: str, tmp_path: Path) -> None:
    with Checkpointer(tmp_path, OPTIONS) as checkpointer:
        for step in (1, 2):
            handle = checkpointer.save(step, STATE)
            future: Future[Any] = getattr(handle, which)
            future.add_done_callback(_exit)
            handle.committed.result(60)
        assert checkpointer.steps() == (1, 2)


@pytest.mark.parametrize("blocking", [False, True])
def test_a_subscriber_that_exits_leaves_no_failed_save_without_an_end(
    blocking: bool, tmp_path: Path
) -> None:
    def exit_at_failure(event: Event) -> None:
        if event.name is EventName.FAILED:
            sys.exit(1)

    files = Troubled(hangs=False)
    options = replace(OPTIONS, blocking=blocking)
    with Checkpointer(tmp_path, options, files=files) as checkpointer:
        checkpointer.events.subscribe(exit_at_failure)
        with pytest.raises(PersistError, match="the disk is broken"):
            checkpointer.save(1, STATE).committed.result(60)
        files.go_on.set()
        checkpointer.save(2, STATE).committed.result(60)


def test_one_that_exits_at_the_deadline_leaves_later_saves_theirs(tmp_path: Path) -> None:
    files = Troubled(hangs=True)
    with Checkpointer(tmp_path, Options(timeout=1, on_error="warn"), files=files) as checkpointer:
        checkpointer.events.subscribe(_exit, only=[EventName.FAILED])
        for step in (1, 2):
            with pytest.raises(PersistError):
                checkpointer.save(step, STATE).committed.result(60)
        files.go_on.set()


def test_on_a_thread_of_its_own_it_may(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, OPTIONS) as checkpointer:
        handle = checkpointer.save(1, STATE)
        handle.committed.result(60)
        with pytest.raises(SystemExit):
            handle.committed.add_done_callback(_exit)
        checkpointer.events.subscribe(_exit)
        with pytest.raises(SystemExit):
            checkpointer.save(2, STATE)
        checkpointer.wait()
