"""A root whose disk leaves its place while a run goes on: nothing is written to what is there instead."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt_core import Checkpointer, PersistError
from tests.faults.mounts import bound, mounted


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A directory of a disk, mounted over another directory of that disk, as a container's volume is."""
    with mounted("tmpfs", tmp_path) as disk:
        place, behind = disk / "place", disk / "behind"
        place.mkdir()
        behind.mkdir()
        command = ["mount", "--bind", str(behind), str(place)]
        subprocess.run(command, check=True, timeout=60)
        try:
            yield place
        finally:
            subprocess.run(
                ["umount", "-l", str(place)], check=False, timeout=60, stderr=subprocess.DEVNULL
            )


def unmount(place: Path) -> None:
    subprocess.run(["umount", "-l", str(place)], check=True, timeout=60)


def unmount_and_remove(place: Path) -> None:
    unmount(place)
    place.rmdir()


def check_goes_on(ck: Checkpointer) -> None:
    with pytest.raises(PersistError, match="is not on the disk"):
        ck.save(3, {"a": 3})  # is told of the one before
    ck.save(3, {"a": 3}).committed.result(60)
    assert ck.steps() == (1, 3)


@pytest.mark.parametrize("below", ["", "root"])
@pytest.mark.parametrize("leave", [unmount, unmount_and_remove])
def test_a_volume_that_is_unmounted_is_not_made_anew_below_it(
    volume: Path, below: str, leave: Callable[[Path], None]
) -> None:
    behind = volume.parent / "behind"
    with Checkpointer(volume / below) as ck:
        ck.save(1, {"a": 1}).committed.result(60)
        leave(volume)
        with pytest.raises(PersistError, match=r"is not on the disk.* Nothing was written"):
            ck.save(2, {"a": 2}).committed.result(60)
        assert not volume.exists() or not list(volume.iterdir())
        volume.mkdir(exist_ok=True)
        subprocess.run(["mount", "--bind", str(behind), str(volume)], check=True, timeout=60)
        check_goes_on(ck)


def test_another_directory_that_is_mounted_over_a_root_gets_none_of_its_steps(
    tmp_path: Path,
) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    other.mkdir()
    with Checkpointer(root) as ck:
        ck.save(1, {"a": 1}).committed.result(60)
        with bound(other, at=root):
            with pytest.raises(PersistError, match="is not on the disk"):
                ck.save(2, {"a": 2}).committed.result(60)
            assert not list(other.iterdir())
        check_goes_on(ck)
