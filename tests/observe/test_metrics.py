"""Figures for Prometheus: a file, or a port."""

from __future__ import annotations

import logging
import os
import re
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, ConfigError, Options
from ckpt_core.bench.meeting import free_port
from ckpt_core.observe import Event, EventLog, EventName, Figures, open_metrics
from tests.observe.exposition import parsed

STATE = {"weight": torch.zeros(1 << 18)}


def figures_of(log: EventLog, **more: Any) -> Figures:
    given: dict[str, Any] = {"root": "/r", "rank": 0, "waited_s": lambda: 0.5, "levels": lambda: ()}
    return Figures(log, **(given | more))


def value(text: str | bytes, name: str, **labels: str) -> float:
    """The one sample of a name, with these labels among its own."""
    text = text.decode() if isinstance(text, bytes) else text
    rows = parsed(text)[f"ckpt_core_{name}"].items()
    (found,) = [number for own, number in rows if set(labels.items()) <= own]
    return found


def until(told: Callable[[], bool], *, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not told():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def place(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """The URL of the port that was opened last."""
    caplog.set_level(logging.INFO, "ckpt_core")

    def found() -> str:
        return re.findall(r"metrics are at (\S+)", caplog.text)[-1]

    return found


def scraped(url: str) -> tuple[str, str]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


def test_a_scrape_tells_what_was_saved_and_what_it_cost(
    tmp_path: Path, place: Callable[[], str]
) -> None:
    before = time.time()
    with Checkpointer(tmp_path / 'a "root"', Options(metrics="127.0.0.1:0", keep_last=1)) as ck:
        assert "newest_step" not in scraped(place())[0]
        for step in (10, 20):
            ck.save(step, STATE)
            ck.wait()
        text, kind = scraped(place())
        url = place()
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    found = parsed(text)
    assert all(
        ("root", f'{tmp_path}/a "root"') in labels for one in found.values() for labels in one
    )
    assert value(text, "newest_step", rank="0") == 20
    assert before <= value(text, "newest_commit_timestamp_seconds") <= time.time()
    assert before <= value(text, "opened_timestamp_seconds") <= time.time()
    assert (value(text, "saves_total"), value(text, "save_failures_total")) == (2, 0)
    assert value(text, "saved_bytes_total") == value(text, "save_bytes_sum") >= 2 << 20
    assert value(text, "save_bytes_bucket", le="4194304") == 2
    assert value(text, "save_durable_seconds_count") == 2
    assert value(text, "save_stall_seconds_sum") <= value(text, "stall_seconds_total")
    assert (value(text, "in_flight"), value(text, "open")) == (0, 1)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=5)


def test_no_figure_is_labelled_by_its_step_and_a_failure_counts() -> None:
    log = EventLog()
    figures = figures_of(log)
    log.emit(Event(EventName.BEGIN, 1.0, 5))
    log.emit(Event(EventName.BEGIN, 1.0, 6))
    log.emit(Event(EventName.FAILED, 1.0, 5, detail="the disk is full"))
    log.emit(Event(EventName.LEVEL_REACHED, 1.0, 6, detail="s3://b/run"))
    lines = figures.samples()
    assert lines["in_flight"] == ['ckpt_core_in_flight{root="/r",rank="0"} 1\n']
    assert lines["save_failures_total"][0].endswith(" 1\n")
    assert lines["level_reached_steps_total"] == [
        'ckpt_core_level_reached_steps_total{root="/r",rank="0",level="s3://b/run"} 1\n'
    ]
    assert not any("step=" in line for many in lines.values() for line in many)


def test_levels_tell_how_far_they_are_and_a_root_that_cannot_be_listed_hides_nothing_else(
    tmp_path: Path,
) -> None:
    level = SimpleNamespace(
        url="s3://b",
        newest=100,
        lag_steps=20,
        sent_bytes=30,
        total_bytes=100,
        bytes_all=130,
        problem="x",
    )
    log, path = EventLog(), tmp_path / "a.prom"
    open_metrics(str(path), figures_of(log, levels=lambda: [level]), rank=0, world_size=1).close()
    text = path.read_text()
    assert value(text, "level_newest_step", level="s3://b") == 100
    assert value(text, "level_lag_steps") == 20
    assert value(text, "level_unsent_bytes") == 70
    assert (value(text, "level_sent_bytes_total"), value(text, "level_problem")) == (130, 1)

    def fails() -> tuple[()]:
        raise OSError("gone")

    assert "saves_total" in figures_of(log, levels=fails).samples()


def test_a_file_is_replaced_after_each_save_and_says_when_the_root_was_closed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ckpt.prom"
    with Checkpointer(tmp_path / "root", Options(metrics=path)) as ck:
        first = path.stat().st_ino
        ck.save(10, STATE).committed.result(60)
        until(lambda: value(path.read_text(), "saves_total") == 1)
        assert path.stat().st_ino != first
        assert value(path.read_text(), "open") == 1
    assert (value(path.read_text(), "open"), value(path.read_text(), "newest_step")) == (0, 10)
    assert [one.name for one in tmp_path.glob("*prom*")] == ["ckpt.prom"]
    assert path.stat().st_mode & stat.S_IRUSR
    with Checkpointer(tmp_path / "root", Options(metrics=path)):
        assert value(path.read_text(), "saves_total") == 0
        until(lambda: "newest_step" in path.read_text())
        assert "newest_commit_timestamp_seconds" not in path.read_text()


def test_each_rank_has_a_file_and_a_port_of_its_own(tmp_path: Path) -> None:
    for rank in range(2):
        figures = figures_of(EventLog(), rank=rank)
        open_metrics(str(tmp_path / "a.prom"), figures, rank=rank, world_size=2).close()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a-00000.prom", "a-00001.prom"]
    with pytest.raises(ConfigError, match="rank 9 would listen on port 65539"):
        open_metrics("127.0.0.1:65530", figures_of(EventLog()), rank=9, world_size=10)


def test_two_roots_of_one_process_share_a_place(tmp_path: Path) -> None:
    path = tmp_path / "a.prom"
    options = Options(metrics=path)
    with Checkpointer(tmp_path / "a", options) as one:
        with Checkpointer(tmp_path / "b", options) as other:
            other.save(7, STATE).committed.result(60)
            one.save(3, STATE).committed.result(60)
            until(lambda: path.read_text().count("ckpt_core_newest_step{") == 2)
            assert value(path.read_text(), "newest_step", root=str(tmp_path / "b")) == 7
        until(lambda: str(tmp_path / "b") not in path.read_text())
    assert value(path.read_text(), "newest_step") == 3


def test_a_client_that_says_nothing_does_not_keep_the_next_one_out_for_ever(
    tmp_path: Path, place: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_core.observe.metrics._CLIENT_S", 2.0)
    with Checkpointer(tmp_path, Options(metrics="127.0.0.1:0")):
        port = int(place().rsplit(":", 1)[1].split("/")[0])
        with socket.create_connection(("127.0.0.1", port)):
            assert value(scraped(place())[0], "saves_total") == 0
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(place() + "/other", timeout=30)


def test_a_file_that_can_be_written_no_more_is_said_once_and_saves_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with Checkpointer(tmp_path / "root", Options(metrics=folder / "a.prom")) as ck:
        # Renamed, since it may be written anew this very moment.
        folder.rename(tmp_path / "elsewhere")
        for step in (1, 2, 3):
            ck.save(step, STATE).committed.result(60)
            until(lambda: "are out of date" in caplog.text)
    assert caplog.text.count("are out of date") == 1


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "run.txt",
        "host",
        ":9400",
        "host:",
        "host:x",
        "h:70000",
        "a@h:1",
        "h:1/x",
        True,
        1.5,
        70000,
    ],
)
def test_what_is_no_place_is_refused_when_the_options_are_made(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="metrics="):
        Options(metrics=wrong)


def test_places_are_made_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Options(metrics="a.prom").metrics == f"{tmp_path}/a.prom"
    assert Options(metrics=9400).metrics == "127.0.0.1:9400"
    assert Options(metrics="0.0.0.0:9400").metrics == "0.0.0.0:9400"
    assert Options(metrics="[::1]:9400").metrics == "[::1]:9400"
    environ = {"CKPT_CORE_METRICS": "9400", "CKPT_CORE_EVENTS_FILE": "e", "CKPT_CORE_WRITERS": "3"}
    assert Options.from_env(environ).metrics == "127.0.0.1:9400"
    assert Options().or_places_from_env(environ) == Options(metrics=9400, events_file="e")
    given = Options(metrics="a.prom", events_file="other")
    assert given.or_places_from_env(environ) == given
    assert Options.from_env({"CKPT_CORE_METRICS": "none"}).metrics is None


def test_a_place_that_is_taken_or_missing_is_refused_and_the_root_is_free_again(
    tmp_path: Path,
) -> None:
    port = free_port()
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ConfigError, match=rf"127.0.0.1:{port}.*nobody can listen there"),
    ):
        Checkpointer(tmp_path / "root", Options(metrics=port))
    with pytest.raises(ConfigError, match=r"a.prom' cannot be written: No such file"):
        Checkpointer(tmp_path / "root", Options(metrics=tmp_path / "nope" / "a.prom"))
    with Checkpointer(tmp_path / "root", Options(metrics=port)) as ck:
        ck.save(1, STATE)
    with Checkpointer(tmp_path / "root", Options(metrics=port)):
        pass


FORKING = """
import os, sys, time
from ckpt_core.observe import EventLog, Figures, open_metrics
figures = Figures(EventLog(), root="/r", rank=0, waited_s=lambda: 0.0, levels=lambda: ())
open_metrics(f"127.0.0.1:{sys.argv[1]}", figures, rank=0, world_size=1)
if os.fork() == 0:
    print("child", flush=True)
    time.sleep(60)
os.waitpid(-1, 0)
"""


def test_a_port_is_free_when_its_process_was_killed_though_a_child_lives() -> None:
    port = free_port()
    top = Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore", "-c", FORKING, str(port)]
    job = subprocess.Popen(command, cwd=top, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert job.stdout is not None and job.stdout.readline() == b"child\n"
        job.kill()
        job.wait()
        address = f"127.0.0.1:{port}"
        open_metrics(address, figures_of(EventLog()), rank=0, world_size=1).close()
    finally:
        os.killpg(job.pid, 9)
        job.stdout.close()
