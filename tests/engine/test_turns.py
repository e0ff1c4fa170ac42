"""Saves of one Checkpointer that several threads start: one after another, and never for ever."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, ConfigError, Options, StagingError
from ckpt_core.observe import Event, EventName


class Held:
    """An object whose `state_dict` holds a save until it is let go."""

    def __init__(self) -> None:
        self.inside, self.go = threading.Event(), threading.Event()

    def state_dict(self) -> dict[str, Any]:
        self.inside.set()
        assert self.go.wait(60)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def options(**more: Any) -> Options:
    given: dict[str, Any] = {"keep_last": None, "on_error": "raise", "timeout": 60, **more}
    return Options(**given)


def in_threads(count: int, save: Callable[[int], None]) -> None:
    """Each saves from a step of its own on, at the same time as the others."""
    threads = [threading.Thread(target=save, args=(100 * n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_saves_of_several_threads_are_all_committed(tmp_path: Path) -> None:
    state, errors = {"x": torch.randn(1000, 100)}, []
    with Checkpointer(tmp_path, options(in_flight=3)) as ck:

        def save(first: int) -> None:
            try:
                for step in range(first, first + 8):
                    ck.save(step, state)
            except Exception as exc:
                errors.append(exc)

        in_threads(4, save)
        ck.wait()
        assert not errors and len(ck.steps()) == 32


@pytest.mark.parametrize("call", ["save", "begin", "begin_files"])
def test_another_thread_waits_until_a_save_is_started_and_no_longer_than_timeout(
    call: str, tmp_path: Path
) -> None:
    held, state = Held(), {"x": torch.ones(3)}
    with Checkpointer(tmp_path, options(in_flight=3)) as ck:
        ck._engine.journal.timeout_s = (
            1  # Of the wait alone: a busy machine may need more for a save.
        )

        def start() -> None:
            if call == "save":
                ck.save(2, state)
            elif call == "begin":
                ck.begin(2, state).abort()
            else:
                ck.begin_files(2, "files").abort()

        first = threading.Thread(target=ck.save, args=(1, {"held": held, **state}))
        first.start()
        assert held.inside.wait(60)
        with pytest.raises(StagingError, match="another thread was in one"):
            start()
        held.go.set()
        first.join()
        start()


def test_a_save_within_a_save_takes_no_turn_of_its_own(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, options(in_flight=3)) as ck:

        class Saves(Held):
            def state_dict(self) -> dict[str, Any]:
                ck.save(1, {"x": 1})
                return {}

        ck.save(2, {"saves": Saves()})
        thread = threading.Thread(target=ck.save, args=(3, {"x": 1}))
        thread.start()
        thread.join()
        ck.wait()
        assert ck.steps() == (1, 2, 3)


def test_a_callback_on_a_thread_of_the_engine_does_not_wait_for_its_turn(tmp_path: Path) -> None:
    held, found = Held(), []
    with Checkpointer(tmp_path, options(in_flight=3)) as ck:

        def save_again(event: Event) -> None:
            if event.step != 1:
                return
            assert held.inside.wait(60)
            try:
                ck.save(3, {"x": 1})
            except ConfigError as exc:
                found.append(str(exc))
            finally:
                held.go.set()

        ck.events.subscribe(save_again, only=[EventName.COMMITTED])
        ck.save(1, {"x": 1})
        ck.save(2, {"held": held})
        ck.wait()
        assert ck.steps() == (1, 2)
    assert len(found) == 1 and "on a thread of the Checkpointer" in found[0]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_does_not_wait_for_a_thread_that_it_does_not_have(tmp_path: Path) -> None:
    held = Held()
    with Checkpointer(tmp_path, options(in_flight=3)) as ck:
        first = threading.Thread(target=ck.save, args=(1, {"held": held}))
        first.start()
        assert held.inside.wait(60)
        child = os.fork()
        if not child:
            try:
                ck.save(2, {"x": 1})
            except ConfigError:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        held.go.set()
        first.join()


class Pickled:
    """An object whose pickling holds `add`, or fails once it is let go."""

    def __init__(self, *, fails: bool) -> None:
        self.inside, self.go, self.fails = threading.Event(), threading.Event(), fails

    def __reduce__(self) -> Any:
        self.inside.set()
        assert self.go.wait(60)
        if self.fails:
            raise KeyError
        return (int, ())


@pytest.mark.parametrize("fails", [False, True])
def test_the_save_of_one_thread_goes_on_whatever_becomes_of_the_call_of_another(
    fails: bool, tmp_path: Path
) -> None:
    held, errors = Pickled(fails=fails), []
    with Checkpointer(tmp_path, options(in_flight=3, staging_bytes=1 << 24)) as ck:

        def add() -> None:
            files = ck.begin_files(1, "files")
            try:
                files.add("x.pt", {"held": held})
            except ConfigError as exc:
                errors.append(exc)
            files.seal().committed.result(60)

        first = threading.Thread(target=add)
        first.start()
        assert held.inside.wait(60)
        save = ck.begin(2, {"w": torch.ones(10)})
        save.stage(["w"])
        if fails:
            held.go.set()
            first.join(60)
        save.seal().committed.result(60)
        held.go.set()
        first.join(60)
        assert ck.steps() == (2,) and (tmp_path / "files").is_dir() and len(errors) == fails
    assert gc.isenabled()


def test_saves_that_several_threads_hold_open_are_all_committed(tmp_path: Path) -> None:
    errors = []
    with Checkpointer(tmp_path, options(in_flight=6, staging_bytes=1 << 26)) as ck:

        def save(first: int) -> None:
            try:
                for step in range(first, first + 20):
                    opened = ck.begin(step, {"v": torch.ones(100), "w": torch.ones(100)})
                    opened.stage(["v"])
                    opened.stage(["w"])
                    opened.seal().committed.result(60)
            except Exception as exc:
                errors.append(exc)

        in_threads(3, save)
        assert not errors and len(ck.steps()) == 60


@pytest.mark.parametrize("call", ["save", "wait_staged"])
def test_a_turn_that_an_interrupt_has_kept_is_given_back_by_the_next_call(
    call: str, tmp_path: Path
) -> None:
    def strike(frame: FrameType, event: str, arg: object) -> None:
        if frame.f_code.co_name == "drop_turn":
            sys.settrace(None)
            raise KeyboardInterrupt

    with Checkpointer(tmp_path, options(in_flight=3)) as ck:
        before = sys.gettrace()
        sys.settrace(strike)
        try:
            with pytest.raises(KeyboardInterrupt):
                ck.save(-2, {"x": 1})
        finally:
            sys.settrace(before)
        if call == "save":
            ck.save(3, {"x": 1})
        else:
            ck.wait_staged()
        thread = threading.Thread(target=ck.save, args=(4, {"x": 1}))
        thread.start()
        thread.join(60)
        ck.wait()
        assert 4 in ck.steps() and not ck._engine.journal.has_turn
