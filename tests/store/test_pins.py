"""Pins beside a writer: what was acknowledged stays, and what is gone is not acknowledged."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.cli.managing import set_pin
from ckpt_core.cli.requests import PinRequest
from ckpt_core.errors import ConfigError, NotCommitted, PersistError
from ckpt_core.store import StepStore, committed_steps, step_path
from tests.store.harness import (
    Fault,
    Killed,
    KillSwitch,
    QuickFiles,
    faulty,
    interrupted,
    left,
    make_store,
    mark_of,
    save,
)


class At:
    """Calls `act` ahead of the n-th change of a file, in a thread: it may have to wait for the changes."""

    def __init__(self, act: Any) -> None:
        self.act, self.at, self.count = act, -1, 0
        self.thread: threading.Thread | None = None

    def __call__(self, name: str, args: tuple[Any, ...]) -> None:
        if self.at == self.count:
            self.thread = threading.Thread(target=self.act)
            self.thread.start()
            self.thread.join(timeout=0.2)
        self.count += 1


class Once:
    """Ctrl-C right behind change `at` of a file: it was done, and nobody has noted that yet."""

    def __init__(self) -> None:
        self.at, self.count = -1, -1

    def __call__(self, name: str, args: tuple[Any, ...]) -> None:
        if self.at >= 0:
            self.count += 1
        if self.at >= 0 and self.count == self.at:
            if name == "rename":
                os.rename(*args)
            raise KeyboardInterrupt


class Pinning:
    """Another process that pins a step, and what it hears."""

    def __init__(self, root: Path, step: int) -> None:
        self.root, self.step = root, step
        self.acknowledged: bool | None = None

    def __call__(self) -> None:
        try:
            set_pin(PinRequest(root=self.root, step=self.step, json=True), pinned=True)
            self.acknowledged = True
        except NotCommitted:
            self.acknowledged = False


def retire(store: StepStore) -> None:
    store.retire()


def remove(store: StepStore) -> None:
    with contextlib.suppress(ConfigError):  # pinned, and nothing was removed
        store.remove([1])


@pytest.mark.parametrize("act", [retire, remove])
def test_a_pin_that_comes_between_any_two_changes_of_a_file_is_kept_or_refused(
    tmp_path: Path, act: Any
) -> None:
    heard = set()
    at, count = 0, 1
    while at < count:
        root = tmp_path / str(at)
        pinning = Pinning(root, 1)
        hook = At(pinning)
        store = make_store(root, interrupted(QuickFiles, hook), keep_last=1)
        store.open()
        save(store, 1)
        save(store, 2)
        hook.at, hook.count = at, 0
        act(store)
        assert hook.thread is not None
        hook.thread.join(timeout=60)
        count, hook.at = hook.count, -1
        heard.add(pinning.acknowledged)
        assert (1 in committed_steps(root)) == pinning.acknowledged
        assert (1 in store.pinned()) == pinning.acknowledged
        for step in (3, 4):
            save(store, step)
            store.retire()
        store.close()
        if pinning.acknowledged:
            assert mark_of(step_path(root, 1)) == 1
        assert left(root) == []
        at += 1
    assert heard == {True, False}


def test_a_kill_at_any_change_of_a_file_keeps_an_acknowledged_pin(tmp_path: Path) -> None:
    """The pin comes once the writer has read the pins and before the step loses its name."""
    at, died = 0, True
    while died:
        root = tmp_path / str(at)
        switch = KillSwitch()

        def pin_at_the_rename(
            name: str, args: tuple[Any, ...], root: Path = root, switch: KillSwitch = switch
        ) -> None:
            if name == "rename" and args[0] == step_path(root, 1):
                make_store(root).pin(1)
            switch(name, args)

        store = make_store(root, interrupted(QuickFiles, pin_at_the_rename), keep_last=1)
        store.open()
        save(store, 1)
        save(store, 2)
        switch.at, switch.count = at, 0
        died = False
        try:
            store.retire()
        except Killed:
            died = True
        store.close()
        again = make_store(root, keep_last=1)
        again.open()
        assert 1 in again.pinned() or at == 0
        assert mark_of(step_path(root, 1)) == 1
        again.close()
        at += 1
    assert at > 2


@pytest.mark.parametrize("after", [0, 1])
def test_steps_that_cannot_be_renamed_keep_their_names(root: Path, after: int) -> None:
    fault = Fault("rename", errno.EIO, part=".inflight", times=1)
    store = faulty(root, fault)
    fault.armed = False
    save(store, 30)
    fault.armed, fault.after = True, after
    with pytest.raises(PersistError, match="could not retire"):
        store.retire()
    assert store.steps() == (10, 20, 30)
    assert mark_of(step_path(root, 10)) == 10
    assert store.retire() == (10,)
    store.close()


def test_none_of_several_steps_is_removed_when_one_is_pinned_meanwhile(root: Path) -> None:
    def pin(name: str, args: tuple[Any, ...]) -> None:
        if name == "rename" and args[0] == step_path(root, 2):
            make_store(root).pin(2)

    store = make_store(root, interrupted(QuickFiles, pin))
    store.open()
    for step in (1, 2, 3):
        save(store, step)
    with pytest.raises(ConfigError, match=r"steps \[2\] are pinned.*nothing was removed"):
        store.remove([1, 2])
    assert store.steps() == (1, 2, 3)
    assert left(root) == []
    store.close()


def test_an_interrupt_at_any_change_of_a_file_takes_all_of_several_steps_or_none(
    tmp_path: Path,
) -> None:
    at, came = 0, True
    found = set()
    while came:
        switch = Once()
        store = make_store(tmp_path / str(at), interrupted(QuickFiles, switch))
        store.open()
        for step in (1, 2, 3):
            save(store, step)
        switch.at, came = at, False
        try:
            store.remove([1, 2])
        except KeyboardInterrupt:
            came = True
        found.add(store.steps())
        assert not [name for name in left(store.root) if name.endswith(".replaced")]
        store.close()
        again = make_store(tmp_path / str(at))
        again.open()
        assert again.steps() == store.steps() and left(again.root) == []
        again.close()
        at += 1
    assert found == {(1, 2, 3), (3,)} and at > 4


def test_a_pin_is_read_by_the_name_that_an_object_store_gives_it_too(store: StepStore) -> None:
    (store.root / ".pins").mkdir()
    for name in ("0", "7", "1234567890123", "007", "-1", "٧", "1" * 40, "notes"):
        (store.root / ".pins" / name).touch()
    assert store.pinned() == {0, 7, 1234567890123}
    store.pin(7)
    assert (store.root / ".pins" / "000000000007").exists()
    store.unpin(7)
    assert store.pinned() == {0, 1234567890123}
    for step in (0, 1, 2, 3):
        save(store, step)
    assert store.retire() == (1,)
    assert store.steps() == (0, 2, 3)


def test_a_step_that_was_retired_cannot_be_pinned(store: StepStore) -> None:
    for step in (1, 2, 3):
        save(store, step)
    store.retire()
    with pytest.raises(NotCommitted, match=r"step 1 is not in .* retired meanwhile"):
        store.pin(1)
    assert store.pinned() == frozenset()


def test_a_step_in_flight_or_still_to_come_can_be_pinned(store: StepStore) -> None:
    attempt = store.begin(2)
    save(store, 3)
    store.pin(2)
    store.pin(4)
    store.abandon(attempt)
    assert store.pinned() == {2, 4}


def test_an_older_pin_of_a_step_that_is_gone_is_left_as_it_is(store: StepStore) -> None:
    store.pin(1)
    save(store, 2)
    with pytest.raises(NotCommitted):
        store.pin(1, committed=True)
    assert store.pinned() == {1}


def test_a_writer_that_stands_still_is_told(
    store: StepStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_core.store.names._DECIDING_S", 0.0)
    path = save(store, 1)
    aside = store.root / ".inflight" / "000000000001-01234567.replaced"
    path.rename(aside)
    with pytest.raises(NotCommitted, match="does not go on"):
        make_store(store.root).pin(1, committed=True)
    store.repair()
    assert store.steps() == (1,) and store.pinned() == {1}


SAVING = """
import sys
from pathlib import Path
from tests.store.harness import make_store, save
store = make_store(Path(sys.argv[1]), keep_last=2)
store.open()
print("ready", flush=True)
step = 0
while not Path(sys.argv[2]).exists():
    save(store, step)
    store.retire()
    step += 1
store.close()
"""


def test_every_acknowledged_pin_is_kept_beside_a_job_that_saves(root: Path, tmp_path: Path) -> None:
    stop, tried, acknowledged = tmp_path / "stop", 0, set()
    command = [sys.executable, "-c", SAVING, str(root), str(stop)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "ready\n"
        try:
            while tried < 400:
                for step in committed_steps(root)[-3:]:
                    pinning = Pinning(root, step)
                    pinning()
                    acknowledged.update([step] if pinning.acknowledged else [])
                    tried += 1
        finally:
            stop.touch()
            assert job.wait(timeout=60) == 0
    assert acknowledged <= set(committed_steps(root))
    for step in acknowledged:
        mark_of(step_path(root, step))
