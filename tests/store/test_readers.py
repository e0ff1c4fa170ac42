"""Whoever has opened or mapped a file of a step keeps its bytes, whatever becomes of the step."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core.store import GuestStore, StepStore, step_path
from ckpt_core.system.files import Files
from tests.faults.mounts import mounted
from tests.store.harness import (
    SHARD,
    Fault,
    QuickFiles,
    faulty,
    fill,
    interrupted,
    left,
    make_store,
    mark_of,
    save,
)

OLD = bytes([1]) * 4096


@pytest.fixture
def store(root: Path) -> Iterator[StepStore]:
    made = make_store(root, keep_last=1)
    made.open()
    yield made
    made.close()


def retire_first_and_save_many(store: StepStore) -> None:
    for step in range(2, 8):
        save(store, step)
        store.retire()
    assert store.steps() == (7,)


def opened(path: Path) -> Callable[[], bytes]:
    fd = os.open(path, os.O_RDONLY)

    def read() -> bytes:
        return os.pread(fd, 4096, 0)

    weakref.finalize(read, os.close, fd)
    return read


def mapped(path: Path) -> Callable[[], bytes]:
    with open(path, "rb") as file:
        view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return lambda: view[:]


def mapped_and_closed(path: Path) -> Callable[[], bytes]:
    """As safetensors' `load_file` does; Python's `mmap` keeps a descriptor of its own."""
    tensor = torch.from_file(str(path), size=4096, dtype=torch.uint8)
    return lambda: tensor.numpy().tobytes()


@pytest.mark.parametrize("read_by", [opened, mapped, mapped_and_closed])
def test_a_reader_keeps_the_bytes_of_a_retired_step(
    store: StepStore, read_by: Callable[[Path], Callable[[], bytes]]
) -> None:
    read = read_by(save(store, 1) / SHARD)
    retire_first_and_save_many(store)
    assert read() == OLD


def test_a_reader_in_another_process_keeps_the_bytes_of_a_retired_step(store: StepStore) -> None:
    code = (
        "import mmap, sys\n"
        "with open(sys.argv[1], 'rb') as file:\n"
        "    view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
        "sys.exit(view[:] != bytes([1]) * 4096)\n"
    )
    path = save(store, 1) / SHARD
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as reader:
        assert reader.stdout is not None and reader.stdin is not None
        reader.stdout.readline()
        retire_first_and_save_many(store)
        reader.stdin.close()
        assert reader.wait(timeout=60) == 0


def test_a_reader_of_a_step_that_is_replaced_keeps_its_bytes(store: StepStore) -> None:
    read = mapped(save(store, 1, mark=1) / SHARD)
    for mark in range(2, 7):
        save(store, 1, mark=mark)
    assert read() == OLD
    assert mark_of(step_path(store.root, 1)) == 6


def test_a_reader_that_comes_by_the_open_directory_keeps_its_bytes(root: Path) -> None:
    """The name of the step is gone then, and its files can still be opened."""

    class Late(QuickFiles):
        read: Callable[[], bytes] | None = None

        def is_unused(self, path: Path) -> bool:
            answer = super().is_unused(path)
            if self.read is None and ".retired" in str(path):
                self.read = opened(Path(f"/proc/self/fd/{folder}") / SHARD)
            return answer

    files = Late()
    store = make_store(root, files, keep_last=1)
    store.open()
    folder = os.open(save(store, 1), os.O_RDONLY | os.O_DIRECTORY)
    try:
        retire_first_and_save_many(store)
        assert files.read is not None and files.read() == OLD
    finally:
        os.close(folder)
        store.close()


def test_a_slot_that_somebody_opens_is_deleted_and_the_next_one_taken(root: Path) -> None:
    store = make_store(root, keep_last=1, spare_slots=2)
    store.open()
    for step in (1, 2, 3):
        save(store, step, nbytes=4096 * step)
    store.retire()
    (first, second) = (root / ".slots" / name for name in left(root, ".slots"))
    small = first if first.stat().st_size == 4096 else second
    read = opened(small)
    attempt = store.begin(4)
    assert store.take_slot(attempt, SHARD, 4096)
    assert (attempt.path / SHARD).stat().st_size == 8192
    assert left(root, ".slots") == []
    assert read() == OLD
    store.close()


def test_a_mapping_on_overlay_keeps_the_bytes_of_a_retired_step(tmp_path: Path) -> None:
    """The root of a container: it grants a lease beside a mapping whose descriptor is closed."""
    with mounted("overlay", tmp_path) as where:
        store = make_store(where / "root", keep_last=1)
        store.open()
        read = mapped_and_closed(save(store, 1) / SHARD)
        retire_first_and_save_many(store)
        store.close()
        assert read() == OLD


class NoLeases(QuickFiles):
    """A filesystem that cannot say who has a file open."""

    def is_unused(self, path: Path) -> bool:
        return False


def test_without_leases_nothing_is_recycled_and_saves_go_on(root: Path) -> None:
    store = make_store(root, NoLeases(), keep_last=1)
    store.open()
    read = opened(save(store, 1) / SHARD)
    retire_first_and_save_many(store)
    assert read() == OLD
    assert left(root, ".slots") == []
    assert mark_of(step_path(root, 7)) == 7
    store.close()


def test_a_slot_of_an_older_release_is_not_taken_where_there_are_no_leases(root: Path) -> None:
    store = make_store(root, NoLeases())
    store.open()
    (root / ".slots").mkdir()
    (root / ".slots" / "0123456789abcdef").write_bytes(OLD)
    assert not store.take_slot(store.begin(1), SHARD, 4096)
    store.close()


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOENT])
def test_a_slot_whose_moves_fail_never_fails_a_save(root: Path, nth: int, code: int) -> None:
    fault = Fault("rename", code, part=".taken")
    store = faulty(root, fault)
    fault.armed = False
    save(store, 30)
    store.retire()
    fault.armed, fault.after = True, nth - 1
    attempt = store.begin(40)
    assert not store.take_slot(attempt, SHARD, 4096)
    fault.armed = False
    assert not (attempt.path / SHARD).exists()
    fill(store, attempt, mark=40)
    store.publish(attempt)
    assert mark_of(step_path(root, 40)) == 40
    store.close()
    again = make_store(root)
    again.open()
    assert not [name for name in left(root, ".slots") if name.endswith(".taken")]
    again.close()


def test_asking_the_kernel_does_not_signal_this_process(tmp_path: Path) -> None:
    """Who opens a file that is leased makes the kernel send a signal, SIGIO if none is named."""
    path = tmp_path / "file"
    path.write_bytes(OLD)
    seen: list[int] = []
    before = signal.signal(signal.SIGIO, lambda number, frame: seen.append(number))
    stop = threading.Event()

    def open_and_close() -> None:
        while not stop.is_set():
            path.read_bytes()

    reader = threading.Thread(target=open_and_close)
    reader.start()
    try:
        for _ in range(300):
            Files().is_unused(path)
    finally:
        stop.set()
        reader.join(timeout=60)
        signal.signal(signal.SIGIO, before)
    assert seen == []
    assert Files().is_unused(path)


@pytest.mark.parametrize("nth", [0, 1])
def test_two_ranks_that_want_the_same_slot_both_get_one(root: Path, nth: int) -> None:
    """The other one comes between any two operations of the first."""
    seen = 0

    def other(name: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if armed and name == "rename":
            seen += 1
            if seen == nth + 1:
                assert guest.take_slot(attempt, "shard-00001-0.safetensors", 4096)

    armed = False
    store = make_store(root, interrupted(QuickFiles, other), keep_last=1, spare_slots=2)
    store.open()
    for step in (1, 2, 3):
        save(store, step)
    store.retire()
    attempt = store.begin(4)
    guest = GuestStore(root, files=QuickFiles(), rank=1)
    armed = True
    assert store.take_slot(attempt, SHARD, 4096)
    assert sorted(path.name for path in attempt.path.iterdir()) == [
        SHARD,
        "shard-00001-0.safetensors",
    ]
    assert left(root, ".slots") == []
    store.close()
