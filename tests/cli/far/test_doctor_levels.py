"""`doctor`: further levels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import Level
from ckpt_core.levels import LevelStatus, Plan, Status, write_plan, write_status
from tests.cli.doctoring import diagnosis
from tests.cli.far_places import Place
from tests.levels.servers.faulty import SECRET, FaultServer, always
from tests.levels.servers.moto import needs_store

Cli = Callable[..., Any]


def _found(cli: Cli, *options: object) -> list[tuple[str, str]]:
    return diagnosis(cli, "--quick", *options).of("level")


def test_a_level_that_is_in_order_tells_its_speed_and_is_left_as_it_was(
    at_place: Cli, place: Place, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    (result, text), *more = _found(at_place, "--level", place.url)
    assert result == "ok"
    assert text.startswith(f"{place.url}: ")
    assert "writable" in text
    assert text.endswith("for each second; ")
    assert sorted(tmp_path.rglob("*")) == before
    if place.environ:
        assert "conditions hold" in text
    # These keep such parts for ever.
    notes = ["note"] if place.url.startswith(("s3:", "gs:")) else []
    assert [result for result, _ in more] == notes
    assert all("aborts incomplete multipart uploads" in note for _, note in more)


def test_the_levels_of_a_plan_are_looked_at(cli: Cli, ckpts: Path, tmp_path: Path) -> None:
    level = str(tmp_path / "level")
    write_plan(ckpts, Plan(run="ab", session=1, token="t", levels=(Level(level),)))
    status = LevelStatus(level, problem="it is full")
    write_status(ckpts, Status(pid=1, host="h", token="t", levels=[status]))
    results = _found(cli, "--root", ckpts, "--level", level)
    assert [result for result, _ in results] == ["ok", "warning", "warning"], "once, not twice"
    assert "it is full" in results[1][1]
    assert "what loses the one loses the other" in results[2][1]


def test_a_root_without_levels_has_no_row(cli: Cli, ckpts: Path) -> None:
    assert _found(cli, "--root", ckpts) == []


def test_what_is_no_level_is_a_problem(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for url, text in [("ftp://x/y", "unknown scheme"), (tmp_path / "file", "is no directory")]:
        ((result, told),) = _found(cli, "--level", url)
        assert (result, text in told) == ("problem", True), told


@needs_store
@pytest.mark.parametrize("fault", ["403", "conditions", "bucket"])
def test_a_store_that_cannot_hold_steps_is_a_problem(
    at_faulty: Cli, faulty: FaultServer, fault: str
) -> None:
    url = faulty.url()
    if fault == "403":
        faulty.fault = always("403")
    elif fault == "conditions":
        faulty.conditions = False
    else:
        url = "s3://nowhere/run"
    ((result, told),) = _found(at_faulty, "--level", url)
    assert result == "problem"
    assert url in told
    assert SECRET not in told
    assert not faulty.keys("")


@needs_store
def test_a_store_that_is_out_of_order_leaves_nothing_behind(
    at_faulty: Cli, faulty: FaultServer
) -> None:
    faulty.fault = always("503", like="uploads")
    ((result, told),) = _found(at_faulty, "--level", faulty.url())
    assert result == "problem"
    assert "it cannot be told now" in told
    assert not faulty.keys("")
