"""Saves of one Checkpointer that several threads start: one after another, and never for ever."""

from __future__ import annotations

import os
import threading
from pathlib import Path
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


def test_saves_of_several_threads_are_all_committed(tmp_path: Path) -> None:
    state, errors = {"x": torch.randn(1000, 100)}, []
    with Checkpointer(tmp_path, options(in_flight=3)) as ck:

        def save(first: int) -> None:
            try:
                for step in range(first, first + 8):
                    ck.save(step, state)
            except Exception as exc:
                errors.append(exc)

        threads = [threading.Thread(target=save, args=(100 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ck.wait()
        assert not errors and len(ck.steps()) == 32


@pytest.mark.parametrize("call", ["save", "begin", "begin_files"])
def test_another_thread_waits_until_a_save_is_started_and_no_longer_than_timeout(
    call: str, tmp_path: Path
) -> None:
    held, state = Held(), {"x": torch.ones(3)}
    with Checkpointer(tmp_path, options(timeout=1, in_flight=3)) as ck:

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
