"""`ls` of a root with further levels: what its agent has last said."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import Level
from ckpt_core.levels import (
    LEVELS,
    LevelStatus,
    Plan,
    Status,
    read_status,
    write_plan,
    write_status,
)
from ckpt_core.levels.tokens import TOKEN_VARIABLE
from tests.cli.test_page import _assert_documented
from tests.levels.trainers import attempt_of

Cli = Callable[..., Any]
_HOLD = """
import sys
from pathlib import Path
from ckpt_core.store import RootLock
with RootLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def planned(ckpts: Path) -> Path:
    """Steps 10, 20, 30; the first level has 20 and 30 comes, the second has 5 and is away."""
    levels = (Level("/data/run"), Level("s3://bucket/run", every=10))
    write_plan(ckpts, Plan(run="ab", session=1, token="t", levels=levels))
    mine = attempt_of(ckpts, 20)
    first = LevelStatus("/data/run", steps={20: mine}, sending=30, sent_bytes=45, total_bytes=100)
    second = LevelStatus("s3://bucket/run", steps={5: "b", 20: mine}, problem="it is away")
    write_status(ckpts, Status(pid=1, host="h", token="t", levels=[first, second]))
    return ckpts


def test_another_save_of_a_step_at_a_level_is_not_taken_for_that_of_the_root(
    cli: Cli, planned: Path
) -> None:
    status = read_status(planned)
    assert status is not None
    status.levels[1].steps[20] = "another"
    write_status(planned, status)
    rows = cli("ls", planned).out.splitlines()
    assert any(row.split()[:1] == ["20"] and "1, 2 has another save of it" in row for row in rows)
    level = json.loads(cli("ls", planned, "--json").out)["further"]["levels"][1]
    assert (level["steps"], level["attempts"]) == ([5, 20], ["b", "another"])


@pytest.fixture
def agent(planned: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of the agent."""
    command = [sys.executable, "-c", _HOLD, str(planned / LEVELS)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_each_step_tells_its_levels_and_what_is_on_its_way(cli: Cli, planned: Path) -> None:
    lines = cli("ls", planned).out.splitlines()
    rows = {line.split()[0]: line for line in lines if line.strip()[:1].isdecimal()}
    assert list(rows)[:4] == ["5", "10", "20", "30"]
    assert rows["5"].split()[1:] == ["2", "at", "levels", "alone"]
    assert "  1, 2  " in rows["20"]
    assert "  1 at 45%  " in rows["30"]
    assert "level 1, every 1: /data/run, 1 step" in lines
    assert "level 2, every 10: s3://bucket/run, 2 steps; it is away" in lines


def test_it_says_how_old_that_is_and_that_no_agent_runs(cli: Cli, planned: Path) -> None:
    told = cli("ls", planned).out
    assert re.search(r"levels as they were \d+ s ago; no agent runs", told)
    assert json.loads(cli("ls", planned, "--json").out)["further"]["agent"] is None


def test_an_agent_that_runs_is_named(cli: Cli, planned: Path, agent: subprocess.Popen[str]) -> None:
    assert f"; the agent runs, pid {agent.pid} on " in cli("ls", planned).out
    found = json.loads(cli("ls", planned, "--json").out)["further"]
    assert found["agent"]["pid"] == agent.pid


def test_an_agent_that_has_ended_says_why(cli: Cli, planned: Path) -> None:
    write_status(planned, Status(pid=1, host="h", token="t", ended="up to date"))
    assert "; the agent has ended: up to date" in cli("ls", planned).out


def test_a_plan_without_a_word_of_the_agent_is_shown(cli: Cli, planned: Path) -> None:
    (planned / LEVELS / "status.json").unlink()
    assert "nothing is known of the levels yet; no agent runs" in cli("ls", planned).out


def test_each_step_tells_what_can_be_lost_as_far_as_it_is_known(cli: Cli, planned: Path) -> None:
    attempt = json.loads(cli("ls", planned, "--json").out)["steps"][1]["attempt"]
    levels = [LevelStatus("/data/run"), LevelStatus("s3://bucket/run", steps={20: attempt})]
    write_status(planned, Status(pid=1, host="h", token="t", levels=levels))
    found = json.loads(cli("ls", planned, "--json").out)
    assert {one["step"]: one["what"] for one in found["can_lose"]} == {
        10: "nothing",
        20: "all nodes",
        30: "nothing",
    }
    rows = {line.split()[0]: line for line in cli("ls", planned).out.splitlines() if line.strip()}
    assert "  2        all nodes" in rows["20"] and "nothing" in rows["30"]
    (planned / LEVELS / "status.json").unlink()
    assert (
        "  ?  " in cli("ls", planned).out
        and not json.loads(cli("ls", planned, "--json").out)["can_lose"]
    )


def test_levels_that_are_asked_are_told_as_they_are_now(
    cli: Cli, ckpts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    url, away = str(tmp_path / "level"), "peer://127.0.0.1:1/run"
    assert cli("push", ckpts, 20, "--to", url).code == 0
    write_plan(ckpts, Plan(run="ab", session=1, token="t", levels=(Level(url), Level(away))))
    found = json.loads(cli("ls", ckpts, "--ask", "--json").out)
    assert found["further"]["levels"][0]["steps"] == [20]
    assert list(found["silent"]) == [away]
    assert found["can_lose"] == [], "the other one may have them, and what is not known is not told"


def test_json_has_it_in_numbers_and_the_page_names_every_field(cli: Cli, planned: Path) -> None:
    out = cli("ls", planned, "--json").out
    first, second = json.loads(out)["further"]["levels"]
    assert (first["steps"], first["sending"], first["sent_bytes"]) == ([20], 30, 45)
    assert second["problem"] == "it is away"
    _assert_documented("ls", out)


def test_a_root_without_levels_says_nothing_of_them(cli: Cli, ckpts: Path) -> None:
    assert "level" not in cli("ls", ckpts).out
    assert json.loads(cli("ls", ckpts, "--json").out)["further"] is None


def test_a_plan_that_cannot_be_read_is_no_obstacle(cli: Cli, planned: Path) -> None:
    (planned / LEVELS / "plan.json").write_text("{")
    assert cli("ls", planned).code == 0
