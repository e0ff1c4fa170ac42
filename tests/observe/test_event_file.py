"""Events as lines of a file, written while a run goes on."""

from __future__ import annotations

import errno
import json
import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import Checkpointer, ConfigError, Options
from ckpt_core.observe import Event, EventLog, EventName, event_file
from ckpt_core.observe.event_file import NoEventFile


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_tells_its_options_its_barriers_and_its_saves(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    options = Options.from_env({"CKPT_CORE_EVENTS_FILE": str(path), "CKPT_CORE_IN_FLIGHT": "3"})
    state = {"weight": torch.zeros(1000)}
    with Checkpointer(tmp_path / "ckpts", options) as checkpointer:
        for step in range(4):
            checkpointer.wait_staged()
            if step % 2:
                checkpointer.save(step, state)
    lines = lines_of(path)
    assert lines[0]["name"] == "opened"
    assert lines[0]["options"]["in_flight"] == 3
    assert lines[0]["world_size"] == 1
    assert {line["rank"] for line in lines} == {0}
    names = [line["name"] for line in lines]
    assert (names.count("barrier"), names.count("begin"), names.count("committed")) == (4, 2, 2)
    committed = [line for line in lines if line["name"] == "committed"]
    assert {line["step"] for line in committed} == {1, 3}
    assert all(line["nbytes"] == 4000 and line["seconds"] > 0 for line in committed)
    phases = ("begin", "staged", "persisted", "committed")
    tries = {(line["step"], line["attempt"]) for line in lines if line["name"] in phases}
    assert len(tries) == 2 and None not in {attempt for _, attempt in tries}


def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    file = event_file(None, EventLog(), rank=0, opened={})
    file.barrier()
    file.close()
    assert type(file) is NoEventFile


def test_a_second_run_appends(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for rank in range(2):
        event_file(path, EventLog(), rank=rank, opened={}).close()
    assert [line["rank"] for line in lines_of(path)] == [0, 1]


def test_what_a_run_before_left_of_a_line_swallows_none_of_this_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"name": "begin", "time_s"')
    for rank in range(2):
        event_file(path, EventLog(), rank=rank, opened={}).close()
    torn, *whole = path.read_text().splitlines()
    assert torn == '{"name": "begin", "time_s"'
    assert [json.loads(line)["rank"] for line in whole] == [0, 1]


def test_a_line_that_is_written_in_part_is_the_last_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, limit_bytes = tmp_path / "events.jsonl", 1 << 30
    path.touch()
    os.truncate(path, limit_bytes - 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        file = event_file(path, EventLog(), rank=0, opened={})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.barrier()
    file.close()
    assert path.stat().st_size == limit_bytes
    assert caplog.text.count(f"not written down any more: [Errno {errno.EFBIG}]") == 1


def test_lines_of_two_in_one_file_are_told_apart(tmp_path: Path) -> None:
    log, path = EventLog(), tmp_path / "events.jsonl"
    files = [event_file(path, log, rank=0, opened={}) for _ in range(2)]
    log.emit(Event(EventName.BEGIN, 1.0, 7))
    for file in files:
        file.close()
    first, second, *told = [line["opening"] for line in lines_of(path)]
    assert first != second
    assert sorted(told) == sorted([first, second])


def test_once_closed_it_hears_no_more(tmp_path: Path) -> None:
    log, path = EventLog(), tmp_path / "events.jsonl"
    file = event_file(path, log, rank=0, opened={})
    log.emit(Event(EventName.BEGIN, 1.0, 7))
    file.close()
    file.close()
    log.emit(Event(EventName.COMMITTED, 2.0, 7))
    file.barrier()
    assert [line["name"] for line in lines_of(path)] == ["opened", "begin"]


def test_a_full_disk_ends_the_file_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog()
    file = event_file("/dev/full", log, rank=0, opened={})
    log.emit(Event(EventName.BEGIN, 1.0, 7))
    file.barrier()
    file.close()
    assert caplog.text.count("not written down any more") == 1


def test_a_file_that_takes_nothing_more_stops_neither_training_nor_close(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "events"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def train() -> None:
        file = event_file(path, EventLog(), rank=0, opened={})
        for _ in range(20_000):
            file.barrier()
        file.close()

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join(timeout=60)
    alive = thread.is_alive()
    os.close(reader)  # whoever still writes gets an error
    assert not alive
    assert "lines wait for storage that hangs" in caplog.text


def test_lines_keep_their_order_and_are_all_there_after_close(tmp_path: Path) -> None:
    log, path = EventLog(), tmp_path / "events.jsonl"
    file = event_file(path, log, rank=0, opened={})
    for step in range(2000):
        log.emit(Event(EventName.BEGIN, 1.0, step))
    file.close()
    assert [line.get("step") for line in lines_of(path)] == [None, *range(2000)]


@pytest.mark.parametrize("path", ["", 7, b"x"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(ConfigError, match="events_file"):
        Options(events_file=path)


def test_a_file_that_cannot_be_opened_is_named_and_the_root_is_free_again(tmp_path: Path) -> None:
    root = tmp_path / "ckpts"
    with pytest.raises(ConfigError, match="nowhere"):
        Checkpointer(root, Options(events_file=tmp_path / "nowhere" / "events.jsonl"))
    with Checkpointer(root, Options(events_file=None)) as checkpointer:
        assert checkpointer.steps() == ()


def test_the_environment_can_say_none() -> None:
    assert Options.from_env({"CKPT_CORE_EVENTS_FILE": "none"}).events_file is None
