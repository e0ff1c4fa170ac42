"""`ckpt-core simulate`: options, tables, files and errors."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.simulate.traces import lines, synthetic

Cli = Callable[..., Any]

TOP = Path(__file__).parents[2]
PAGE = (TOP / "docs" / "simulate.md").read_text()
JOB = ("--iteration-s", "0.5", "--state-bytes", "10GB", "--write-bandwidth", "2GB")
SMALL = (*JOB, "--interval", "10,50", "--strategy", "ours,torch.save", "--runs", "2")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(lines(synthetic())))
    return path


def _points(cli: Cli, *arguments: object) -> list[dict[str, Any]]:
    answer = cli("simulate", *arguments, "--json")
    assert answer.code == 0, answer.err
    points: list[dict[str, Any]] = json.loads(answer.out)["points"]
    return points


def test_a_table_has_a_row_for_each_strategy_and_interval(cli: Cli) -> None:
    answer = cli("simulate", *SMALL, "--mtbf", "1h")
    assert answer.code == 0
    rows = [line.split() for line in answer.out.splitlines() if "   60 min   " in line]
    assert [(row[0], row[3]) for row in rows] == [
        ("ours", "10"),
        ("ours", "50"),
        ("torch.save", "10"),
        ("torch.save", "50"),
    ]
    assert sum(row[-1] == "best" for row in rows) == 2


def test_the_answer_begins_in_words(cli: Cli) -> None:
    answer = cli("simulate", *SMALL, "--mtbf", "1h,1d")
    assert answer.code == 0
    first, second, third = answer.out.splitlines()[:3]
    assert first.startswith("With ckpt-core, save every 50 steps: that costs 1.3% of the time")
    assert "a failure at most 35.33 s besides the restart" in first
    assert "of the run counts at a failure every 60 min" in second
    assert "torch.save 70.3%" in second
    assert third.startswith("With ckpt-core")


def test_a_best_interval_at_the_end_of_those_tried_is_told(cli: Cli) -> None:
    few = ("--interval", "200,400", "--strategy", "ours,torch.save,gemini", "--mtbf", "1h")
    second = cli("simulate", *JOB, *few).out.splitlines()[1]
    assert "every 60 min (shorter may be better); the others at the best of these" in second
    assert re.search(r"torch.save 9\d\.\d% \(longer may be better\)", second)


def test_without_intervals_longer_ones_are_tried_until_they_are_worse(cli: Cli) -> None:
    points = _points(cli, *JOB, "--strategy", "torch.save,ideal", "--mtbf", "1h")
    tried = [point["interval"] for point in points]
    assert tried == [1, 10, 25, 50, 100, 200, 400, 800, 1, 10, 25, 50, 100]
    assert max(points[:8], key=lambda point: float(point["goodput"]))["interval"] == 400
    answer = cli("simulate", *JOB, "--mtbf", "1h")
    assert "may be better" not in answer.out
    assert len(_points(cli, *JOB, "--strategy", "torch.save")) == 5


def test_what_a_failure_takes_at_most_is_told_with_the_stalls(cli: Cli) -> None:
    # 5 s of work, 10.3 s in which training stands still for the save, 5 s to load.
    answer = cli("simulate", *JOB, "--interval", "10", "--strategy", "torch.save", "--mtbf", "1h")
    assert "a failure at most 20.33 s besides the restart" in answer.out.splitlines()[0]


def test_without_failures_the_words_are_of_the_cost_and_the_bound(cli: Cli) -> None:
    answer = cli("simulate", *JOB, "--interval", "1", "--strategy", "checkfreq")
    words, blank = answer.out.splitlines()[:2]
    assert words.startswith("With CheckFreq, save every step: that costs")
    assert not blank


def test_json_holds_the_same_and_says_what_was_run(cli: Cli) -> None:
    answer = cli("simulate", *SMALL, "--mtbf", "1h,1d", "--seed", "7", "--json")
    found = json.loads(answer.out)
    assert len(found["points"]) == 8
    assert found["job"] == {"iteration_s": 0.5, "state_bytes": 1e10, "update_s": 0.0}
    assert found["rates"]["serial"] == pytest.approx(2e9 / 1.9)
    assert (found["runs"], found["seed"]) == (2, 7)
    assert found["goal"]["duration_s"] == 7 * 86400.0


def test_the_same_seed_gives_the_same_answer_and_another_one_another(cli: Cli) -> None:
    def answer(seed: int) -> list[dict[str, Any]]:
        return _points(cli, *SMALL, "--mtbf", "1h", "--seed", seed)

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)


def test_nodes_share_the_mean_time_between_failures(cli: Cli) -> None:
    nodes = _points(cli, *SMALL, "--node-mtbf", "1000h", "--nodes", "500")
    assert nodes == _points(cli, *SMALL, "--mtbf", "2h")


def test_a_number_of_iterations_gives_the_total_time(cli: Cli) -> None:
    points = _points(cli, *SMALL, "--mtbf", "1h", "--iterations", "100000")
    assert {point["iterations"] for point in points} == {100_000}
    assert all(point["wall_s"] > 50_000 for point in points)


def test_a_trace_stops_the_job_at_each_change_or_at_losses(cli: Cli, trace: Path) -> None:
    for stops, count in (("any", 48), ("loss", sum(c < 0 for c in synthetic().changes))):
        points = _points(cli, *SMALL, "--trace", trace, "--stops", stops)
        assert {point["failures"] for point in points} == {count}
        assert {point["wall_s"] for point in points} == {214 * 63.0}


def test_behind_the_end_of_a_trace_no_failures_are_made_up(cli: Cli, trace: Path) -> None:
    arguments = ("simulate", *SMALL, "--trace", trace)
    longer = cli(*arguments, "--duration", "30d")
    assert (longer.code, longer.out) == (2, "")
    assert "duration='30d' is longer than the trace, which ends after 3.745 h" in longer.err
    assert cli(*arguments, "--duration", "1h").code == 0
    assert not cli(*arguments, "--iterations", "100").err
    beyond = cli(*arguments, "--iterations", "100000")
    assert beyond.code == 0
    assert "the trace ends after 3.745 h, and runs that take longer meet no more" in beyond.err


def test_a_job_that_needs_many_gpus_is_down_for_longer(cli: Cli, trace: Path) -> None:
    any_number = _points(cli, *SMALL, "--trace", trace)[0]
    many = _points(cli, *SMALL, "--trace", trace, "--gpus", "48")[0]
    assert many["down_s"] > any_number["down_s"] + 600
    assert many["iterations"] < any_number["iterations"]


def test_rates_come_from_a_bench_file_unless_they_are_given(cli: Cli, tmp_path: Path) -> None:
    def row(value: float) -> dict[str, Any]:
        return {"contenders": {"ckpt_core": {"median": value}}}

    results = {"persist": row(2e9), "train_step": row(0.5), "restore_cold": row(1e9)}
    report = {"suite": "core", "settings": {"state_bytes": 10**10}, "results": results}
    path = tmp_path / "results.json"
    path.write_text(json.dumps(report))
    answer = cli("simulate", "--bench", path, "--write-bandwidth", "4GB", "--json")
    rates = json.loads(answer.out)["rates"]
    assert (rates["write"], rates["read"]) == (4e9, 1e9)


def test_a_file_with_rows_is_written(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    assert cli("simulate", *SMALL, "--csv", path).code == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["strategy"] for row in rows] == ["ours", "ours", "torch.save", "torch.save"]
    assert float(rows[0]["goodput"]) > float(rows[2]["goodput"])


@pytest.mark.parametrize(
    "asked",
    [
        (*SMALL, "--mtbf", "1h"),
        (*SMALL, "--mtbf", "1h,4h", "--iterations", "9999"),
        (*JOB, "--mtbf", "1h"),
    ],
)
def test_a_picture_is_drawn(cli: Cli, tmp_path: Path, asked: tuple[str, ...]) -> None:
    path = tmp_path / "goodput.png"
    assert cli("simulate", *asked, "--plot", path).code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_jobs_are_scheduled_and_dearer_saves_take_longer(cli: Cli) -> None:
    asked = ("simulate", *JOB, "--jobs", "8", "--machines", "2", "--job-time", "30min")
    answer = cli(*asked, "--json")
    rows = {row["strategy"]: row for row in json.loads(answer.out)["rows"]}
    assert rows["ours"]["save_s"] < rows["torch.save"]["save_s"]
    assert rows["ours"]["mean_completion_s"] < rows["torch.save"]["mean_completion_s"]
    assert "average completion" in cli(*asked).out


def test_a_figure_of_a_paper_is_a_table_of_both(cli: Cli, trace: Path) -> None:
    answer = cli("simulate", "--paper", "pccheck-5.2.3")
    assert answer.code == 0
    assert "6137" in answer.out
    assert "event by event" not in answer.out
    on_trace = cli("simulate", "--paper", "pccheck-5.2.3", "--trace", trace, "--json")
    rows = json.loads(on_trace.out)["rows"]
    assert any(row["note"].startswith("event by event") for row in rows)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--state-bytes", "1GB", "--write-bandwidth", "1GB"], "--iteration-s is missing"),
        (["--iteration-s", "1", "--write-bandwidth", "1GB"], "--state-bytes is missing"),
        (["--iteration-s", "1", "--state-bytes", "1GB"], "--write-bandwidth is missing"),
        ([*JOB, "--state-bytes", "much"], "state_bytes='much'"),
        ([*JOB, "--write-bandwidth", "0"], "write=0 must be above 0"),
        ([*JOB, "--iteration-s", "-1"], "iteration_s=-1"),
        ([*JOB, "--iteration-s", "0"], "iteration_s=0"),
        ([*JOB, "--update-s", "3"], "update_s=3"),
        ([*JOB, "--interval", "10,x"], "interval='10,x'"),
        ([*JOB, "--interval", "0"], "interval=0"),
        ([*JOB, "--strategy", "ours,theirs"], "'theirs' is not known: choose of torch.save"),
        ([*JOB, "--mtbf", "soon"], "mtbf='soon' is not a time"),
        ([*JOB, "--mtbf", "0"], "mtbf_s=0"),
        ([*JOB, "--nodes", "4"], "--node-mtbf and --nodes"),
        ([*JOB, "--mtbf", "1h", "--trace", "t"], "--trace does not go with --mtbf"),
        ([*JOB, "--iterations", "9", "--duration", "1d"], "--iterations does not go"),
        ([*JOB, "--stops", "some"], "stops='some'"),
        (["--trace", "nowhere.csv", *JOB], "nowhere.csv: No such file"),
        (["--bench", "nowhere.json"], "nowhere.json: No such file"),
        ([*JOB, "--csv", "no/where.csv"], "cannot be written"),
        ([*JOB, "--plot", "picture.txt"], "is no picture"),
        (["--paper", "nature"], "choose of pccheck-5.2.3"),
        (["--paper", "pccheck-fig9", "--mtbf", "1h"], "--paper does not go with --mtbf"),
        ([*JOB, "--jobs", "3", "--job-time", "0"], "job_time='0' must be above 0"),
        ([*JOB, "--mtbf", "9e999"], "mtbf='9e999' is not a time"),
        ([*JOB, "--jobs", "3", "--round", "5s"], "round_s=5 is no longer than a switch"),
    ],
)
def test_a_wrong_option_is_one_line_that_says_what_to_do(
    cli: Cli, arguments: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = cli("simulate", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("ckpt-core: ")
    assert answer.err.count("\n") == 1
    assert why in answer.err


@pytest.mark.parametrize("text", ["not json", "[1]", "{}", "[" * 100_000])
def test_a_bench_file_that_is_none_is_told(cli: Cli, tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    answer = cli("simulate", "--bench", path)
    assert answer.code == 2
    assert "results.json" in answer.err


def test_it_runs_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['ckpt-core', *sys.argv[1:]]\n"
        "from ckpt_core.cli import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", code, "simulate", *SMALL, "--mtbf", "1h"]
    made = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=False, timeout=60)
    assert made.returncode == 0, made.stderr


def test_the_page_names_every_option(cli: Cli) -> None:
    options = re.findall(r"^ +(--[\w-]+)", cli("simulate", "--help").out, re.MULTILINE)
    assert len(options) > 25
    for option in options:
        assert option == "--help" or f"`{option}`" in PAGE, f"docs/simulate.md lacks {option}"


def test_the_page_names_every_json_field(cli: Cli) -> None:
    for field in _points(cli, *SMALL, "--mtbf", "1h")[0]:
        assert f"`{field}`" in PAGE, f"docs/simulate.md lacks {field}"


LEVELS = ("--level", "every=100/500,seconds=5,restore=8,survives=node")
STORE = ("--level", "every=1000,seconds=1min,restore=2min,survives=site")


def test_each_choice_of_levels_is_a_row(cli: Cli) -> None:
    arguments = (*SMALL, "--mtbf", "1h", *LEVELS, *STORE, "--kinds", "process=5,node=4,site=1")
    answer = cli("simulate", *arguments)
    assert answer.code == 0, answer.err
    assert "level 2: 60 s to it, 2 min back, survives the loss of a site" in answer.out
    rows = [line.split() for line in answer.out.splitlines() if "   60 min   " in line]
    assert [row[3:6] for row in rows[:4]] == [
        ["10", "100", "1000"],
        ["10", "500", "1000"],
        ["50", "100", "1000"],
        ["50", "500", "1000"],
    ]


def test_levels_are_what_is_lost(cli: Cli) -> None:
    arguments = (*SMALL, "--strategy", "ours", "--interval", "10", "--mtbf", "1h")
    plain, *found = (
        _points(cli, *arguments, *more)
        for more in ((), (*LEVELS,), (*LEVELS, "--survives", "site"))
    )
    assert [point["every"] for point in found[0]] == [[100], [500]]
    assert plain[0]["redone"] < found[0][0]["redone"] < found[0][1]["redone"]
    assert {point["redone"] for point in found[1]} == {plain[0]["redone"]}
    assert found[0][0]["bound_s"] is None


def test_where_levels_can_be_lost_the_words_are_of_the_failures_that_came(cli: Cli) -> None:
    arguments = (*SMALL, "--mtbf", "1h", *LEVELS, "--kinds", "node=9,domain=0,site=1")
    first = cli("simulate", *arguments).out.splitlines()[0]
    failures = round(2 * _points(cli, *arguments)[0]["failures"])
    assert "at most" not in first
    assert f"the worst of {failures} failures took" in first
    assert first.endswith("besides the restart and saves; after the loss of a site it begins anew.")


PEERS = "every=10,seconds=1,restore=1,survives=domain"


def test_nodes_that_keep_one_anothers_steps_lose_them_only_together(cli: Cli) -> None:
    nodes = ("--node-mtbf", "20h", "--nodes", "10", "--survives", "process", "--interval", "10")
    redone = []
    for more in ("", ",keeps=8+2,refill=1h", ",keeps=copies,refill=1h", ",keeps=4+1,refill=1h"):
        level = ("--level", PEERS + more)
        (row,) = _points(cli, *SMALL, *nodes, *level, "--strategy", "ours", "--duration", "60d")
        redone.append(row["redone"])
    assert redone == sorted(redone) and redone[0] < redone[2]
    answer = cli("simulate", *SMALL, *nodes, *level)
    assert "parity 4+1, made good 60 min after a loss" in " ".join(answer.out.split())


def test_groups_that_do_not_come_out_even_are_refused(cli: Cli) -> None:
    nodes = ("--node-mtbf", "20h", "--nodes", "9")
    answer = cli("simulate", *SMALL, *nodes, "--level", f"{PEERS},keeps=4+1,refill=1h")
    assert answer.code != 0 and "nodes=9 cannot have groups of 5" in " ".join(answer.err.split())


@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        ("--level", "every=10", "restore, seconds, survives is missing"),
        ("--level", "every=10,seconds=1,restore=1,survives=node,often=2", "often is missing or"),
        ("--level", "every=x,seconds=1,restore=1,survives=node", "no number of iterations"),
        ("--level", "every=\u00b2,seconds=1,restore=1,survives=node", "no number of iterations"),
        ("--level", "every=0,seconds=1,restore=1,survives=node", "every=0"),
        (
            "--level",
            "every=10,seconds=soon,restore=1,survives=node",
            "seconds='soon' is not a time",
        ),
        ("--level", "every=10,seconds=1,restore=1,survives=all", "process, node, domain, site"),
        ("--level", "s3://bucket", "NAME=VALUE"),
        ("--level", f"{PEERS},keeps=4+1", "refill="),
        ("--level", f"{PEERS},refill=1min", "keeps=4+1"),
        ("--level", f"{PEERS},keeps=4,refill=1min", "keeps=4+1"),
        ("--level", f"{PEERS},keeps=4+1,refill=1min", "--nodes"),
        ("--survives", "disk", "process, node, domain, site"),
        ("--kinds", "node=many", "process=6,node=3,site=1"),
        ("--kinds", "node=0", "not all of them 0"),
        ("--kinds", "node=-1,site=2", "not all of them 0"),
        ("--kinds", "disk=1", "process=6,node=3,site=1"),
    ],
)
def test_a_level_that_cannot_be_read_is_refused(
    cli: Cli, option: str, text: str, said: str
) -> None:
    answer = cli("simulate", *SMALL, "--mtbf", "1h", option, text)
    assert answer.code != 0
    assert said in " ".join(answer.err.split())
