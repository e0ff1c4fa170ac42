"""A bell wakes the thread that waits: by another one, by a name in a folder; by time alone if need be."""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path

from ckpt_core.system.bell import Bell

LONG_S = 60.0


def woken(bell: Bell, folder: Path) -> bool:
    """Whether the wait ends long before its time."""
    begun = time.monotonic()
    bell.wait(LONG_S, folders=[folder])
    return time.monotonic() - begun < LONG_S / 2


def test_who_rings_wakes_whoever_waits_or_will_wait(tmp_path: Path) -> None:
    with Bell() as bell:
        bell.ring()
        bell.ring()
        assert woken(bell, tmp_path)
        ringer = threading.Timer(0.1, bell.ring)
        ringer.start()
        assert woken(bell, tmp_path)
        ringer.join()
        bell.wait(0.0)  # nothing is left of it: this is by time


def test_a_name_that_appears_in_a_folder_wakes_once(tmp_path: Path) -> None:
    (tmp_path / "fresh").mkdir()
    with Bell() as bell:
        bell.wait(0.0, folders=[tmp_path])
        (tmp_path / "fresh").rename(tmp_path / "step-1")
        assert woken(bell, tmp_path)
        begun = time.monotonic()
        bell.wait(0.05, folders=[tmp_path])
        assert time.monotonic() - begun >= 0.05


def test_a_folder_that_comes_later_or_takes_the_place_of_another_is_watched(tmp_path: Path) -> None:
    folder = tmp_path / "root"
    with Bell() as bell:
        bell.wait(0.0, folders=[folder])
        for _ in range(2):
            folder.mkdir()
            bell.wait(0.0, folders=[folder])
            (tmp_path / "file").touch()
            (tmp_path / "file").rename(folder / "file")
            assert woken(bell, folder)
            (folder / "file").unlink()
            folder.rmdir()


def test_without_descriptors_it_waits_for_its_time(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        bell = Bell()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with bell:
        bell.ring()
        begun = time.monotonic()
        bell.wait(0.05, folders=[tmp_path])
        assert time.monotonic() - begun >= 0.05


def test_closed_it_rings_nothing_and_gives_back_its_descriptors(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    bell = Bell()
    bell.wait(0.0, folders=[tmp_path])
    bell.close()
    bell.close()
    bell.ring()
    assert len(os.listdir("/proc/self/fd")) == before
