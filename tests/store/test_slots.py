"""Shard files of retired steps, used again."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.errors import PersistError
from ckpt_core.store import GuestStore, StepStore, opened_by_hand, step_path
from ckpt_core.system.kept_mappings import KeptMappings
from tests.store.harness import (
    SHARD,
    Fault,
    QuickFiles,
    faulty,
    fill,
    left,
    make_store,
    mark_of,
    save,
    save_quiet,
)


def test_the_shard_file_of_a_retired_step_becomes_that_of_a_later_one(root: Path) -> None:
    store = make_store(root, keep_last=1)
    store.open()
    inodes = []
    for step in range(5):
        inodes.append((save(store, step) / SHARD).stat().st_ino)
        store.retire()
    assert len(set(inodes)) == 2
    assert mark_of(step_path(root, 4)) == 4
    store.close()


def test_the_best_fitting_slot_is_taken(root: Path) -> None:
    store = make_store(root, keep_last=1, spare_slots=3)
    store.open()
    for step, size in enumerate([4096, 8192, 16384, 4096]):
        attempt = store.begin(step)
        fill(store, attempt, mark=step, nbytes=size)
        store.publish(attempt)
    store.retire()
    attempt = store.begin(9)
    for number, (want, got) in enumerate([(5000, 8192), (5000, 16384), (5000, 4096)]):
        assert store.take_slot(attempt, f"shard-0000{number}-0.safetensors", want)
        assert (attempt.path / f"shard-0000{number}-0.safetensors").stat().st_size == got
    assert not store.take_slot(attempt, SHARD, 1)
    store.close()


def test_no_more_slots_are_kept_than_allowed(root: Path) -> None:
    store = make_store(root, keep_last=1, spare_slots=2)
    store.open()
    for step in range(5):
        save(store, step)
    store.retire()
    assert len(left(root, ".slots")) == 2
    store.close()
    fewer = make_store(root, spare_slots=1)
    fewer.open()
    assert len(left(root, ".slots")) == 1
    fewer.close()


def test_a_store_by_hand_leaves_slots_for_others_and_makes_none(root: Path) -> None:
    store = make_store(root, keep_last=1, spare_slots=3)
    store.open()
    for step in range(4):
        save(store, step)
    store.retire()
    store.close()
    slots = left(root, ".slots")
    assert len(slots) == 3
    with opened_by_hand(root, files=QuickFiles()) as by_hand:
        assert left(root, ".slots") == slots
        save(by_hand, 3, mark=5)  # which takes one
    assert mark_of(step_path(root, 3)) == 5
    assert len(left(root, ".slots")) == 2 and set(left(root, ".slots")) < set(slots)


def test_a_file_that_a_user_linked_elsewhere_is_never_overwritten(root: Path) -> None:
    store = make_store(root, keep_last=1)
    store.open()
    backup = root.parent / "backup"
    os.link(save(store, 1) / SHARD, backup)
    for step in (2, 3, 4):
        save(store, step)
        store.retire()
    assert backup.read_bytes() == bytes([1]) * 4096
    (slot,) = left(root, ".slots")
    os.link(root / ".slots" / slot, root.parent / "again")
    assert not store.take_slot(store.begin(9), SHARD, 4096)
    store.close()


def test_a_step_that_is_being_read_is_replaced_without_touching_its_bytes(store: StepStore) -> None:
    old = save(store, 1, mark=1)
    with open(old / SHARD, "rb") as reader:
        hold = store.protect(1)
        save(store, 1, mark=2)
        save(store, 2, mark=3)
        assert reader.read() == bytes([1]) * 4096
        hold.release()
    assert left(store.root, ".slots") == []


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ENOENT, errno.EXDEV])
def test_a_slot_that_cannot_be_taken_never_fails_a_save(root: Path, code: int) -> None:
    fault = Fault("rename", code, part=".slots/")
    store = faulty(root, fault)
    save_quiet(store, fault, 30)
    fault.armed = False
    assert store.retire() == (10,)
    fault.armed = True
    attempt = store.begin(40)
    assert not store.take_slot(attempt, SHARD, 4096)
    fill(store, attempt, mark=40)
    store.publish(attempt)
    assert mark_of(step_path(root, 40)) == 40
    store.close()


def test_a_name_that_is_taken_gets_no_slot(root: Path) -> None:
    store = make_store(root, keep_last=1)
    store.open()
    save(store, 1)
    save(store, 2)
    store.retire()
    attempt = store.begin(3)
    (attempt.path / SHARD).write_text("here")
    assert not store.take_slot(attempt, SHARD, 4096)
    assert (attempt.path / SHARD).read_text() == "here"
    store.close()


class Nearly(QuickFiles):
    """A disk with 1000 bytes left."""

    def free_bytes(self, path: Path) -> int:
        return 1000


def test_a_save_that_cannot_fit_is_refused_before_it_is_written(root: Path) -> None:
    store = make_store(root, Nearly(), keep_last=1)
    store.open()
    store.check_space(1000)
    with pytest.raises(PersistError, match=r"1000 B free.*needs 4.0 KiB more.*keep_last"):
        store.check_space(4096)
    save(store, 1)
    save(store, 2)
    store.retire()
    store.check_space(4096)
    store.check_space(5096)
    with pytest.raises(PersistError, match="needs 1001 B more"):
        store.check_space(5097)
    store.close()


def test_a_slot_counts_for_one_file_and_for_none_that_takes_no_slot(root: Path) -> None:
    store = make_store(root, Nearly(), keep_last=1)
    store.open()
    for step, size in enumerate([4096, 8192, 4096]):
        save(store, step, nbytes=size)
    store.retire()
    store.check_space(4096, 8192)
    store.check_space(8192, 4096, 1000)
    store.check_space(9192, 4096)
    store.check_space(8192, 4096, others_bytes=1000)
    for sizes, others, more in (
        ((4096, 8192, 1001), 0, "1001 B"),
        ((8192, 8192), 0, "4.0 KiB"),
        ((4096, 4096, 4096), 0, "4.0 KiB"),
        ((), 8192, "8.0 KiB"),
        ((4096, 8192), 1001, "1001 B"),
    ):
        with pytest.raises(PersistError, match=f"needs {more} more"):
            store.check_space(*sizes, others_bytes=others)
    store.close()


class InMemory(QuickFiles):
    """As if the root were on tmpfs, in small pages."""

    def in_memory(self, path: Path) -> bool:
        return True

    def in_huge_pages(self, path: Path) -> bool:
        return False


def test_of_a_root_in_memory_each_rank_gets_the_files_that_it_wrote(root: Path) -> None:
    """It may have them mapped, and nobody else can tell that nothing else has."""
    files = InMemory()
    kept = [KeptMappings(files=files, most=4) for _ in range(2)]
    settings: dict[str, Any] = {"files": files, "keep_last": 1, "keep_every": None}
    store = StepStore(root, **settings, spare_slots=4, shared=True, kept=kept[0])
    guest = GuestStore(root, files=files, rank=1, kept=kept[1])
    store.open()
    shards = [f"shard-0000{rank}-0.safetensors" for rank in range(2)]
    for step in (1, 2):
        attempt = store.begin(step)
        fill(store, attempt, mark=10 * step)
        files.write_new(attempt.path / shards[1], bytes([10 * step + 1]) * 4096)
        fd = files.open_write(attempt.path / shards[1])
        assert kept[1].keep(fd, 4096, None)
        store.publish(attempt)
    os.link(step_path(root, 1) / shards[0], root.parent / "backup")
    store.retire()
    (slot,) = left(root, ".slots")
    assert slot.startswith("for-1-"), "the other one has a second name, and is deleted"
    attempt = store.begin(3)
    assert not store.take_slot(attempt, shards[0], 4096)
    assert guest.next_slot(4096) == root / ".slots" / slot
    with (root / ".slots" / slot).open("rb"):
        assert not guest.take_slot(attempt, shards[1], 4096)
    assert left(root, ".slots") == []
    save(store, 4)
    store.retire()
    assert [slot[:6] for slot in sorted(left(root, ".slots"))] == ["for-0-", "for-1-"]
    for rank, one in enumerate((store, guest)):
        assert one.take_slot(attempt, shards[rank], 4096)
        assert (attempt.path / shards[rank]).read_bytes() == bytes([20 + rank]) * 4096
    kept[1].close()
    store.close()


def test_whoever_opens_a_root_takes_files_of_any_rank(root: Path) -> None:
    store = make_store(root, keep_last=1, spare_slots=2)
    store.open()
    for step in (1, 2):
        save(store, step)
    store.retire()
    (slot,) = left(root, ".slots")
    (root / ".slots" / slot).rename(root / ".slots" / "for-7-abc")
    assert not store.take_slot(store.begin(3), SHARD, 4096)
    store.close()
    again = make_store(root, keep_last=1, spare_slots=2)
    again.open()
    assert again.take_slot(again.begin(3), SHARD, 4096)
    again.close()
