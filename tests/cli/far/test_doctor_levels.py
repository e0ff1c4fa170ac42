"""`doctor`: further levels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import Checkpointer, Level, Options
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


# -- a root that is named by its URL -----------------------------------------------------------------


@needs_store
@pytest.mark.parametrize("option", [[], ["--root"]], ids=["ROOT", "--root"])
def test_a_root_at_a_url_is_checked_as_a_level_and_tells_its_steps(
    at_faulty: Cli, faulty: FaultServer, ckpts: Path, option: list[str]
) -> None:
    (kind, text) = diagnosis(at_faulty, "--quick", *option, faulty.url()).one("newest")
    assert (kind, "no committed step" in text) == ("ok", True)
    assert at_faulty("push", ckpts, 20, "--to", faulty.url()).code == 0
    before = faulty.keys("")
    made = diagnosis(at_faulty, "--quick", *option, faulty.url())
    assert made.code == 0
    assert "step 20 of 1 committed step" in made.one("newest")[1]
    assert "its conditions hold" in made.of("level")[0][1]
    assert f"levels=[Level('{faulty.url()}')]" in made.one("root")[1]
    assert not made.of("lock") + made.of("filesystem"), "nothing is tried in a directory"
    assert faulty.keys("") == before


@needs_store
def test_tags_at_a_url_are_told_by_their_pointer(
    at_faulty: Cli, faulty: FaultServer, tmp_path: Path
) -> None:
    with Checkpointer(tmp_path / "tags", Options()) as checkpointer:
        for step in (1, 2):
            files = checkpointer.begin_files(step, f"tag{step}", pointer="latest")
            files.add("mp.pt", {"x": step})
            files.seal().committed.result(60)
    for tag in ("tag1", "tag2"):
        assert at_faulty("push", tmp_path / "tags", tag, "--to", faulty.url()).code == 0
    (kind, text) = diagnosis(at_faulty, "--quick", faulty.url()).one("newest")
    assert (kind, text) == ("ok", "tag tag2, named by 'latest', of 2 whole tags; ")


@needs_store
@pytest.mark.parametrize(
    ("fault", "remedy"),
    [
        ("gone", "look at the network"),
        ("PUT", "let these credentials read, write, list and delete"),
        ("list-type", "let these credentials read, write, list and delete"),
        ("conditions", "use a server that honours them"),
        ("bucket", "create s3://nowhere"),
        ("step", "name the root"),
    ],
)
def test_a_root_at_a_url_that_cannot_be_used_is_a_problem_with_its_remedy(
    at_faulty: Cli, faulty: FaultServer, fault: str, remedy: str
) -> None:
    url = {"bucket": "s3://nowhere/run", "step": f"{faulty.url()}/step-000000000001"}.get(
        fault, faulty.url()
    )
    if fault == "gone":
        faulty.fault = always("reset")
    elif fault == "conditions":
        faulty.conditions = False
    elif fault in ("PUT", "list-type"):
        faulty.fault = always("403", like=fault)
    made = diagnosis(at_faulty, "--quick", "--root", url)
    ((result, told),) = made.of("level") + made.of("root")
    assert (made.code, result) == (1, "problem")
    assert url in told and remedy in told and SECRET not in told


@needs_store
def test_steps_at_a_url_that_may_not_be_read_are_a_problem(
    at_faulty: Cli, faulty: FaultServer, ckpts: Path
) -> None:
    assert at_faulty("push", ckpts, 20, "--to", faulty.url()).code == 0
    faulty.fault = always("403", like="GET bucket/run/step-")
    made = diagnosis(at_faulty, "--quick", "--root", faulty.url())
    assert made.bad == ["root"]
    assert any("it is not permitted" in text for _, text in made.of("root"))


def test_a_root_with_an_unknown_scheme_ends_doctor_with_2(cli: Cli) -> None:
    answer = cli("doctor", "--quick", "--root", "ftp://host/run")
    assert answer.code == 2 and "unknown scheme" in answer.err
