"""Finding directories of files, and sharing the work of verifying one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, ConfigError, Options, committed_directories, verify
from ckpt_core.system.files import Files


def save(root: Path, *names: str, files: int = 3) -> None:
    with Checkpointer(root) as ck:
        for step, name in enumerate(names):
            save = ck.begin_files(step, name)
            for number in range(files):
                save.add(f"{number}.pt", {"weight": torch.full((5000,), float(number))})
            save.seal().committed.result(60)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_directories_are_listed_newest_first(tmp_path: Path) -> None:
    save(tmp_path, "b", "c", "a")
    assert committed_directories(tmp_path) == ("a", "c", "b")


def test_directories_are_listed_by_the_pointer_that_they_were_committed_with(
    tmp_path: Path,
) -> None:
    with Checkpointer(tmp_path) as ck:
        for step, pointer in enumerate(["latest", None, "latest", "best"]):
            save = ck.begin_files(step, f"tag{step}", pointer=pointer)
            save.add("0.pt", {"n": step})
            save.seal().committed.result(60)
    assert committed_directories(tmp_path) == ("tag3", "tag2", "tag1", "tag0")
    assert committed_directories(tmp_path, pointer="latest") == ("tag2", "tag0")
    assert committed_directories(tmp_path, pointer="other") == ()


def test_directories_are_listed_newest_first_when_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = time.time()
    monkeypatch.setattr(time, "time", lambda: 2 * started - time.monotonic())
    save(tmp_path, "b", "c", "a")
    assert committed_directories(tmp_path) == ("a", "c", "b")


def test_directories_are_listed_newest_first_when_the_clock_was_set_back_between_two_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "b", "d")
    now = time.time
    for hours, names in ((1, ("c", "a")), (2, ("e",)), (0, ("f",))):
        monkeypatch.setattr(time, "time", lambda hours=hours: now() - 3600 * hours)
        save(tmp_path, *names)
    assert committed_directories(tmp_path) == ("f", "e", "a", "c", "d", "b")


def test_steps_and_directories_of_others_are_no_directories_of_files(tmp_path: Path) -> None:
    save(tmp_path, "tag")
    with Checkpointer(tmp_path) as ck:
        ck.save(7, {"weight": torch.ones(10)})
    (tmp_path / "notes").mkdir()
    assert committed_directories(tmp_path) == ("tag",)


def test_one_that_lacks_a_file_is_left_out(tmp_path: Path) -> None:
    save(tmp_path, "old", "new")
    (tmp_path / "new" / "1.pt").unlink()
    assert committed_directories(tmp_path) == ("old",)


def test_a_root_that_is_not_there_holds_none(tmp_path: Path) -> None:
    assert committed_directories(tmp_path / "nowhere") == ()


@pytest.mark.parametrize("count", [2, 3, 7, 1000])
def test_a_damaged_file_is_found_by_whoever_has_it_in_his_share(tmp_path: Path, count: int) -> None:
    save(tmp_path, "tag")
    flip(tmp_path / "tag" / "1.pt")
    reports = [verify(tmp_path / "tag", share=(number, count)) for number in range(count)]
    assert [report.ok for report in reports].count(False) == 1
    whole = verify(tmp_path / "tag")
    assert sum(report.checked_bytes for report in reports) == whole.checked_bytes
    assert sum(report.unchecked_bytes for report in reports) == whole.unchecked_bytes


def test_shares_are_of_equal_length_whatever_the_files_are(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Options(chunk_bytes=4096)) as ck:
        save = ck.begin_files(1, "tag")
        save.add("large.pt", torch.zeros(100_000))
        save.add("small.pt", torch.zeros(300))
        save.seal().committed.result(60)
    whole = verify(tmp_path / "tag").checked_bytes
    for number in range(3):
        checked = verify(tmp_path / "tag", share=(number, 3)).checked_bytes
        assert abs(checked - whole / 3) <= 4096


class NoDirect(Files):
    """Fails where the page cache would be passed by."""

    def open_read(self, path: Path, *, direct: bool = False) -> int:
        assert not direct
        return super().open_read(path)


def test_what_is_to_stay_in_the_page_cache_is_not_read_past_it(tmp_path: Path) -> None:
    save(tmp_path, "tag")
    assert verify(tmp_path / "tag", keep_cached=True, files=NoDirect()).ok
    with pytest.raises(AssertionError):
        verify(tmp_path / "tag", files=NoDirect())


def test_a_missing_file_is_found_by_everyone(tmp_path: Path) -> None:
    save(tmp_path, "tag")
    (tmp_path / "tag" / "1.pt").unlink()
    assert not any(verify(tmp_path / "tag", share=(number, 2)).ok for number in range(2))


@pytest.mark.parametrize("share", [(1, 1), (-1, 2), (0, 0), (0, 1.5), ("0", 2), (0,), 2])
def test_a_wrong_share_is_refused(tmp_path: Path, share: Any) -> None:
    with pytest.raises(ConfigError, match="share="):
        verify(tmp_path, share=share)
