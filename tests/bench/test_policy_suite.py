"""The suite `policy`: one quick run for all tests of its output. Nothing is asserted about times."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.bench import PolicySettings
from ckpt_core.bench.policy import ADAPTIVE, ALONE, FIXED, NAMES
from ckpt_core.bench.policy import conditions as figures
from ckpt_core.bench.policy.processors import Shares
from ckpt_core.bench.policy.reaction import (
    added_from,
    compare,
    counted_from,
    intervals_of,
    iterations_until,
    overheads_from,
    settled_overhead,
)
from ckpt_core.bench.remote import Remote
from ckpt_core.bench.results import Entrant, Report
from ckpt_core.errors import ConfigError
from ckpt_core.system.machine import describe
from tests.bench.quick import ckpt_core_bench, quick_run, report_of

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quick_run(tmp_path_factory.mktemp("bench"), "--suite", "policy")


@pytest.fixture(scope="module")
def report(output: Path) -> dict[str, Any]:
    return report_of(output)


def test_every_condition_ran_and_its_newest_step_restores_bit_for_bit(
    report: dict[str, Any],
) -> None:
    assert list(report["contenders"]) == list(NAMES)
    for name, entry in report["contenders"].items():
        assert entry["reason"] is None, (name, entry["reason"])
        assert entry["restored"] is True and entry["settings"]


def test_each_round_has_an_overhead_over_iterations_beside_it(report: dict[str, Any]) -> None:
    for name in NAMES:
        rounds = report["policy"]["conditions"][name]["rounds"]
        values = report["results"][figures.OVERHEAD.key]["contenders"][name]["values"]
        assert [row["overhead"] for row in rounds] == values
        assert len(rounds) == report["settings"]["rounds"]
        for row in rounds:
            assert row["base_s"] > 0
            assert sum(row["intervals"]) == row["iterations"]


def test_the_fixed_interval_is_the_one_that_was_found_alone(report: dict[str, Any]) -> None:
    alone = report["results"][figures.INTERVAL.key]["contenders"][ALONE]["median"]
    fixed = report["policy"]["conditions"][FIXED]
    assert fixed["fixed"] == max(1, round(alone))
    for block in fixed["trace"]:
        assert [steps for _, steps in block["intervals"]] == [fixed["fixed"]]


def test_blocks_without_saves_have_none(report: dict[str, Any]) -> None:
    for found in report["policy"]["conditions"].values():
        parts = {block["part"] for block in found["trace"]}
        assert {"settle", "before", "saving", "after"} <= parts
        for block in found["trace"]:
            assert bool(block["saves"]) or block["part"] != "saving"
            assert not block["saves"] or block["part"] not in ("before", "drain", "after")


def test_each_round_of_auto_finds_the_second_job_begin(report: dict[str, Any]) -> None:
    conditions = report["policy"]["conditions"]
    assert len(conditions[ADAPTIVE]["changes"]) == report["settings"]["rounds"]
    assert not conditions[ALONE]["changes"] and not conditions[FIXED]["changes"]
    for change in conditions[ADAPTIVE]["changes"]:
        assert change["after"] is None or 0 <= change["after"] < len(change["overheads"])
        assert bool(change["saves"]) or change["settled"] == 0
    rows = report["results"][figures.REACTION.key]["contenders"]
    assert list(rows) == [ADAPTIVE]


def test_decisions_are_timed(report: dict[str, Any]) -> None:
    found = report["policy"]["decision"]
    assert found["questions"] == report["settings"]["questions"]
    assert 0 < found["median_s"] <= found["worst_s"]


def test_tables_and_picture_are_written_and_the_root_is_left_as_it_was(
    output: Path, report: dict[str, Any]
) -> None:
    text = (output / "stdout").read_text()
    for words in ("Overhead with a bound", "The second job begins", "A decision of Auto"):
        assert words in text
    assert (output / "out.png").read_bytes().startswith(b"\x89PNG")
    assert not list((output / "root").iterdir())
    assert str(output) not in json.dumps(report)


# -- what blocks say ---------------------------------------------------------------------------


def block(seconds: list[float], saves: list[int]) -> dict[str, Any]:
    return {"seconds": seconds, "saves": saves}


def test_iterations_behind_a_block_are_paid_for_by_its_saves() -> None:
    base, saving = block([1.0, 1.0], []), block([1.5, 1.0, 1.0, 1.0], [0])
    pair = {"before": base, "saving": saving, "drain": block([1.5], [])}
    for pairs in (1, 3):
        found = compare({"pairs": [pair] * pairs, "after": base})
        assert found.added_s == pytest.approx(1.0 * pairs)
        assert (found.iterations, found.saves) == (4 * pairs, pairs)
        assert found.overhead == pytest.approx(0.25)
        assert found.cost_s == pytest.approx(1.0)


def test_all_blocks_without_saves_make_the_base() -> None:
    pairs = [
        {"before": block([seconds], []), "saving": block([2.0], [0]), "drain": block([], [])}
        for seconds in (1.0, 3.0)
    ]
    found = compare({"pairs": pairs, "after": block([2.0], [])})
    assert found.base_s == pytest.approx(2.0) and found.added_s == pytest.approx(0.0)


def test_intervals_are_counted_from_save_to_save() -> None:
    assert intervals_of(block([1.0] * 10, [0, 4, 7])) == [4, 3, 3]


def test_a_change_is_over_when_what_follows_is_within_the_bound() -> None:
    overheads = overheads_from([3.0, 2.0, 1.0, 1.0, 1.2], 1.0)
    assert overheads == pytest.approx([3.2 / 5, 1.2 / 4, 0.2 / 3, 0.2 / 2, 0.2])
    assert iterations_until(0.07, overheads) == 2
    assert iterations_until(0.05, overheads) is None


def test_what_saves_add_is_told_apart_from_a_drift_and_from_iterations_that_are_long_themselves() -> (
    None
):
    drifting = [1.0] * 20 + [1.5] * 20
    drifting[30] = 5.0
    assert added_from(drifting, [5, 25]) == [0.0] * 40
    dear = list(drifting)
    dear[5] += 0.5
    added = added_from(dear, [5, 25])
    assert added[0] == pytest.approx(0.5 / sum(drifting))
    assert added[6] == 0.0


def test_saves_behind_the_first_iterations_of_a_new_load_are_counted() -> None:
    assert counted_from([0, 2, 9], 10, 0.2) == pytest.approx(
        [0.06, 0.4 / 9, 0.05, 0.2 / 7, 0.2 / 6, 0.04, 0.05, 0.2 / 3, 0.1, 0.2]
    )
    assert settled_overhead([3, 19, 20, 60, 99], 100, 0.4) == pytest.approx(3 * 0.4 / 80)
    assert settled_overhead([1, 6, 11], 12, 0.5) == pytest.approx(2 * 0.5 / 6)


# -- the second job ----------------------------------------------------------------------------


def test_the_second_job_works_only_while_it_is_told_to_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "second"
    folder.mkdir()
    with Remote(
        "second", folder, timeout_s=60.0, worker="ckpt_core.bench.policy.interference:Interference"
    ) as second:
        last = max(os.sched_getaffinity(0))
        load = {"cpu_threads": 1, "disk_threads": 1, "file_bytes": 2**20}
        second.call("prepare", **load, processors=[last])
        assert second.call("stop")["done"] == {"compute-0": 0, "write-0": 0}
        second.call("start")
        done = {"compute-0": 0, "write-0": 0}
        while not all(done.values()):
            done = second.call("start")["done"]
        second.call("stop")
        # The thread that answers, and the two that work.
        assert _allowed(second.pid).count(str(last)) >= 3
        assert [path.stat().st_size for path in folder.iterdir()] == [2**20]
    assert not list(folder.iterdir())


def _allowed(pid: int) -> list[str]:
    """The processors that each thread of a process may use."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return re.findall(r"Cpus_allowed_list:\s*(\S+)", "".join(texts))


@pytest.mark.parametrize(
    ("processors", "threads", "training", "second"),
    [
        ((3,), 1, (3,), (3,)),
        ((1, 0), 1, (0,), (1,)),
        ((0, 1), 2, (0, 1), (0, 1)),
        ((0, 2, 4, 6), 1, (0,), (2, 4, 6)),
        ((0, 1, 2, 3), 3, (0, 1, 2), (3,)),
    ],
)
def test_the_second_job_has_the_processors_that_training_leaves(
    processors: tuple[int, ...],
    threads: int,
    training: tuple[int, ...],
    second: tuple[int, ...],
) -> None:
    assert Shares.of(processors, threads=threads) == Shares(training, second)


# -- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"contenders": ("torch_save",)}, "unknown contenders"),
        ({"max_overhead": 0.0}, "max_overhead"),
        ({"max_overhead": 1.5}, "max_overhead"),
        ({"state_bytes": 10}, "state_bytes"),
        ({"rounds": 0}, "rounds"),
        ({"load_writers": 0}, "load_writers"),
        ({"root": Path("/nowhere")}, "root"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        PolicySettings(**{"root": tmp_path, **options})


def test_the_second_job_computes_on_what_training_leaves(tmp_path: Path) -> None:
    processors = len(os.sched_getaffinity(0))
    assert PolicySettings(root=tmp_path).load.cpu_threads == max(1, processors - 1)
    assert PolicySettings(root=tmp_path, threads=processors).load.cpu_threads == 1
    assert PolicySettings(root=tmp_path, load_threads=3).load.cpu_threads == 3
    assert PolicySettings(root=tmp_path, load_writers=2).load.disk_threads == 2


def test_options_of_other_suites_are_refused(tmp_path: Path) -> None:
    root = ["--root", str(tmp_path)]
    for more in (["--leaves", "9"], ["--ranks", "2"], ["--interval", "5"]):
        result = ckpt_core_bench(["--suite", "policy", *root, *more])
        assert result.exit_code == 2
        assert more[0] in result.output
    result = ckpt_core_bench(["--suite", "core", *root, "--max-overhead", "0.1"])
    assert result.exit_code == 2
    assert "--max-overhead" in result.output


@pytest.mark.parametrize("entrant", [Entrant(restored=False), Entrant(reason="x", failed=True)])
def test_a_condition_that_fails_or_restores_other_bytes_makes_the_run_fail(
    tmp_path: Path, entrant: Entrant
) -> None:
    report = Report("policy", {}, describe(tmp_path), ours=tuple(NAMES))
    report.entrants[ALONE] = Entrant(restored=True)
    assert report.sound
    report.entrants[FIXED] = entrant
    assert not report.sound


def test_the_package_that_measures_imports_no_torch() -> None:
    code = "import sys, ckpt_core.bench\nprint('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
