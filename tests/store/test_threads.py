"""Saving, retiring and reading at once."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.errors import PersistError
from ckpt_core.store import GuestStore, StepStore, step_path
from tests.crash.layers import hooked
from tests.store.harness import (
    QuickFiles,
    left,
    make_store,
    mark_of,
    save,
)


def test_many_threads_save_retire_and_read_at_once(root: Path) -> None:
    store = make_store(root, keep_last=2)
    store.open()
    failures: list[BaseException] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            step = store.latest()
            if step is None:
                continue
            hold = store.protect(step)
            if step in store.steps():
                mark_of(step_path(root, step))
            hold.release()

    def write(first: int) -> None:
        for step in range(first, 120, 3):
            save(store, step)
            store.retire()

    def guarded(work: object, *args: int) -> None:
        try:
            assert callable(work)
            work(*args)
        except BaseException as error:
            failures.append(error)

    writers = [threading.Thread(target=guarded, args=(write, first)) for first in range(3)]
    reader = threading.Thread(target=guarded, args=(read,))
    for thread in (*writers, reader):
        thread.start()
    for thread in writers:
        thread.join(timeout=60)
    done.set()
    reader.join(timeout=60)
    assert not failures
    save(store, 120)  # the threads save out of order: what is below the newest is kept until now
    store.retire()
    assert store.steps() == (119, 120)
    assert left(root) == []
    store.close()


def test_a_step_is_replaced_while_others_begin_and_end_to_read(root: Path) -> None:
    store = make_store(root)
    store.open()
    kept = [store.protect(2) for _ in range(1000)]
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            store.protect(1).release()

    reader = threading.Thread(target=read)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        reader.start()
        for mark in range(100):
            save(store, 1, mark=mark)
    finally:
        done.set()
        reader.join()
        sys.setswitchinterval(before)
    assert mark_of(step_path(root, 1)) == 99 and len(kept) == 1000
    store.close()


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("times", [1, 3, 1000])
def test_a_directory_that_another_rank_gives_up_while_it_is_made_is_made_anew(
    root: Path, leads: bool, times: int
) -> None:
    name = "000000000001-01234567"
    left_over = times

    def given_up(operation: str, args: tuple[Any, ...], act: Any) -> Any:
        nonlocal left_over
        if args[0].name != name or not left_over:
            return act()
        left_over -= 1
        args[0].mkdir()
        try:
            return act()
        finally:
            args[0].rmdir()

    files = hooked(QuickFiles, given_up, ("mkdir",))
    leader = StepStore(root, files=files, keep_last=2, keep_every=None, spare_slots=0, shared=True)
    leader.open()
    store = leader if leads else GuestStore(root, files=files, rank=1)
    if times < 1000:
        assert store.begin(1, name).path.is_dir()
    else:
        with pytest.raises(PersistError, match="begin a save"):
            store.begin(1, name)
    leader.close()
