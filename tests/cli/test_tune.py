"""`ckpt-core tune` as a whole, in both forms, with real saves. No test looks at how long anything took."""

from __future__ import annotations

import errno
import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_core import Options
from ckpt_core.errors import ConfigError
from ckpt_core.policy import tuning
from ckpt_core.system.files import Files
from ckpt_core.tune.direct import NOTE, takes_direct_writes
from ckpt_core.tune.events import Events
from ckpt_core.tune.program import check_obeyed
from tests.interrupts.commands import end_at_a_step
from tests.persist.undirect import NoDirectOpen, NoDirectWrite

TOP = Path(__file__).parents[2]
PAGE = (TOP / "docs" / "tune.md").read_text()
PLENTY = ("--max-overhead", 1000, "--seed", 1)
SMALL = ("--model-bytes", "2MB", "--iteration-s", 0.002, "--saves", 2, "--rounds", 2, *PLENTY)
FEW = ("--writers", 1, "--writers", 2, "--chunk-bytes", "256KiB", "--staging-bytes", "2MB")
SIZES = ("--in-flight", 2, "--writers", 2, "--chunk-bytes", "64KiB", "--staging-bytes", "1MiB")
ONE = (*SIZES, "--direct-io", "auto")

PROGRAM = """
import sys, torch
from ckpt_core import Checkpointer, Options
root, every, explicit = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
options = Options() if "plain" in explicit else Options.from_env(
    **dict(pair.split("=") for pair in explicit))
state = {"weight": torch.zeros(100_000), "step": 0}
with Checkpointer(root, options) as ck:
    for step in range(1, 3000):
        ck.wait_staged()
        state["weight"].add_(1.0)
        state["step"] = step
        if step % every == 0:
            ck.save(step, state)
"""

Cli = Callable[..., Any]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A directory to measure; whatever happens it must be empty afterwards."""
    made = tmp_path / "disk"
    made.mkdir()
    return made


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


class Full(Files):
    """A disk that is full."""

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        raise OSError(errno.ENOSPC, "full")


def left_in(disk: Path) -> list[Path]:
    return list(disk.iterdir())


def test_a_made_up_state_is_tuned_and_nothing_is_left(cli: Cli, disk: Path, tmp_path: Path) -> None:
    plot = tmp_path / "tune.png"
    answer = cli("tune", "--root", disk, *SMALL, *FEW, "--checks", 1, "--plot", plot, "--json")
    assert answer.code == 0, answer.err
    report = json.loads(answer.out)
    best = report["recommended"]
    assert best["writers"] in (1, 2)
    assert best["chunk_bytes"] == 2**18
    pasted = eval(best["expression"], {"Options": Options})
    assert pasted == Options.from_env(dict(line.split("=", 1) for line in best["environment"]))
    assert report["interval"]["every"] >= report["interval"]["storage_every"] >= 1
    assert report["checks"][0]["every"] == report["interval"]["every"]
    assert {row["in_flight"] for row in report["measured"]} >= {1, 2}
    assert sum(len(row["turns_s"]) for row in report["measured"]) == report["search"]["turns"]
    assert all(seconds > 0 for row in report["measured"] for seconds in row["turns_s"])
    assert report["sureness"]["rounds"] == 2
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert left_in(disk) == []
    for field in set(_fields(report)):
        assert f"`{field}`" in PAGE, f"docs/tune.md lacks `{field}`"


def _fields(value: Any) -> list[str]:
    if isinstance(value, list):
        return [field for item in value for field in _fields(item)]
    if not isinstance(value, dict):
        return []
    return [*value, *(f for key, item in value.items() if key != "machine" for f in _fields(item))]


def test_the_answer_can_be_pasted_and_says_how_sure_it_is(cli: Cli, disk: Path) -> None:
    answer = cli("tune", "--root", disk, *SMALL, *ONE, "--checks", 0, "--load", "busy")
    assert answer.code == 0, answer.err
    sizes = 'in_flight=2, writers=2, chunk_bytes="64KiB", staging_bytes="1MiB"'
    assert f'Options({sizes}, direct_io="auto")' in answer.out.splitlines()
    assert "CKPT_CORE_CHUNK_BYTES=64KiB" in answer.out.splitlines()
    assert "CKPT_CORE_DIRECT_IO=auto" in answer.out.splitlines()
    words = answer.out.splitlines()[0]
    assert words.startswith("Save every")
    assert "of training (computed), and a crash loses at most" in words
    assert "nothing else to compare with" in answer.out
    assert "f* = ceil(Tw / (N q t)) = 1" in answer.out
    assert "recommended, defaults" in answer.out
    assert "making a state" in answer.err.splitlines()
    assert "max_overhead=1000 lets saves cost 100000% of training: 0.05 is 5%" in answer.err


def test_exhaustive_measures_every_candidate(cli: Cli, disk: Path) -> None:
    choice = ("--in-flight", 1, "--in-flight", 2, *FEW, "--direct-io", "off")
    more = ("--exhaustive", "--checks", 0, "--json")
    report = json.loads(cli("tune", "--root", disk, *SMALL, *choice, *more).out)
    assert len(report["measured"]) == report["search"]["candidates"] == 4
    assert all(len(row["turns_s"]) >= 2 for row in report["measured"])
    assert {row["direct_io"] for row in report["measured"]} == {"off"}


def test_direct_writes_and_buffered_ones_are_both_tried(cli: Cli, disk: Path) -> None:
    tried = {"auto", "off"} if takes_direct_writes(disk, Files()) else {"auto"}
    answer = cli("tune", "--root", disk, *SMALL, *SIZES, "--checks", 0, "--json")
    assert answer.code == 0, answer.err
    report = json.loads(answer.out)
    assert {row["direct_io"] for row in report["measured"]} == tried
    assert report["recommended"]["direct_io"] in tried
    assert report["notes"] == ([] if len(tried) == 2 else [NOTE])


@pytest.mark.parametrize(("direct_io", "past_the_cache"), [("auto", True), ("off", False)])
def test_a_candidate_writes_as_it_says(
    cli: Cli, disk: Path, monkeypatch: pytest.MonkeyPatch, direct_io: str, past_the_cache: bool
) -> None:
    asked, create = [], Files.create

    def recording(files: Files, path: Path, *, direct: bool = False) -> int:
        asked.append(direct)
        return create(files, path, direct=direct)

    monkeypatch.setattr(Files, "create", recording)
    answer = cli("tune", "--root", disk, *SMALL, *SIZES, "--direct-io", direct_io, "--checks", 0)
    assert answer.code == 0, answer.err
    assert any(asked) is past_the_cache


@pytest.mark.parametrize("files", [NoDirectOpen, NoDirectWrite])
def test_where_direct_writes_are_refused_only_one_is_tried_and_a_note_says_so(
    cli: Cli, disk: Path, monkeypatch: pytest.MonkeyPatch, files: type[Files]
) -> None:
    monkeypatch.setattr("ckpt_core.tune.direct.Files", files)
    answer = cli("tune", "--root", disk, *SMALL, *SIZES, "--checks", 0)
    assert answer.code == 0, answer.err
    assert "1 candidates, 1 of them measured" in answer.out
    assert "CKPT_CORE_DIRECT_IO=auto" in answer.out.splitlines()
    assert f"note: {NOTE}" in answer.out.splitlines()
    assert left_in(disk) == []


def test_where_direct_writes_are_refused_none_are_insisted_on(
    cli: Cli, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_core.tune.direct.Files", NoDirectOpen)
    answer = cli("tune", "--root", disk, *SMALL, *SIZES, "--direct-io", "on")
    assert answer.code == 2
    assert "direct_io='on' cannot be tried: this filesystem takes no direct writes" in answer.err
    assert left_in(disk) == []


@pytest.mark.parametrize(
    ("files", "takes"),
    [(NoDirectOpen(), False), (NoDirectWrite(), False), (Full(), True)],
    ids=["open", "write", "full"],
)
def test_the_probe_leaves_nothing_and_tells_a_refusal_from_another_error(
    disk: Path, files: Files, takes: bool
) -> None:
    assert takes_direct_writes(disk, files) is takes
    assert left_in(disk) == []


def test_a_program_is_tuned_by_its_own_events(cli: Cli, disk: Path, program: Path) -> None:
    command = (sys.executable, program, "{root}", "{every}")
    limits = ("--saves", 2, "--rounds", 1, "--checks", 1, *PLENTY)
    buffered = (*SIZES, "--direct-io", "off", "--json")
    answer = cli("tune", "--root", disk, *limits, *buffered, "--", *command)
    assert answer.code == 0, answer.err
    report = json.loads(answer.out)
    assert report["recommended"]["direct_io"] == "off"
    assert report["limits"]["rank_bytes"] >= 400_000
    assert report["interval"]["iteration_s"] > 0
    assert report["checks"]
    assert report["notes"] == []
    assert left_in(disk) == []


def test_a_program_with_its_own_interval_says_that_it_was_not_tried_out(
    cli: Cli, disk: Path, program: Path
) -> None:
    command = (sys.executable, program, "{root}", 40)
    limits = ("--saves", 2, "--rounds", 1, "--iteration-s", 0.01, *PLENTY)
    answer = cli("tune", "--root", disk, *limits, *ONE, "--", *command)
    assert answer.code == 0, answer.err
    assert "{every} in the command would allow it" in answer.out
    assert left_in(disk) == []


def test_a_program_that_sets_a_value_itself_is_told(cli: Cli, disk: Path, program: Path) -> None:
    command = (sys.executable, program, "{root}", "{every}", "direct_io=off")
    answer = cli("tune", "--root", disk, "--rounds", 1, *ONE, *PLENTY, "--", *command)
    assert answer.code == 2
    assert "sets direct_io='off' itself" in answer.err
    assert "--direct-io off" in answer.err
    assert left_in(disk) == []


def test_steps_of_two_checkpointers_of_a_program_come_to_no_iteration(tmp_path: Path) -> None:
    def line(name: str, opening: str, time_s: float, **more: object) -> str:
        told = {"name": name, "rank": 0, "opening": opening, "time_s": time_s, **more}
        return json.dumps(told) + "\n"

    def run(opening: str, begin_s: float, step_s: float, saves: int) -> list[str]:
        told = [line("opened", opening, begin_s, options={"keep_last": saves})]
        for n in range(1, saves + 1):
            now_s = begin_s + n * step_s
            told += [
                line("begin", opening, now_s, step=n),
                line("committed", opening, now_s + 0.1, step=n, seconds=0.1, nbytes=saves),
                line("barrier", opening, now_s + 0.2),
            ]
        return told

    path, events = tmp_path / "events.jsonl", Events()
    path.write_text("".join(run("first", 0.0, 7.0, 2) + run("main", 900.0, 1.0, 5)))
    events.read(path)
    trace = events.trace()
    assert (events.commits, events.barriers, len(trace.saves)) == (5, 5, 5)
    assert [end - begin for begin, end in trace.iterations] == pytest.approx([1.0] * 4)
    assert (trace.nbytes, events.nbytes, events.options) == (5, {0: 5}, {"keep_last": 5})


def test_every_field_of_a_candidate_must_be_left_to_the_environment() -> None:
    candidate = tuning.Candidate(2, 2, 2**16, 2**20, "off")
    events = Events()
    events.options = tuning.as_values(candidate)
    check_obeyed(events, candidate)
    for name, value in {"in_flight": 3, "chunk_bytes": 2**20, "direct_io": "auto"}.items():
        events.options = tuning.as_values(candidate) | {name: value}
        with pytest.raises(ConfigError, match=f"sets {name}={value!r} itself"):
            check_obeyed(events, candidate)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("{root}", 10**6, "plain"), "Options.from_env()"),
        (("{root}", "no number"), "ended with 1"),
        (("{root}", 10**6), "the program ended after 0 commits"),
    ],
)
def test_a_program_that_cannot_be_tuned_says_why(
    cli: Cli, disk: Path, program: Path, arguments: tuple[object, ...], text: str
) -> None:
    said = ("tune", "--no-progress", "--root", disk, "--", sys.executable, program)
    answer = cli(*said, *arguments)
    assert answer.code == 2
    assert text in answer.err
    assert answer.err.count("\n") == 1
    assert left_in(disk) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "give --model-bytes and --iteration-s, or a command"),
        (("--model-bytes", "2MB"), "--iteration-s"),
        (("--model-bytes", "1KB", "--iteration-s", 1), "model_bytes"),
        (("--model-bytes", "900TiB", "--iteration-s", 1), "free memory"),
        ((*SMALL, "--max-storage", "3MB"), "(with --keep-last 1:"),
        ((*SMALL, "--max-memory", "64KB"), "max_memory"),
        ((*SMALL, "--max-overhead", 0), "max_overhead"),
        ((*SMALL, "--max-interval", 0), "max_interval"),
        ((*SMALL, "--load", "heavy"), "choose of idle, busy"),
        ((*SMALL, "--rounds", 0), "rounds"),
        ((*SMALL, "--writers", 0), "writers"),
        ((*SMALL, "--chunk-bytes", "big"), "chunk_bytes='big'"),
        (
            (*SMALL, "--direct-io", "maybe"),
            "direct_io='maybe' is unknown: choose one of 'auto', 'on'",
        ),
        ((*SMALL, "--plot", "/nowhere/x.png"), "cannot be written"),
        ((*SMALL, "--plot", "x.txt"), ".png"),
        (("--", "python", "train.py"), "{root}"),
        (("--", "no-such-program", "{root}"), "cannot be run"),
        ((*SMALL, "--", "python", "{root}"), "model_bytes goes with no command"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(
    cli: Cli, disk: Path, arguments: tuple[object, ...], text: str
) -> None:
    answer = cli("tune", "--root", disk, *arguments)
    assert answer.code == 2
    assert answer.out == ""
    assert text in answer.err
    assert left_in(disk) == []


def test_a_limit_that_cannot_be_met_is_a_finding_with_the_nearest_that_can(
    cli: Cli, disk: Path
) -> None:
    # Within a millionth of training no storage takes a save at each step, however long that takes.
    quick = ("--model-bytes", "2MB", "--iteration-s", 1e-9, "--saves", 2, "--rounds", 1)
    limits = ("--max-interval", 1, "--max-overhead", 1e-6)
    answer = cli("tune", "--root", disk, *quick, *ONE, "--checks", 0, *limits)
    assert answer.code == 1
    assert "not met: max_interval=1" in answer.err
    assert "the smallest interval is" in answer.err
    assert "Options(" in answer.out
    assert left_in(disk) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("form", ["stand-in", "program"])
def test_ctrl_c_and_sigterm_leave_nothing_behind(
    disk: Path, program: Path, form: str, number: int, code: int
) -> None:
    endless = ("--saves", 10**6, *ONE)
    tail = ("--", sys.executable, program, "{root}", "{every}")
    form_of = {"stand-in": ("--model-bytes", "2MB", "--iteration-s", 0.01), "program": tail}
    before = endless if form == "program" else (*endless, *form_of[form])
    after = form_of[form] if form == "program" else ()
    ended = end_at_a_step(["tune", "--root", disk, *before, *after], disk, number)
    assert (ended.code, ended.left) == (code, [])
    assert left_in(disk) == []


def test_the_page_names_every_option(cli: Cli) -> None:
    for option in re.findall(r"^ +(?:-\w, )?(--[\w-]+)", cli("tune", "--help").out, re.MULTILINE):
        assert option == "--help" or f"`{option}" in PAGE, option
