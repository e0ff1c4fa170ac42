"""`agent`, and what `rm` and `verify` do at the levels of a root."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import Checkpointer, Level, Options
from ckpt_core.levels import (
    LEVELS,
    LevelStatus,
    Plan,
    Status,
    open_far,
    read_status,
    settle_plan,
    write_plan,
    write_status,
)
from ckpt_core.store import RootLock, committed_steps
from tests.cli.far_places import Place
from tests.levels.servers.faulty import SECRET, FaultServer, always
from tests.levels.servers.moto import needs_store

Cli = Callable[..., Any]
TOP = Path(__file__).parents[3]
WAIT_S = 60.0


def _there(url: str) -> list[int]:
    with open_far(url) as far:
        return sorted(far.steps())


@pytest.fixture
def sent(ckpts: Path, place: Place, at_place: Cli) -> Path:
    """The root, with a plan; all of its steps are at the level, and the agent has said so."""
    settle_plan(ckpts, [Level(place.url, keep_last=None)])
    for step in (10, 20, 30):
        assert at_place("push", ckpts, step, "--to", place.url).code == 0
    with open_far(place.url) as far:
        status = LevelStatus(place.url, steps=far.steps())
    write_status(ckpts, Status(pid=1, host="h", token="t", levels=[status]))
    return ckpts


# -- agent -----------------------------------------------------------------------------------------


def test_once_takes_what_is_due_and_ends(
    alone: Cli, at_place: Cli, ckpts: Path, place: Place
) -> None:
    answer = alone("agent", ckpts, "--level", place.url, "--every", 20, "--once")
    assert answer.code == 0, answer.err
    assert "the agent has ended: up to date" in answer.out
    assert f"{place.url}: step 30 is there" in answer.err
    # 20 by `every`, 30 as the last one; `backlog` lets both through, since 30 is due only at the end.
    assert _there(place.url)[-1] == 30
    again = alone("agent", ckpts, "--once", "--json")
    assert again.code == 0, again.err
    found = json.loads(again.out)
    assert found["ended"] == "up to date"
    assert [(row["url"], row["due"], row["problem"]) for row in found["levels"]] == [
        (place.url, [], None)
    ]


def test_once_beside_a_job_ends_when_all_is_there(
    alone: Cli, at_place: Cli, ckpts: Path, place: Place
) -> None:
    with Checkpointer(ckpts, Options(keep_last=None)):
        answer = alone("agent", ckpts, "--level", place.url, "--once")
    assert answer.code == 0, answer.err
    assert _there(place.url) == [30]


def test_without_a_plan_it_asks_for_a_level(cli: Cli, ckpts: Path, tmp_path: Path) -> None:
    for arguments, text in [
        ([ckpts], "has no plan of levels: give --level URL"),
        ([ckpts, "--every", 5], "give --level URL"),
        ([ckpts, "--level", "ftp://x/y"], "unknown scheme"),
        ([ckpts, "--level", ckpts / "inside"], "each has a place of its own"),
        ([tmp_path / "nowhere"], "there is no such directory"),
        (["s3://bucket/run"], "takes a directory"),
    ]:
        answer = cli("agent", *arguments)
        assert answer.code == 2
        assert text in answer.err
    assert not (ckpts / LEVELS).exists()


def test_a_root_that_has_an_agent_is_refused(cli: Cli, ckpts: Path, tmp_path: Path) -> None:
    (ckpts / LEVELS).mkdir()
    with RootLock(ckpts / LEVELS):
        answer = cli("agent", ckpts, "--level", tmp_path / "level")
    assert answer.code == 2
    assert f"has an agent: pid {os.getpid()}" in answer.err


def test_the_plan_of_a_job_that_runs_is_not_replaced(cli: Cli, ckpts: Path, tmp_path: Path) -> None:
    plan = Plan(run="ab", session=1, token="t", levels=(Level(str(tmp_path / "level")),))
    write_plan(ckpts, plan)
    with RootLock(ckpts):
        answer = cli("agent", ckpts, "--level", tmp_path / "other")
    assert answer.code == 2
    assert "says where its steps go" in answer.err


@pytest.fixture
def serving(ckpts: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """An agent that stays."""
    command = [sys.executable, "-m", "ckpt_core", "agent", str(ckpts)]
    command += ["--level", str(tmp_path / "level")]
    with subprocess.Popen(
        command, cwd=TOP, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_one_that_stays_takes_what_comes_later_and_ends_when_it_is_told_to(
    serving: subprocess.Popen[str], ckpts: Path, tmp_path: Path
) -> None:
    level = str(tmp_path / "level")

    def is_idle() -> bool:
        status = read_status(ckpts)
        return status is not None and status.ended == "up to date"

    _wait_for(is_idle)
    assert _there(level) == [30]
    with Checkpointer(ckpts, Options(keep_last=None)) as checkpointer:
        checkpointer.save(40, {"x": 1}).committed.result(60)
    _wait_for(lambda: _there(level) == [30, 40])
    _wait_for(is_idle)
    serving.send_signal(signal.SIGTERM)
    out, err = serving.communicate(timeout=WAIT_S)
    assert serving.returncode == 0, err
    assert "level 1, every 1:" in out


@needs_store
def test_once_tells_what_keeps_a_level_and_ends_with_1(
    process: Cli, faulty: FaultServer, ckpts: Path
) -> None:
    faulty.fault = always("403", like="PUT bucket/run/step-")
    answer = process("agent", ckpts, "--level", faulty.url(), "--once", **faulty.environ())
    assert answer.code == 1, answer.err
    assert f"level 1, every 1: {faulty.url()}, 0 steps; " in answer.out
    assert SECRET not in answer.out + answer.err
    faulty.fault = lambda request: None
    assert process("agent", ckpts, "--once", **faulty.environ()).code == 0


# -- verify ----------------------------------------------------------------------------------------


def test_a_level_is_verified_by_its_number_or_url(at_place: Cli, sent: Path, place: Place) -> None:
    for level in ("1", place.url):
        found = json.loads(at_place("verify", sent, "--level", level, "--json").out)
        assert found["path"] == place.url
        assert [step["step"] for step in found["steps"]] == [10, 20, 30]
        assert found["ok"]
    for level in ("2", "0", "s3://bucket/other"):
        answer = at_place("verify", sent, "--level", level)
        assert answer.code == 2
        assert f"its levels are 1: {place.url}" in answer.err


# -- rm --------------------------------------------------------------------------------------------


def test_going_back_takes_steps_from_the_levels_too(
    at_place: Cli, sent: Path, place: Place
) -> None:
    looked = at_place("rm", sent, "--after", 20, "--dry-run")
    assert f"; 1 step: 30 at level 1, {place.url}" in looked.out
    assert _there(place.url) == [10, 20, 30]
    found = json.loads(at_place("rm", sent, "--after", 20, "--yes", "--json").out)
    assert found["levels"] == [{"url": place.url, "steps": [30]}]
    assert _there(place.url) == [10, 20]
    assert committed_steps(sent) == (10, 20)
    listed = json.loads(at_place("ls", sent, "--json").out)
    assert [step["step"] for step in listed["steps"]] == [10, 20]
    assert [sorted(level["steps"]) for level in listed["further"]["levels"]] == [[10, 20]]


def test_steps_that_are_at_levels_alone_go_as_well(at_place: Cli, sent: Path, place: Place) -> None:
    assert at_place("rm", sent, "--step", 30, "--yes").code == 0
    assert _there(place.url) == [10, 20, 30]
    assert at_place("rm", sent, "--after", 20, "--yes").code == 0
    assert _there(place.url) == [10, 20]


def test_other_removals_leave_the_levels_alone_and_say_so(
    at_place: Cli, sent: Path, place: Place
) -> None:
    for options in (["--step", 30], ["--keep-last", 1], ["--after", 20, "--no-levels"]):
        answer = at_place("rm", sent, *options, "--dry-run")
        assert "at level" not in answer.out
        assert "the further levels of this root keep what they have" in answer.err
    answer = at_place("rm", sent, "--after", 20, "--no-levels", "--yes")
    assert answer.code == 0
    assert _there(place.url) == [10, 20, 30]


def test_a_step_that_is_pinned_at_a_level_keeps_everything(
    at_place: Cli, sent: Path, place: Place
) -> None:
    assert at_place("pin", place.url, 30).code == 0
    answer = at_place("rm", sent, "--after", 20, "--yes")
    assert answer.code == 2
    assert f"pinned at level 1, {place.url}: 30" in answer.err
    assert committed_steps(sent) == (10, 20, 30)
    assert _there(place.url) == [10, 20, 30]


def test_nothing_goes_while_the_agent_is_at_work(at_place: Cli, sent: Path, place: Place) -> None:
    with RootLock(sent / LEVELS):
        answer = at_place("rm", sent, "--after", 20, "--yes")
        assert at_place("rm", sent, "--after", 20, "--dry-run").code == 0
    assert answer.code == 2
    assert "--no-levels" in answer.err
    assert committed_steps(sent) == (10, 20, 30)


def test_nothing_goes_without_a_yes(at_place: Cli, sent: Path, place: Place) -> None:
    assert at_place("rm", sent, "--after", 20).code == 2
    assert committed_steps(sent) == (10, 20, 30)
    assert _there(place.url) == [10, 20, 30]


@needs_store
@pytest.mark.parametrize("like", ["", "DELETE", "PUT"])
def test_a_level_that_is_away_keeps_everything_in_the_root(
    at_faulty: Cli, process: Cli, faulty: FaultServer, ckpts: Path, like: str
) -> None:
    for step in (20, 30):
        assert at_faulty("push", ckpts, step, "--to", faulty.url()).code == 0
    process("agent", ckpts, "--level", faulty.url(), "--once", **faulty.environ())
    faulty.fault = always("403", like=like)
    answer = at_faulty("rm", ckpts, "--after", 20, "--yes")
    if like == "DELETE":
        assert answer.code in (0, 2)  # the step is none any more; its bytes may stay until a sweep
        return
    assert answer.code == 2
    assert committed_steps(ckpts) == (10, 20, 30)
    faulty.fault = lambda request: None
    assert at_faulty("rm", ckpts, "--after", 20, "--yes").code == 0
    assert committed_steps(ckpts) == (10, 20)
    assert _there(faulty.url()) == [20]
