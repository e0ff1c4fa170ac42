"""A real disk that is full, or turns read-only: earlier steps stay, and the next save works in the end."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest
import torch

from ckpt_core import Checkpointer, PersistError, load, verify
from ckpt_core.system.files import Files
from tests.crash.states import options
from tests.faults.mounts import mounted, remount

KINDS = ["tmpfs", "ext4"]
_WAIT_S = 60


class Optimist(Files):
    """Says that there is room: what is between the look and the write, somebody else may take."""

    def free_bytes(self, path: Path) -> int:
        return 1 << 40


def big_state(step: int) -> dict[str, torch.Tensor]:
    """Four mebibytes."""
    return {name: torch.full((2**19,), float(step)) for name in ("weight", "moment")}


def assert_exact(root: Path, step: int) -> None:
    tree = load(root / f"step-{step:012d}")
    assert all(bool((tensor == step).all()) for tensor in tree.values())


def fill_disk(ck: Checkpointer) -> tuple[list[int], PersistError]:
    """Save until it fails; the steps that were committed, and the error."""
    for step in range(1, 20):
        handle = ck.save(step, big_state(step))
        error = handle.committed.exception(_WAIT_S)
        if error is not None:
            assert isinstance(error, PersistError), repr(error)
            assert error.step == step and error.path is not None
            return list(range(1, step)), error
    raise AssertionError("a disk of 24 MiB took 80 MiB")


@pytest.mark.parametrize("direct_io", ["auto", "off"])
@pytest.mark.parametrize("files", [Files, Optimist])
@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_fails_the_save_and_spares_the_steps(
    kind: str, files: type[Files], direct_io: str, tmp_path: Path
) -> None:
    with mounted(kind, tmp_path) as disk:
        root = disk / "root"
        chosen = options(keep_last=None, on_error="warn", chunk_bytes="256KiB", direct_io=direct_io)
        with Checkpointer(root, chosen, files=files()) as ck:
            done, error = fill_disk(ck)
            assert len(done) >= 3 and ck.steps() == tuple(done)
            if files is Optimist:
                assert isinstance(error.__cause__, OSError)
                assert error.__cause__.errno == errno.ENOSPC
            else:
                assert " free and this" in str(error)
            for step in done:
                assert_exact(root, step)
            ck._engine.store.remove(done[:2])
            ck.save(50, big_state(50)).committed.result(_WAIT_S)
            assert_exact(root, 50)
        assert verify(root).ok
        assert not list((root / ".inflight").iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_in_direct_mode_fails_the_save_and_does_not_kill_the_process(
    kind: str, tmp_path: Path
) -> None:
    with mounted(kind, tmp_path) as disk:
        chosen = options(keep_last=None, on_error="warn", chunk_bytes="256KiB", mode="direct")
        with Checkpointer(disk / "root", chosen, files=Optimist()) as ck:
            done, _ = fill_disk(ck)
            for step in done:
                assert_exact(disk / "root", step)


def test_where_writing_copies_no_mapped_file_is_written_over(tmp_path: Path) -> None:
    """Blocks that it has are not those that it takes then: on a full disk, SIGBUS ends the process."""
    with mounted("btrfs", tmp_path) as disk:
        root = disk / "root"
        chosen = options(keep_last=1, on_error="warn", chunk_bytes="256KiB", mode="direct")
        with Checkpointer(root, chosen, files=Optimist()) as ck:
            for step in (1, 2, 3):
                ck.save(step, big_state(step)).committed.result(_WAIT_S)
            ck.wait()
            assert not list(root.glob(".slots/*"))
            _take_all_space(disk / "ballast")
            assert ck.save(4, big_state(4)).committed.exception(_WAIT_S) is not None
        assert_exact(root, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_others_fill_to_the_last_byte_still_restores(kind: str, tmp_path: Path) -> None:
    with mounted(kind, tmp_path) as disk:
        root = disk / "root"
        with Checkpointer(root, options(chunk_bytes="256KiB")) as ck:
            ck.save(1, big_state(1)).committed.result(_WAIT_S)
        ballast = disk / "ballast"
        _take_all_space(ballast)
        with Checkpointer(root, options(on_error="warn"), files=Optimist()) as ck:
            live = big_state(0)
            found = ck.restore(live)
            assert found is not None and found.step == 1
            assert ck.save(2, big_state(2)).committed.exception(_WAIT_S) is not None
            ballast.unlink()
            ck.save(3, big_state(3)).committed.result(_WAIT_S)
            assert ck.steps() == (1, 3)


def _take_all_space(ballast: Path) -> None:
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)) > 0:
            pass


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_only_disk_can_be_restored_from_and_says_why_it_cannot_be_written(
    kind: str, tmp_path: Path
) -> None:
    with mounted(kind, tmp_path) as disk:
        root = disk / "root"
        with Checkpointer(root, options(chunk_bytes="256KiB")) as ck:
            ck.save(1, big_state(1)).committed.result(_WAIT_S)
        remount(disk, "ro")
        assert_exact(root, 1)
        assert verify(root).ok
        with pytest.raises(PersistError, match="read-only"):
            Checkpointer(root, options())
        remount(disk, "rw")
        with Checkpointer(root, options(chunk_bytes="256KiB")) as ck:
            ck.save(2, big_state(2)).committed.result(_WAIT_S)
            assert ck.steps() == (1, 2)


def test_a_disk_that_turns_read_only_under_a_run_fails_its_saves_and_no_more(
    tmp_path: Path,
) -> None:
    with mounted("tmpfs", tmp_path) as disk:
        root = disk / "root"
        root.mkdir()
        with Checkpointer(root, options(on_error="warn", chunk_bytes="256KiB")) as ck:
            ck.save(1, big_state(1)).committed.result(_WAIT_S)
            # A mount of the root upon itself can be read-only while files are open in the other.
            if os.system(f"mount --bind '{root}' '{root}' && mount -o remount,bind,ro '{root}'"):
                pytest.skip("bind mounts are not allowed here")
            try:
                error = ck.save(2, big_state(2)).committed.exception(_WAIT_S)
                assert isinstance(error, PersistError), repr(error)
                assert error.step == 2 and "ead-only" in str(error)
                assert_exact(root, 1)
            finally:
                os.system(f"umount '{root}'")
            ck.save(3, big_state(3)).committed.result(_WAIT_S)
            assert ck.steps() == (1, 3)
