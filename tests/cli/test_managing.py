"""`rm`, `pin`, `unpin`."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import Checkpointer, ConfigError, Level, Options
from ckpt_core.cli.at_levels import FarSteps
from ckpt_core.cli.managing import _Doom, _remove
from ckpt_core.levels import Away, settle_plan, write_plan
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.levels.parity.holds import hold
from ckpt_core.store import (
    RootLock,
    committed_steps,
    opened_by_hand,
    pinned_steps,
    store_by_hand,
    unpinned_marks,
)
from ckpt_core.system.files import Files
from tests.levels.agents import plan_of
from tests.store.harness import Killed, KillSwitch, QuickFiles, interrupted, make_store
from tests.store.harness import save as save_step

Cli = Callable[..., Any]
TOP = Path(__file__).parents[2]


def test_named_steps_are_removed(cli: Cli, ckpts: Path) -> None:
    answer = cli("rm", ckpts, "--step", 10, "--step", 30, "--yes")
    assert answer.code == 0
    assert answer.out.startswith("removed 2 steps: 10, 30 (")
    assert committed_steps(ckpts) == (20,)
    assert not any((ckpts / ".inflight").iterdir())


def test_steps_after_one_are_removed(cli: Cli, ckpts: Path) -> None:
    assert cli("rm", ckpts, "--after", 20, "--yes").code == 0
    assert committed_steps(ckpts) == (10, 20)


def test_keep_last_keeps_pinned_steps_as_well(cli: Cli, ckpts: Path) -> None:
    (ckpts / ".pins" / "000000000099").touch()  # of a step that is gone
    answer = cli("rm", ckpts, "--keep-last", 1, "--yes")
    assert answer.code == 0
    assert committed_steps(ckpts) == (20, 30)
    assert "pinned steps stay: 20\n" in answer.err


def test_a_dry_run_changes_nothing(cli: Cli, ckpts: Path) -> None:
    answer = cli("rm", ckpts, "--keep-last", 1, "--dry-run")
    assert answer.code == 0
    assert answer.out.startswith("would remove 1 step: 10 (")
    assert committed_steps(ckpts) == (10, 20, 30)
    found = json.loads(cli("rm", ckpts, "--keep-last", 1, "--dry-run", "--json").out)
    assert (found["steps"], found["removed"], found["steps_left"]) == ([10], False, 3)


def test_nothing_is_removed_unless_somebody_says_yes(process: Cli, ckpts: Path) -> None:
    answer = process("rm", ckpts, "--step", 10)
    assert answer.code == 2
    assert "--yes" in answer.err
    assert committed_steps(ckpts) == (10, 20, 30)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("reply", "code", "left"), [("y", 0, 2), ("n", 2, 3), ("", 2, 3)])
def test_on_a_terminal_it_asks(ckpts: Path, reply: str, code: int, left: int) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "ckpt_core", "rm", str(ckpts), "--step", "10"]
    with subprocess.Popen(command, cwd=TOP, stdin=follower, stderr=subprocess.PIPE) as made:
        os.write(leader, f"{reply}\n".encode())
        assert made.stderr is not None
        said = made.stderr.read().decode()
    os.close(follower)
    os.close(leader)
    assert "remove 1 step: 10 (" in said
    assert made.returncode == code
    assert len(committed_steps(ckpts)) == left


@pytest.mark.parametrize(
    "options",
    [[], ["--step", 10, "--after", 5], ["--keep-last", 0], ["--step", 11], ["--step", 20]],
)
def test_unclear_missing_or_pinned_steps_are_refused(
    cli: Cli, ckpts: Path, options: list[Any]
) -> None:
    answer = cli("rm", ckpts, *options, "--yes")
    assert answer.code == 2
    assert committed_steps(ckpts) == (10, 20, 30)


def test_nothing_to_remove_is_no_error(cli: Cli, ckpts: Path) -> None:
    answer = cli("rm", ckpts, "--after", 30, "--yes")
    assert (answer.code, answer.out) == (0, "nothing to remove\n")


def test_a_removal_that_was_killed_anywhere_and_is_repeated_removes_the_steps(
    cli: Cli, tmp_path: Path
) -> None:
    at, died, aside = 0, True, 0
    while died:
        root, switch = tmp_path / str(at), KillSwitch()
        store = make_store(root, interrupted(QuickFiles, switch))
        store.open()
        for step in (1, 2, 3):
            save_step(store, step)
        switch.at, switch.count, died = at, 0, False
        try:
            store.remove([2, 3])
        except Killed:
            died = True
        store.close()
        aside += len([*(root / ".inflight").glob("*.replaced")])
        assert cli("rm", root, "--after", 1, "--yes").code == 0
        with opened_by_hand(root, files=QuickFiles()) as again:
            assert again.steps() == (1,), "they came back"
        at += 1
    assert at > 4 and aside > 2


def test_a_step_that_a_removal_has_left_aside_can_be_named(cli: Cli, ckpts: Path) -> None:
    (ckpts / "step-000000000010").rename(ckpts / ".inflight" / "000000000010-01234567.replaced")
    assert cli("rm", ckpts, "--step", 10, "--yes").out.startswith("removed 1 step: 10 (")
    with opened_by_hand(ckpts, files=QuickFiles()) as again:
        assert again.steps() == (20, 30)


@pytest.fixture
def rested(cli: Cli, ckpts: Path, tmp_path: Path) -> Path:
    """The root, with parity that rests on 10; nothing is pinned."""
    level = Level(parity="2+1", bind="127.0.0.1:7077", dir=str(tmp_path / "parity"))
    write_plan(ckpts, plan_of(level))
    assert hold(ckpts, 10, files=Files())
    assert cli("unpin", ckpts, 20).code == 0
    return ckpts


def test_keep_last_keeps_steps_that_parity_rests_on(cli: Cli, rested: Path, tmp_path: Path) -> None:
    answer = cli("rm", rested, "--keep-last", 1, "--yes")
    assert answer.out.startswith("removed 1 step: 20 (")
    assert "steps that parity rests on stay: 10\n" in answer.err
    assert committed_steps(rested) == (10, 30)
    # Holds of parity that is kept no more are no holds.
    write_plan(rested, plan_of(Level(str(tmp_path / "level"))))
    assert cli("rm", rested, "--keep-last", 1, "--yes").code == 0
    assert committed_steps(rested) == (30,)


@pytest.mark.parametrize("options", [["--step", 10, "--step", 20], ["--after", 0]])
def test_a_step_that_parity_rests_on_and_that_is_meant_goes_and_it_is_said(
    cli: Cli, rested: Path, options: list[Any]
) -> None:
    looked = cli("rm", rested, *options, "--dry-run")
    assert "parity rests on 1 step: 10\n" in looked.err
    assert committed_steps(rested) == (10, 20, 30)
    answer = cli("rm", rested, *options, "--yes")
    assert (answer.code, "parity rests on 1 step: 10\n" in answer.err) == (0, True)
    assert 10 not in committed_steps(rested) and 20 not in committed_steps(rested)


@pytest.mark.timeout(120)
def test_on_a_terminal_it_says_what_parity_rests_on(rested: Path) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "ckpt_core", "rm", str(rested), "--step", "10"]
    with subprocess.Popen(command, cwd=TOP, stdin=follower, stderr=subprocess.PIPE) as made:
        os.write(leader, b"n\n")
        assert made.stderr is not None
        said = made.stderr.read().decode()
    os.close(follower)
    os.close(leader)
    assert f" of {rested}; parity rests on 1 step: 10? [y/N] " in said
    assert committed_steps(rested) == (10, 20, 30)


@pytest.fixture
def levelled(cli: Cli, ckpts: Path, tmp_path: Path) -> Path:
    """The root, with two levels; 20 and 30 are at both."""
    levels = [tmp_path / "near", tmp_path / "far"]
    settle_plan(ckpts, [Level(str(level), keep_last=None) for level in levels])
    for level in levels:
        for step in (20, 30):
            assert cli("push", ckpts, step, "--to", level).code == 0
    return ckpts


@pytest.mark.timeout(120)
def test_a_pin_that_comes_while_it_asks_keeps_everything(levelled: Path, tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "ckpt_core", "rm", str(levelled), "--after", "20"]
    with subprocess.Popen(command, cwd=TOP, stdin=follower, stderr=subprocess.PIPE) as made:
        assert made.stderr is not None
        said = b""
        while b"[y/N] " not in said:
            said += os.read(made.stderr.fileno(), 4096)
        store_by_hand(levelled, files=Files()).pin(30)
        os.write(leader, b"y\n")
        said = made.stderr.read()
    os.close(follower)
    os.close(leader)
    assert made.returncode == 2
    assert b"pinned, 1 step: 30: unpin first; nothing was removed" in said
    assert committed_steps(levelled) == (10, 20, 30)
    assert committed_steps(tmp_path / "near") == committed_steps(tmp_path / "far") == (20, 30)


class Pinning(DirectoryFar):
    """A level; somebody pins the step in the root as soon as it has gone here."""

    pinned_in: Path

    def retire(self, targets: Collection[str]) -> None:
        super().retire(targets)
        store_by_hand(self.pinned_in, files=Files()).pin(30)


def test_what_has_gone_at_levels_is_named_when_the_root_keeps_its_steps(
    levelled: Path, tmp_path: Path
) -> None:
    far = Pinning(tmp_path / "far", files=Files())
    far.pinned_in = levelled
    doom = _Doom((30,), 1, (FarSteps(2, far, (30,)),))
    with opened_by_hand(levelled, files=Files()) as store, pytest.raises(ConfigError) as told:
        _remove(store, doom)
    assert f"are pinned, held for parity or being read in {levelled}: unpin" in str(told.value)
    assert str(told.value).endswith(f". Gone already: 1 step: 30 at level 2, {far.url}")
    assert committed_steps(levelled) == (10, 20, 30)


def test_what_has_gone_at_a_level_behind_one_that_is_away_is_named(
    levelled: Path, tmp_path: Path
) -> None:
    near, far = (
        DirectoryFar(tmp_path / name, files=Files(), busy_s=0.0) for name in ("near", "far")
    )
    doom = _Doom((30,), 1, (FarSteps(1, near, (30,)), FarSteps(2, far, (30,))))
    with (
        opened_by_hand(levelled, files=Files()) as store,
        RootLock(tmp_path / "near"),
        pytest.raises(Away) as told,
    ):
        _remove(store, doom)
    assert f"Gone already: 1 step: 30 at level 2, {far.url}. " in str(told.value)
    assert f"Gone in part, perhaps: 1 step: 30 at level 1, {near.url}" in str(told.value)
    assert committed_steps(levelled) == (10, 20, 30)


def test_an_empty_root_is_left_with_nothing_but_its_lock(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    assert cli("rm", tmp_path / "r", "--after", 1, "--yes").out == "nothing to remove\n"
    assert cli("rm", tmp_path / "r", "--after", 1, "--dry-run").out == "nothing to remove\n"
    assert os.listdir(tmp_path / "r") == [".lock"]


def test_a_live_writer_is_named_and_nothing_is_removed(process: Cli, ckpts: Path) -> None:
    with Checkpointer(ckpts, Options(keep_last=None)):
        answer = process("rm", ckpts, "--step", 10, "--yes")
    assert answer.code == 2
    assert f"is open for writing by pid {os.getpid()}" in answer.err
    assert answer.err.count("\n") == 1
    assert committed_steps(ckpts) == (10, 20, 30)


def test_recycled_files_are_left_for_the_next_job(cli: Cli, tmp_path: Path) -> None:
    root = tmp_path / "r"
    with Checkpointer(root, Options(keep_last=2)) as checkpointer:
        for step in range(4):
            checkpointer.save(step, {"x": 1}).committed.result(60)
        checkpointer.wait()
    before = sorted(os.listdir(root / ".slots"))
    assert cli("rm", root, "--keep-last", 1, "--yes").code == 0
    assert sorted(os.listdir(root / ".slots")) == before


def test_a_pin_is_set_and_taken_away(cli: Cli, ckpts: Path) -> None:
    assert cli("pin", ckpts, 30).out == "step 30 is pinned\n"
    assert cli("pin", ckpts, 30).out == "step 30 is pinned, as it was before\n"
    found = json.loads(cli("unpin", ckpts, 30, "--json").out)
    assert (found["pinned"], found["changed"]) == (False, True)
    assert cli("unpin", ckpts, 30).out == "step 30 is not pinned, as it was before\n"


def test_a_pin_needs_no_lock(process: Cli, ckpts: Path) -> None:
    with Checkpointer(ckpts, Options(keep_last=1)) as checkpointer:
        assert process("pin", ckpts, 10).code == 0
        checkpointer.save(40, {"x": 1}).committed.result(60)
        checkpointer.wait()
        assert tuple(checkpointer.steps()) == (10, 20, 40)


def test_a_step_that_is_not_there_cannot_be_pinned(cli: Cli, ckpts: Path) -> None:
    answer = cli("pin", ckpts, 31)
    assert answer.code == 2
    assert "nearest: 10, 20, 30" in answer.err
    assert not (ckpts / ".pins" / "000000000031").exists()


def test_a_pin_whose_step_has_gone_can_be_taken_away(cli: Cli, ckpts: Path) -> None:
    (ckpts / ".pins" / "000000000031").touch()
    assert cli("unpin", ckpts, 31).code == 0
    assert not (ckpts / ".pins" / "000000000031").exists()


def test_a_fresh_root_has_its_levels_told_that_a_step_is_unpinned(
    cli: Cli, levelled: Path, tmp_path: Path
) -> None:
    far = tmp_path / "far"
    assert pinned_steps(far) == {20}
    shutil.rmtree(levelled)
    levelled.mkdir()
    write_plan(levelled, plan_of(Level(str(far))))
    answer = cli("unpin", levelled, 20)
    assert answer.out == "step 20 is not pinned, as it was before\n"
    assert answer.err == "the agent of this root is to unpin it at the further levels\n"
    assert list(unpinned_marks(levelled).values()) == [20]


def test_a_removal_says_that_it_takes_a_directory_alone(cli: Cli) -> None:
    assert "s3://" not in cli("rm", "--help").out
    answer = cli("rm", "s3://bucket/run", "--step", 2, "--yes")
    assert answer.code == 2 and "`ckpt-core rm` takes a directory" in answer.err


def test_a_step_directory_is_no_root(cli: Cli, ckpts: Path) -> None:
    for command in (["pin"], ["unpin"]):
        assert cli(*command, ckpts / "step-000000000010", 10).code == 2
    assert cli("rm", ckpts / "step-000000000010", "--step", 10, "--yes").code == 2


@pytest.mark.parametrize(
    "words", [["rm", "--step", "1"], ["pin", "1"], ["scrub"], ["agent", "--once"]]
)
def test_a_file_is_no_root(cli: Callable[..., Any], tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "file").write_text("x")
    answer = cli(words[0], tmp_path / "file", *words[1:])
    assert answer.code == 2 and "is a file: a checkpoint root is a directory" in answer.err
