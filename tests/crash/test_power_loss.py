"""Power lost at any sync: what was committed is there, bit for bit, and nothing is torn.

A run tries a part of the syncs (tests/places.py), each in ten outcomes or so.
Memory-mapped writes (mode DIRECT) are left out: they do not go through the file layer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import places
from tests.crash.directories import DIRECTORIES
from tests.crash.disk import Disk, Policy, build
from tests.crash.power import NOTES, Recorder, broken_promise, moments
from tests.crash.promises import QuickFiles
from tests.crash.recording import recorded, recorded_restart
from tests.crash.scenarios import SCENARIOS, Scenario

ALL: dict[str, Scenario] = {**SCENARIOS, **DIRECTORIES}
RECORDABLE = [name for name, plan in ALL.items() if plan.options.get("mode") != "direct"]
RESTARTED = [
    *("retire_and_recycle", "replace_by_two_renames"),
    *("files_again", "files_over_others_by_two_renames"),
]

MOST, MOST_OF_A_RESTART = 5, 3
"""So many syncs of one scenario, but for `CKPT_PLACES=all`."""


def disk_of(tmp_path: Path) -> Path:
    base = tmp_path / "disk"
    base.mkdir()
    return base / "root"


@pytest.mark.parametrize("scenario", RECORDABLE)
def test_a_power_loss_at_any_sync_keeps_every_committed_step(scenario: str, tmp_path: Path) -> None:
    plan, root = ALL[scenario], disk_of(tmp_path)
    log = recorded(plan, root).log
    at = places.some(moments(log), MOST, of=scenario)
    count, problem = broken_promise(log, root, tmp_path, plan, seeds=4, at=at)
    print(f"{scenario}: {count} states of the disk")
    assert not problem, problem
    assert count > 10


@pytest.mark.parametrize("after", range(1, 6))
@pytest.mark.parametrize("scenario", RESTARTED)
def test_a_power_loss_after_a_kill_and_a_restart_keeps_every_committed_step(
    scenario: str, after: int, tmp_path: Path
) -> None:
    plan, root = ALL[scenario], disk_of(tmp_path)
    log = recorded_restart(plan, root, after=after, skip=None).log
    at = places.some(moments(log), MOST_OF_A_RESTART, of=f"{scenario} {after}")
    count, problem = broken_promise(log, root, tmp_path, plan.went_on(), seeds=2, at=at)
    print(f"{scenario}, killed after {after} renames: {count} states of the disk")
    assert not problem, problem


def test_the_model_of_the_disk_agrees_with_the_disk_when_the_power_stays_on(
    tmp_path: Path,
) -> None:
    for name in RECORDABLE:
        root = tmp_path / name / "disk" / "root"
        root.parent.mkdir(parents=True)
        disk = Disk(root.parent, root)
        for event in recorded(ALL[name], root).log:
            if event.name not in NOTES:
                disk.apply(event.name, event.args)
        tree = disk.after(Policy(data="keep"))
        assert tree == tree_of(root.parent), name


def tree_of(place: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(place)): path.read_bytes() if path.is_file() else None
        for path in place.rglob("*")
    }


def test_the_model_loses_what_was_not_synced_and_keeps_what_was(tmp_path: Path) -> None:
    root = disk_of(tmp_path)
    recorder = Recorder()
    files = recorder.files(QuickFiles)
    files.mkdir(root)
    files.sync_dir(root.parent)
    files.write_new(root / "named", b"synced")
    files.sync_dir(root)
    files.write_new(root / "nameless", b"synced")
    fd = files.open_write(root / "named")
    files.pwrite(fd, b"SYNCED", 0)
    files.close(fd)
    disk = Disk(root.parent, root)
    for event in recorder.log:
        disk.apply(event.name, event.args)
    lost = disk.after(Policy(data="drop", names="drop"))
    assert lost == {"root": None, "root/named": b"synced"}
    kept = disk.after(Policy(data="keep", names="keep"))
    assert kept == {"root": None, "root/named": b"SYNCED", "root/nameless": b"synced"}
    build(lost, tmp_path / "lost")
    assert tree_of(tmp_path / "lost") == lost
