"""`ckpt-core watch`."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.cli.watched import Watcher
from tests.report.lines import line, save, written

Cli = Callable[..., Any]
TOP = Path(__file__).parents[2]
COMMIT = r"step \d+ is saved: .* in .*; training waited"
JOB = """
import sys, time, torch
from ckpt_core import Checkpointer, Options
torch.set_num_threads(1)
root, events = sys.argv[1:]
with Checkpointer(root, Options(events_file=events)) as ck:
    for step in range(1, 100_000):
        ck.save(step, {"w": torch.ones(1000)}).committed.result(60)
        time.sleep(0.05)
"""


def opened(at: float, rank: int = 0, **more: Any) -> dict[str, Any]:
    return line("opened", at, rank, unix_s=time.time() - 100 + at, host="far", **more)


def until(told: Callable[[], bool], *, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not told():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def running(*command: object, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, *map(str, command)], cwd=TOP, **more)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_picture_says_what_is_saved_now_and_what_saves_cost(cli: Cli, tmp_path: Path) -> None:
    lines = [opened(0.0), *save(20, 10.0, waited_s=0.0), *save(40, 30.0, waited_s=0.2)]
    lines += [line("begin", 50.0, step=60), line("staged", 51.0, step=60)]
    answer = cli("watch", written(tmp_path / "e", *lines), "--once")
    assert answer.code == 0
    assert re.search(r"newest step +40, \d+ s ago", answer.out)
    assert re.search(r"saving +step 60: persist, about 1000 B, [\d.]+ s so far", answer.out)
    assert re.search(r"interval +every 20 steps, 20 s", answer.out)
    assert re.search(r"training +waited 0.5\d% of the time lately", answer.out)
    assert re.search(r"a save +1000 B durable in 0.4 s", answer.out)


def test_several_ranks_have_a_table_and_failures_their_texts(cli: Cli, tmp_path: Path) -> None:
    paths = []
    for rank in range(2):
        lines = [opened(0.0, rank), *save(20, 10.0, rank), line("begin", 90.0, rank, step=40)]
        paths.append(tmp_path / f"e{rank}")
        written(paths[-1], *lines)
    with paths[1].open("a") as file:
        file.write(json.dumps(line("failed", 92.0, 1, step=40, detail="the disk\x1b[2J is full")))
        file.write("\n")
    answer = cli("watch", *paths, "--once")
    assert re.search(r"step 40: staging, .*on 1 of 2 ranks", answer.out)
    assert re.search(r"failed +rank 1, \d+ s ago: step 40: the disk\\x1b\[2J is full", answer.out)
    assert re.search(r"^ *0 +far .*40 staging +20", answer.out, re.MULTILINE)
    assert "\x1b" not in answer.out


def test_a_root_alone_says_its_newest_step_and_that_nobody_writes(cli: Cli, ckpts: Path) -> None:
    answer = cli("watch", ckpts, "--once")
    assert f"nobody writes to {ckpts}" in answer.out
    assert re.search(r"newest step +30, .* ago; 3 steps, .* in the root", answer.out)
    told = json.loads(cli("watch", ckpts, "--once", "--json").out)
    assert [row["step"] for row in told["roots"][0]["steps"]] == [10, 20, 30]


def test_what_cannot_be_read_is_said_beside_the_rest(cli: Cli, tmp_path: Path, ckpts: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    odd = (tmp_path / "nope", tmp_path / "pipe", ckpts / "step-000000000010")
    answer = cli("watch", *odd, ckpts, "--once")
    assert answer.code == 0
    assert f"{tmp_path / 'nope'} is not there yet" in answer.out
    assert "pipe is neither a root nor a file" in answer.out
    assert "is one step, not a root" in answer.out
    assert re.search("newest step +30", answer.out)


def test_a_file_that_is_cut_off_or_replaced_or_half_written_is_read_on(tmp_path: Path) -> None:
    path, watcher = tmp_path / "e", Watcher([str(tmp_path / "e")])
    assert watcher.look().ranks == ()
    written(path, opened(0.0), *save(20, 10.0), rest='{"name": "begin", "ti')
    assert [one.step for one in watcher.look().ranks[0].over] == [20]
    written(path, opened(20.0), *save(30, 20.0))
    assert [one.step for one in watcher.look().ranks[0].over] == [20, 30]
    path.rename(tmp_path / "e.1")
    assert watcher.look().problems == (f"{path} is not there yet",)
    written(path, rest="x" * 50 + "\n" + json.dumps(line("begin", 90.0, step=40)) + "\n")
    assert [one.step for one in watcher.look().ranks[0].under_way] == [40]


def test_what_a_killed_run_had_begun_is_not_under_way_in_the_next(tmp_path: Path) -> None:
    path = written(tmp_path / "e", opened(0.0), line("begin", 1.0, step=40), opened(5.0))
    (rank,) = Watcher([str(path)]).look().ranks
    assert rank.under_way == ()
    assert rank.opened_unix_s == pytest.approx(time.time() - 95, abs=10)


def test_two_checkpointers_of_a_rank_are_both_under_way(tmp_path: Path) -> None:
    first = [opened(0.0), *save(20, 3.0), line("begin", 4.0, step=30), line("begin", 8.5, step=40)]
    second = [opened(5.0), *save(500, 8.1), line("begin", 9.0, step=700)]
    lines = [one | {"opening": "a"} for one in first] + [one | {"opening": "b"} for one in second]
    lines.append(line("staged", 9.2, step=30, opening="a"))
    (rank,) = Watcher([str(written(tmp_path / "e", *lines))]).look().ranks
    assert [(one.step, one.phase) for one in rank.under_way] == [
        *((30, "persist"), (40, "staging"), (700, "staging")),
    ]
    assert (rank.every_steps, rank.every_s) == (200, pytest.approx(0.9))
    assert rank.opened_unix_s == pytest.approx(time.time() - 95, abs=10)


def test_the_window_is_bounded_and_its_iterations_are_still_told_apart(tmp_path: Path) -> None:
    lines = [opened(0.0)]
    for step in range(1, 1200):
        lines += [line("barrier", step * 0.05, waited_s=0.0)]
        if step % 100 == 0:
            lines += save(step, step * 0.05 + 0.01)
    (rank,) = Watcher([str(written(tmp_path / "e", *lines))]).look().ranks
    assert rank.iteration_s == pytest.approx(0.05)
    assert rank.beside_s == pytest.approx(0.05)
    assert rank.every_steps == 100


class Terminal:
    """What a program shows on a terminal of 80 columns."""

    def __init__(self) -> None:
        self._main, self.end = pty.openpty()
        self._told = bytearray()
        self.environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}

    def shows(self, text: str) -> bool:
        while select.select([self._main], [], [], 0)[0]:
            self._told.extend(os.read(self._main, 65536))
        shown = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", self._told.decode(errors="replace"))
        return re.search(text, shown) is not None

    def close(self) -> None:
        os.close(self._main)
        os.close(self.end)


def test_a_running_job_is_watched_until_it_is_killed_and_on_to_ctrl_c(tmp_path: Path) -> None:
    root, events, out = tmp_path / "ckpts", tmp_path / "e", tmp_path / "out"
    command = ("-m", "ckpt_core", "watch", events, "--every", "0.1")
    with contextlib.closing(Terminal()) as terminal, out.open("wb") as told:
        ends = {"stdin": terminal.end, "stdout": terminal.end, "stderr": terminal.end}
        with (
            running(*command, root, env=terminal.environ, **ends) as live,
            running(*command, stdout=told) as lines,
        ):
            until(lambda: terminal.shows("is not there yet"))
            with running("-c", JOB, root, events) as job:
                until(lambda: terminal.shows(rf"pid {job.pid} on "))
                until(lambda: terminal.shows(r"newest step +\d+, \d+ s ago"))
                until(lambda: terminal.shows(r"a save .* durable in"))
                until(lambda: len(re.findall(COMMIT, out.read_text())) > 2)
                job.kill()
                until(lambda: terminal.shows("nobody writes to"))
                until(lambda: "nobody writes to" in out.read_text())
            for watching in (live, lines):
                assert watching.poll() is None
                watching.send_signal(signal.SIGINT)
                assert watching.wait(30) == 0
    steps = re.findall(r"step (\d+) is saved", out.read_text())
    assert len(steps) == len(set(steps))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_ctrl_c_is_the_usual_end_and_sigterm_is_told_as_for_other_commands(
    ckpts: Path, number: signal.Signals, code: int
) -> None:
    with running("-m", "ckpt_core", "watch", ckpts, stdout=subprocess.PIPE) as watching:
        assert watching.stdout is not None
        with watching.stdout as told:
            assert told.readline()
            watching.send_signal(number)
            assert watching.wait(60) == code


def test_one_object_has_an_end(cli: Callable[..., Any], tmp_path: Path) -> None:
    answer = cli("watch", tmp_path, "--json")
    assert (answer.code, "give --once" in answer.err) == (2, True)
