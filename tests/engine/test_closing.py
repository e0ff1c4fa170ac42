"""A close that comes while a save is under way, or from a thread of the engine, and what comes after one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_training import Gate

from ckpt_core import Checkpointer, ConfigError, Options
from ckpt_core.observe import EventName

FORMS: dict[str, Callable[[Checkpointer, dict[str, Any]], Any]] = {
    "save": lambda ck, state: ck.save(2, state),
    "begin": lambda ck, state: ck.begin(2, state),
    "begin_files": lambda ck, state: ck.begin_files(2, "files"),
}


def state() -> dict[str, Any]:
    return {"w": torch.ones(5000), "b": torch.ones(5)}


class Closes:
    """An object whose state closes the Checkpointer that asks for it."""

    def __init__(self, ck: Checkpointer) -> None:
        self.ck = ck

    def state_dict(self) -> dict[str, Any]:
        self.ck.close()
        return {}

    def load_state_dict(self, given: dict[str, Any]) -> None:
        """Nothing to load."""


def check_ended(ck: Checkpointer) -> None:
    began = time.monotonic()
    ck.wait()
    ck.close()
    assert time.monotonic() - began < 60
    with Checkpointer(ck.root) as found:
        assert found.steps() == (1,)


@pytest.mark.parametrize("blocking", [False, True])
def test_a_save_whose_state_closes_the_checkpointer_says_so(tmp_path: Path, blocking: bool) -> None:
    ck = Checkpointer(tmp_path, Options(timeout=600, blocking=blocking))
    ck.save(1, state())
    with pytest.raises(ConfigError, match="was closed during this call"):
        ck.save(2, {"given": state(), "closes": Closes(ck)})
    check_ended(ck)


@pytest.mark.parametrize("form", FORMS)
def test_a_save_that_waits_for_a_place_says_that_another_thread_has_closed(
    tmp_path: Path, form: str
) -> None:
    gate = Gate()
    gate.shut()
    ck = Checkpointer(tmp_path, Options(timeout=600, in_flight=1), files=gate)
    ck.save(1, state())

    def close() -> None:
        while not any(one.undo for one in [*ck._engine.journal.threads.values()]):
            time.sleep(0.001)
        closing = threading.Thread(target=ck.close)
        closing.start()
        while ck._engine.flights.closed is None:
            time.sleep(0.001)
        gate.open_up()
        closing.join(60)

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(ConfigError, match="was closed during this call"):
        FORMS[form](ck, state())
    closer.join(60)
    check_ended(ck)


@pytest.mark.parametrize("form", FORMS)
def test_a_save_that_has_begun_says_that_it_was_closed_since(tmp_path: Path, form: str) -> None:
    ck = Checkpointer(tmp_path, Options(timeout=600))
    ck.save(1, state())
    ck.events.subscribe(lambda event: ck.close(), only=[EventName.BEGIN])
    with pytest.raises(ConfigError, match="was closed during this call"):
        FORMS[form](ck, state())
    check_ended(ck)


CALLS: dict[str, Callable[[Checkpointer], object]] = {
    "wait": Checkpointer.wait,
    "restore": lambda ck: ck.restore(state()),
    "close": Checkpointer.close,
}


@pytest.mark.parametrize("told", [EventName.STAGED, EventName.COMMITTED, None])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_would_wait_for_its_own_thread_is_refused_at_once(
    tmp_path: Path, call: str, told: EventName | None
) -> None:
    ck, done, has_callback = Checkpointer(tmp_path), threading.Event(), threading.Event()

    def called(*_: object) -> None:
        with pytest.raises(ConfigError, match=rf"{call}\(\) was called by a callback"):
            CALLS[call](ck)
        done.set()

    if told is not None:
        ck.events.subscribe(called, only=[told])
    # Else this thread might call it: the save has ended when it is given.
    ck.events.subscribe(lambda event: has_callback.wait(60), only=[EventName.STAGED])
    handle = ck.save(1, {"large": torch.ones(500_000), **state()})
    if told is None:
        handle.committed.add_done_callback(called)
    has_callback.set()
    assert done.wait(60)
    check_ended(ck)


@pytest.mark.parametrize("form", FORMS)
def test_a_save_in_a_callback_for_which_no_place_is_free_is_refused_at_once(
    tmp_path: Path, form: str
) -> None:
    ck, done = Checkpointer(tmp_path, Options(timeout=600, in_flight=1)), threading.Event()

    def called(event: object) -> None:
        # What has just been committed has its place until all have been told of it.
        with pytest.raises(ConfigError, match=r"save\(\) was called by a callback"):
            FORMS[form](ck, state())
        done.set()

    ck.events.subscribe(called, only=[EventName.COMMITTED])
    ck.save(1, state())
    assert done.wait(60)
    check_ended(ck)


def test_another_thread_of_the_program_may_close(tmp_path: Path) -> None:
    ck = Checkpointer(tmp_path, Options(timeout=600))
    ck.save(1, state())
    closer = threading.Thread(target=ck.close)
    closer.start()
    closer.join(60)
    check_ended(ck)


def test_a_step_that_a_closed_checkpointer_cannot_retire_keeps_its_pin(tmp_path: Path) -> None:
    ck = Checkpointer(tmp_path, Options(keep_last=1))
    ck.save(1, state()).committed.result(60)
    ck.pin(1)
    ck.save(2, state())
    ck.close()
    with pytest.raises(ConfigError, match="is closed"):
        ck.unpin(1, retire=True)
    assert (tmp_path / ".pins").is_dir() and any((tmp_path / ".pins").iterdir())
    ck.unpin(1)
    with Checkpointer(tmp_path, Options(keep_last=1)) as found:
        found.save(3, state())
        found.wait()
        assert found.steps() == (3,)
