"""A root that others remove, take over, link or litter."""

from __future__ import annotations

import errno
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_core.errors import CommitError, PersistError, RootBusy
from ckpt_core.store import GuestStore, RootLock, StepStore, committed_steps, step_path
from ckpt_core.system.files import Files
from tests.store.harness import QuickFiles, fill, left, make_store, mark_of, save


def test_a_root_that_was_removed_is_made_anew_by_the_next_save(
    store: StepStore, caplog: pytest.LogCaptureFixture
) -> None:
    save(store, 1)
    attempt = store.begin(2)
    fill(store, attempt, mark=2)
    shutil.rmtree(store.root)
    with pytest.raises(CommitError, match="is gone"):
        store.publish(attempt)
    store.abandon(attempt)
    with caplog.at_level(logging.WARNING):
        save(store, 3)
    assert "made it anew" in caplog.text
    assert store.steps() == (3,)
    with pytest.raises(RootBusy):
        RootLock(store.root).acquire()


def test_looking_for_space_makes_a_removed_root_anew(store: StepStore) -> None:
    shutil.rmtree(store.root)
    store.check_space(1)
    assert store.root.is_dir()


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[tuple[Path, Path, Path]]:
    """A place in which one of two disks can be, the first at first; where each is while it is not there."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as second:
        first, place = tmp_path / "first", tmp_path / "place"
        place.mkdir()
        if place.stat().st_dev == Path(second).stat().st_dev:
            pytest.skip("there is only one filesystem")
        yield place, first, Path(second)


def put(disk: Path, place: Path) -> None:
    if disk == place.parent / "first":
        place.unlink()
        disk.rename(place)
    else:
        place.rename(place.parent / "first")
        place.symlink_to(
            disk
        )  # known by its name, as a mount is: links are resolved when a store is made


@pytest.mark.parametrize("below", ["root", "folder/root"])
def test_nothing_is_written_while_another_disk_is_in_the_place_of_the_roots(
    disks: tuple[Path, Path, Path], below: str
) -> None:
    place, first, second = disks
    store = make_store(place / below)
    store.open()
    save(store, 1)
    attempt = store.begin(2)
    fill(store, attempt, mark=2)
    put(second, place)
    with pytest.raises(CommitError):
        store.publish(attempt)
    for act in (lambda: store.begin(3), lambda: store.check_space(1), store.retire):
        with pytest.raises(PersistError, match=r"is not on the disk.* Nothing was written"):
            act()
    assert list(second.iterdir()) == []
    put(first, place)
    save(store, 4)
    assert store.steps() == (1, 4)
    shutil.rmtree(store.root)
    save(store, 5)
    assert store.steps() == (5,)
    store.close()


def test_a_disk_that_comes_back_under_another_number_is_gone_on_with(
    disks: tuple[Path, Path, Path],
) -> None:
    place, _, second = disks
    store = make_store(place / "root")
    store.open()
    save(store, 1)
    shutil.copytree(place / "root", second / "root")
    put(second, place)
    save(store, 2)
    assert store.steps() == (1, 2)
    store.close()


def test_a_guest_writes_nothing_to_another_disk_in_the_place_of_the_roots(
    disks: tuple[Path, Path, Path],
) -> None:
    place, _, second = disks
    root = place / "root"
    root.mkdir()
    with RootLock(root) as lock:
        guest = GuestStore(root, files=QuickFiles(), rank=1)
        guest.find_leader(lock.owner(), leader=0, timeout_s=60)
        guest.begin(1, "one")
        (second / "root").mkdir()
        put(second, place)
        with pytest.raises(PersistError, match="is not on the disk"):
            guest.begin(2, "two")
    assert list((second / "root").iterdir()) == []


def test_a_removed_lock_file_is_taken_again_and_attempts_live_on(store: StepStore) -> None:
    attempt = store.begin(2)
    fill(store, attempt, mark=2)
    (store.root / ".lock").unlink()
    store.begin(3)
    store.publish(attempt)
    assert store.steps() == (2,)


def test_a_root_that_somebody_else_took_over_is_left_to_them(root: Path) -> None:
    store = make_store(root)
    store.open()
    attempt = store.begin(2)
    fill(store, attempt, mark=2)
    (root / ".lock").unlink()
    with RootLock(root):
        with pytest.raises(RootBusy):
            store.begin(3)
        with pytest.raises(CommitError, match="open for writing"):
            store.publish(attempt)
        with pytest.raises(RootBusy):
            store.retire()
    assert committed_steps(root) == ()
    store.close()


def test_links_are_never_followed_out_of_the_root(root: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("x")
    for name in (".inflight", ".slots"):
        (root / name).mkdir(parents=True)
        (root / name / "link").symlink_to(precious)
        (root / name / "tree").mkdir()
        (root / name / "tree" / "link").symlink_to(precious)
    (root / "step-000000000001").symlink_to(precious)
    store = make_store(root, keep_last=1)
    store.open()
    save(store, 2)
    save(store, 3)
    store.retire()
    assert (left(root), len(left(root, ".slots"))) == ([], 1)
    assert (precious / "data").read_text() == "x"
    store.close()


@pytest.mark.parametrize("name", [".inflight", ".slots", ".pins", ".corrupt"])
def test_a_link_in_place_of_a_directory_of_ours_is_refused(
    root: Path, tmp_path: Path, name: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "data").write_text("x")
    root.mkdir()
    (root / name).symlink_to(elsewhere)
    store = make_store(root, keep_last=1)
    store.open()
    if name == ".inflight":
        with pytest.raises(PersistError, match="link is where a directory belongs"):
            store.begin(1)
        store.close()
        return
    for step in (1, 2, 3):
        save(store, step)
    store.retire()
    store.suspect(3)
    if name == ".pins":
        with pytest.raises(PersistError, match="link is where"):
            store.pin(3)
    if name == ".corrupt":
        with pytest.raises(PersistError, match="link is where"):
            store.quarantine_suspects()
    assert [path.name for path in elsewhere.iterdir()] == ["data"]
    store.close()


def test_foreign_files_in_the_root_are_left_alone(root: Path) -> None:
    root.mkdir()
    (root / "notes.txt").write_text("mine")
    (root / "logs").mkdir()
    store = make_store(root, keep_last=1)
    store.open()
    save(store, 1)
    save(store, 2)
    store.retire()
    store.close()
    assert (root / "notes.txt").read_text() == "mine"
    assert (root / "logs").is_dir()


def test_a_root_given_as_a_link_works(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    store = make_store(tmp_path / "link", Files())
    store.open()
    save(store, 1)
    assert committed_steps(root) == committed_steps(tmp_path / "link") == (1,)
    store.close()


@pytest.mark.parametrize("below", ["", "root", "folder/root"])
def test_a_link_that_is_pointed_elsewhere_leads_no_open_store_there(
    tmp_path: Path, below: str
) -> None:
    runs, link = [tmp_path / "run-17", tmp_path / "run-18"], tmp_path / "current"
    for run, steps in zip(runs, [(1,), (5, 90)], strict=True):
        store = make_store(run / below)
        store.open()
        for step in steps:
            save(store, step)
        store.close()
    link.symlink_to(runs[0])
    store = make_store(link / below, keep_last=2)
    store.open()
    guest = GuestStore(link / below, files=QuickFiles(), rank=1)
    link.unlink()
    link.symlink_to(runs[1])
    for step in (2, 3):
        save(store, step)
        store.retire()
    assert guest.root == store.root == runs[0] / below
    assert committed_steps(runs[0] / below) == (2, 3)
    assert committed_steps(runs[1] / below) == (5, 90)
    store.close()


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_step_that_is_removed_right_when_a_save_replaces_it_fails_no_save(
    root: Path, can_exchange: bool
) -> None:
    class Removed(QuickFiles):
        def exchange(self, first: Path, second: Path) -> None:
            shutil.rmtree(second)
            if not can_exchange:
                raise OSError(errno.EINVAL, "no exchange of names here")
            super().exchange(first, second)

    store = make_store(root, files=Removed())
    store.open()
    save(store, 2, mark=1)
    save(store, 2, mark=2)
    assert store.steps() == (2,)
    assert mark_of(step_path(root, 2)) == 2
    store.close()
