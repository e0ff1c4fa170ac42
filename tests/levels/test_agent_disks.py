"""Disks of roots and levels: a filesystem has a directory of its own there, and a link may lead to it."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckpt_core import Checkpointer, Level, Options, committed_steps
from tests.faults.mounts import fill, mounted

TOP = Path(__file__).parents[2]
_FORGET, _READ_ALL = 24, (1, 2)
"""PR_CAPBSET_DROP, and by what a superuser reads files that nobody may."""

_TRAIN = """
import sys, torch
from ckpt_core import Checkpointer, Level, Options

root, level = sys.argv[1:]
with Checkpointer(root, Options(timeout=60), levels=[Level(level)]) as ck:
    for step in (1, 2, 3):
        ck.save(step, {"w": torch.ones(3)})
    ck.wait(level=1, last=True)
"""


def _as_user(*command: object) -> str:
    """What a process says to which the modes of files mean what they say, whoever runs the tests."""
    done = _ended_as_user(*command)
    assert done.returncode == 0
    return done.stdout


def _ended_as_user(*command: object) -> subprocess.CompletedProcess[str]:
    libc = ctypes.CDLL(None)

    def drop() -> None:
        for capability in _READ_ALL:
            libc.prctl(_FORGET, capability, 0, 0, 0)

    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=TOP,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=drop,
    )


@pytest.fixture
def disks(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("root", "level"):
        (tmp_path / name / "lost+found").mkdir(parents=True)
        (tmp_path / name / "lost+found").chmod(0)
    return tmp_path / "root", tmp_path / "level"


def test_steps_go_from_disk_to_disk_and_are_told(disks: tuple[Path, Path]) -> None:
    root, level = disks
    _as_user("-c", _TRAIN, root, level)
    for place in disks:
        told = json.loads(_as_user("-m", "ckpt_core", "ls", place, "--json"))
        assert told["steps"][-1]["step"] == 3 and not told["directories"]
    assert "0 left damaged" in _as_user("-m", "ckpt_core", "scrub", root, level)


def test_a_link_above_a_level_that_leads_to_another_disk_leads_its_steps_there(
    tmp_path: Path,
) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    far = tmp_path / "far"
    far.symlink_to("one")
    with Checkpointer(tmp_path / "root", Options(timeout=60), levels=[Level(far / "run")]) as ck:
        ck.save(1, {"w": torch.ones(3)})
        ck.wait(level=1)
        shutil.copytree(tmp_path / "one" / "run", tmp_path / "other" / "run")
        (tmp_path / "next").symlink_to("other")
        (tmp_path / "next").replace(far)
        ck.save(2, {"w": torch.ones(3)})
        ck.wait(level=1)
    assert committed_steps(tmp_path / "one" / "run") == (1,)
    assert committed_steps(tmp_path / "other" / "run") == (1, 2)


def test_what_else_may_not_be_read_in_a_root_keeps_no_step_from_being_listed(
    tmp_path: Path,
) -> None:
    (tmp_path / "root" / "private").mkdir(parents=True)
    (tmp_path / "root" / "private").chmod(0)
    told = json.loads(_as_user("-m", "ckpt_core", "ls", tmp_path / "root", "--json"))
    assert told["steps"] == told["directories"] == []


def test_a_level_that_is_full_at_the_start_is_told_and_goes_on_once_it_is_to_keep_fewer_steps(
    tmp_path: Path,
) -> None:
    def opened(disk: Path, keep_last: int) -> Checkpointer:
        levels = [Level(disk / "far", keep_last=keep_last)]
        return Checkpointer(tmp_path / "root", Options(timeout=60), levels=levels)

    state = {"w": torch.ones(1 << 20)}
    with mounted("tmpfs", tmp_path) as disk:
        with opened(disk, 4) as ck:
            for step in (1, 2, 3, 4):
                ck.save(step, state)
                ck.wait(level=1)
        fill(disk)
        with opened(disk, 1) as ck:
            ck.save(5, state)
            ck.wait(level=1)
            assert ck.restore(state).step == 5
        assert committed_steps(disk / "far")[-1] == 5


@pytest.fixture
def private_pins(tmp_path: Path) -> Iterator[Path]:
    """A root of two steps and a level; whose pins are is not known to others."""
    root = tmp_path / "root"
    with Checkpointer(root, Options(timeout=60), levels=[Level(tmp_path / "far")]) as ck:
        for step in (1, 2):
            ck.save(step, {"w": torch.ones(3)}).committed.result(60)
        ck.pin(1)
        ck.wait(level=1, last=True)
    (root / ".pins").chmod(0)
    yield root
    (root / ".pins").chmod(0o700)


def test_pins_that_may_not_be_read_keep_no_step_from_being_told(private_pins: Path) -> None:
    told = json.loads(_as_user("-m", "ckpt_core", "ls", private_pins, "--json"))
    assert [(row["step"], row["pinned"]) for row in told["steps"]] == [(1, None), (2, None)]
    assert told["pinned_only"] is None
    unknown = "which steps are pinned is not known"
    assert unknown in " ".join(_as_user("-m", "ckpt_core", "ls", private_pins).split())
    page = private_pins.parent / "page.html"
    _as_user("-m", "ckpt_core", "report", private_pins, "--out", page)
    assert unknown in page.read_text()
    now = json.loads(_as_user("-m", "ckpt_core", "watch", private_pins, "--once", "--json"))
    assert now["roots"][0]["steps"][-1]["step"] == 2 and not now["problems"]
    done = _ended_as_user("-m", "ckpt_core", "doctor", private_pins, "--json")
    found = {one["check"]: one for one in json.loads(done.stdout)["checks"]}
    assert (
        found["newest"]["found"].startswith("step 2 of 2") and found["pins"]["level"] == "warning"
    )
    done = _ended_as_user("-m", "ckpt_core", "rm", private_pins, "--after", 1, "--dry-run")
    assert done.returncode == 0 and "would remove 1 step: 2" in done.stdout
    assert unknown in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("rm", "{root}", "--step", "2", "--yes"),
        ("pin", "{root}", "2"),
        ("unpin", "{root}", "2"),
        ("push", "{root}", "2", "--to", "{root}/../other"),
    ],
    ids=lambda command: command[0],
)
def test_what_pins_decide_on_is_refused_where_they_may_not_be_read(
    private_pins: Path, command: tuple[str, ...]
) -> None:
    words = [word.format(root=private_pins) for word in command]
    done = _ended_as_user("-m", "ckpt_core", *words)
    assert done.returncode == 2
    assert f"{private_pins / '.pins'}: this user may not read which steps are pinned" in done.stderr
    assert "Nothing was changed" in done.stderr
    assert committed_steps(private_pins) == (1, 2)
    assert not (private_pins.parent / "other").exists()
