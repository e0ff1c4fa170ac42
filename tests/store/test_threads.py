"""Saving, retiring and reading at once."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from ckpt_core.store import step_path
from tests.store.harness import (
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
