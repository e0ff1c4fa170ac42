"""`doctor --root`: what a root's filesystem can do, and what it holds."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_core import Checkpointer, Options
from ckpt_core.cli.doctor.mounts import Mount, judge_mount, mount_of
from ckpt_core.cli.doctor.storage import check_lock, check_sharing
from ckpt_core.store import RootLock
from ckpt_core.system.files import Files
from tests.cli.doctoring import Cli, Diagnosis, diagnosis
from tests.faults.mounts import mounted, remount

GOLDEN = Path(__file__).parents[1] / "compat" / "golden-v3"
TAG = "global_step7"
_HOLD = """
import sys
from pathlib import Path
from ckpt_core.store import RootLock
with RootLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def _look(cli: Cli, root: Path) -> Diagnosis:
    return diagnosis(cli, "--quick", "--root", root)


def _tree(root: Path) -> dict[str, tuple[int, int]]:
    found = {str(path): path.lstat() for path in root.rglob("*")}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}


def test_a_root_that_is_not_there_is_not_made(cli: Cli, tmp_path: Path) -> None:
    made = _look(cli, tmp_path / "a" / "ckpts")
    assert made.one("root") == ("ok", f"{tmp_path / 'a' / 'ckpts'} can be made; ")
    assert [made.one(check)[0] for check in ("lock", "commit")] == ["ok", "ok"]
    assert made.of("newest") == []
    assert list(tmp_path.iterdir()) == []


def test_a_root_stays_as_it_was(cli: Cli, ckpts: Path) -> None:
    before = _tree(ckpts)
    made = _look(cli, ckpts)
    assert made.code == 0
    assert "step 30 of 3 committed steps" in made.one("newest")[1]
    assert "the newest checkpoint takes" in made.one("free space")[1]
    assert _tree(ckpts) == before


def test_the_root_is_named_with_its_option_or_without(cli: Cli, ckpts: Path) -> None:
    by_option = _newest(_look(cli, ckpts))
    assert by_option == _newest(diagnosis(cli, "--quick", ckpts))
    both = cli("doctor", ckpts, "--root", ckpts)
    assert both.code == 2 and "name one root" in both.err


def _newest(made: Diagnosis) -> tuple[str, str]:
    """What was found of the newest step, without its age, which goes on between two looks."""
    level, text = made.one("newest")
    return level, re.sub(r"\d+ \w+ ago", "AGE", text)


def test_a_relative_root_is_meant_from_here(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "can be made" in _look(cli, Path("ckpts")).one("root")[1]


def test_what_is_no_root_is_a_problem(cli: Cli, ckpts: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for path in (tmp_path / "file", tmp_path / "file" / "ckpts", tmp_path / "link"):
        assert "is no directory" in _look(cli, path).one("root")[1]
    made = _look(cli, ckpts / "step-000000000010")
    assert made.of("root")[-1][0] == "problem"
    assert "is one step, not a root" in made.of("root")[-1][1]


def test_a_filesystem_that_tells_no_size_is_not_full(cli: Cli, tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path) as where:
        remount(where, "size=0")
        with Checkpointer(where, Options()) as checkpointer:
            checkpointer.save(1, {"x": bytes(4 << 20)}).committed.result(60)
        made = _look(cli, where)
        assert made.one("free space")[0] == "ok"
        assert "tells no size; the newest checkpoint takes" in made.one("free space")[1]


def test_a_filesystem_in_memory_is_told_and_so_is_one_that_is_full(
    cli: Cli, tmp_path: Path
) -> None:
    with mounted("tmpfs", tmp_path) as where:
        with Checkpointer(where, Options()) as checkpointer:
            checkpointer.save(1, {"x": bytes(4 << 20)}).committed.result(60)
        made = _look(cli, where)
        assert made.one("filesystem")[0] == "warning"
        assert "gone after a reboot" in made.one("filesystem")[1]
        assert made.one("free space")[0] == "ok"
        _fill(where, leave=7 << 20)
        assert "two in flight do not" in _look(cli, where).one("free space")[1]
        (where / "filler").unlink()
        _fill(where, leave=2 << 20)
        assert _look(cli, where).bad == ["free space"]
        (where / "filler").unlink()
        _fill(where, leave=0)
        assert _look(cli, where).bad == ["free space", "commit"]


def _fill(where: Path, *, leave: int) -> None:
    stats = os.statvfs(where)
    (where / "filler").write_bytes(bytes(stats.f_bavail * stats.f_frsize - leave))


def test_a_root_that_cannot_be_written_is_a_problem(cli: Cli, ckpts: Path, tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path) as where:
        shutil.copytree(ckpts, where / "ckpts")
        remount(where, "ro")
        made = _look(cli, where / "ckpts")
        assert made.bad == ["root"]
        assert "step 30" in made.one("newest")[1]
        assert made.of("commit") == []
        assert "so" in _look(cli, where / "new").one("root")[1]


def test_direct_io_is_told_as_the_filesystem_has_it(cli: Cli, tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path / "x", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        pytest.skip("no O_DIRECT here, and whether its absence is told depends on the first write")
    level, _ = _look(cli, tmp_path).one("direct I/O")
    assert level == "ok"


def test_a_lock_that_keeps_nobody_out_is_a_problem(tmp_path: Path) -> None:
    with RootLock(tmp_path):
        assert check_lock(tmp_path).level == "ok"
    assert check_lock(tmp_path).level == "problem"


def test_a_record_lock_is_told(tmp_path: Path) -> None:
    with RootLock(tmp_path):
        found = check_lock(tmp_path, is_record=True)
    assert found.level == "note" and "POSIX record lock" in found.found


def test_whether_files_are_recycled_is_told(cli: Cli, tmp_path: Path) -> None:
    made = _look(cli, tmp_path)
    (tmp_path / "file").write_text("")
    assert made.one("recycling")[0] == ("ok" if Files().is_unused(tmp_path / "file") else "note")


class NoLinks(Files):
    def link(self, source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


class Elsewhere(Files):
    def is_local(self, path: Path) -> bool:
        return False


def test_what_sharing_would_do_is_told(cli: Cli, tmp_path: Path) -> None:
    made = _look(cli, tmp_path).one("sharing")
    assert made[0] == ("ok" if Files().is_local(tmp_path) else "note")
    (tmp_path / "file").write_text("")
    found = check_sharing(tmp_path, tmp_path / "file", files=Elsewhere())
    assert found.level == "note" and "does nothing" in found.found
    if Files().is_local(tmp_path):
        found = check_sharing(tmp_path, tmp_path / "file", files=NoLinks())
        assert found.level == "note" and "Operation not permitted" in found.found


# -- what it holds -----------------------------------------------------------------------------


def test_who_has_the_root_open_is_told_and_keeps_it(cli: Cli, ckpts: Path) -> None:
    command = [sys.executable, "-c", _HOLD, str(ckpts)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdin is not None
        writer.stdout.readline()
        found = _look(cli, ckpts).one("in use")
        assert check_lock(ckpts).level == "ok"
        writer.stdin.close()
    assert found[0] == "note"
    assert f"pid {writer.pid} on " in found[1]


def test_what_lies_about_is_told(cli: Cli, ckpts: Path) -> None:
    (ckpts / ".inflight" / "000000000040-0123abcd").mkdir(parents=True)
    (ckpts / ".corrupt" / "step-000000000005-000000000005-0123abcd").mkdir(parents=True)
    (ckpts / "step-000000000030" / "manifest.json").write_bytes(b"{}")
    made = _look(cli, ckpts)
    assert made.code == 0
    assert [level for level, _ in made.of("left over")] == ["note", "warning"]
    assert "1 save without a commit" in made.of("left over")[0][1]
    assert made.one("newest")[0] == "warning"
    assert "step 30" in made.one("newest")[1]


def test_an_empty_root_says_that_training_begins_anew(cli: Cli, tmp_path: Path) -> None:
    assert "no committed step" in _look(cli, tmp_path).one("newest")[1]


@pytest.fixture
def tags(tmp_path: Path) -> Path:
    """A root of DeepSpeed, with one tag."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "tags"))


def test_a_whole_tag_is_the_newest(cli: Cli, tags: Path) -> None:
    made = _look(cli, tags)
    assert made.one("newest") == ("ok", f"tag {TAG}, named by 'latest', of 1 whole tag; ")
    assert "the newest checkpoint takes" in made.one("free space")[1]


def test_a_tag_that_is_damaged_or_missing_is_told(cli: Cli, tags: Path) -> None:
    (tags / "latest").write_text("global_step8")
    assert "which is not there" in _look(cli, tags).one("newest")[1]
    (tags / "latest").unlink()
    assert f"load_checkpoint() takes {TAG}" in _look(cli, tags).one("newest")[1]
    (tags / "latest").write_text(TAG)
    (tags / TAG / "mp_rank_00_model_states.pt").unlink()
    level, text = _look(cli, tags).one("newest")
    assert level == "warning"
    assert "lacks files" in text
    assert "no other tag is whole" in text


def test_a_tag_that_another_engine_saved_is_told(cli: Cli, tags: Path) -> None:
    (tags / "global_step8").mkdir()
    (tags / "latest").write_text("global_step8\n")
    level, text = _look(cli, tags).one("newest")
    assert level == "warning"
    assert "saved by DeepSpeed's own engine" in text


# -- mounts ------------------------------------------------------------------------------------


def test_the_filesystem_is_that_of_the_deepest_mount() -> None:
    found = mount_of(Path("/proc/self"))
    assert found is not None
    assert (found.kind, found.place) == ("proc", "/proc")


@pytest.mark.parametrize(
    ("kind", "options", "levels"),
    [
        ("ext4", "rw", ["ok"]),
        ("xfs", "rw,nobarrier", ["ok", "warning"]),
        ("tmpfs", "rw", ["warning"]),
        ("overlay", "rw", ["warning"]),
        ("nfs4", "rw", ["note"]),
        ("nfs", "rw,nolock,local_lock=all", ["note", "warning"]),
        ("lustre", "rw,localflock", ["note", "warning"]),
        ("fuse.s3fs", "rw", ["warning"]),
        ("fuse.juicefs", "rw", ["note"]),
    ],
)
def test_filesystems_that_forget_are_told(kind: str, options: str, levels: list[str]) -> None:
    found = judge_mount(Mount(kind, "/x", frozenset(options.split(","))))
    assert [finding.level for finding in found] == levels


def test_a_root_that_this_user_may_not_enter_is_a_problem_beside_all_other_checks(
    cli: Cli, ckpts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_dir = Path.is_dir

    def refused(path: Path, **more: bool) -> bool:
        if path == ckpts / ".levels":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return is_dir(path, **more)

    monkeypatch.setattr(Path, "is_dir", refused)
    made = _look(cli, ckpts)
    assert made.code == 1 and made.bad == ["root", "level"]
    assert "cannot be told: Permission denied" in made.one("level")[1]
    assert made.one("commit")[0] == "ok" and made.one("python")[0] == "ok"
