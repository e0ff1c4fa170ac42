"""What a run says of itself in the log."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest
import torch

from ckpt_core import Checkpointer, ConfigError, Options
from ckpt_core.observe import Event, EventLog, EventName
from ckpt_core.observe.narrator import Narrator

STATE = {"weight": torch.zeros(1 << 18)}


def told(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == level]


def test_each_commit_is_a_line_and_so_is_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckpt_core")
    with Checkpointer(tmp_path, Options(blocking=True)) as ck:
        ck.save(10, STATE)
        ck.save(20, STATE)
    first, second, last = told(caplog)
    assert first.startswith("step 10 is saved: 1.0 MiB in ")
    assert second.startswith("step 20 is saved: ")
    assert f"in {tmp_path}; training waited " in second
    assert last.startswith(f"2 steps saved, the newest is 20, in {tmp_path}; 2.0 MiB in all; ")


def test_a_run_that_saves_nothing_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "ckpt_core")
    with Checkpointer(tmp_path):
        pass
    assert not told(caplog)


def test_a_restore_that_lasts_is_a_line_and_a_short_one_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckpt_core")
    log = EventLog()
    narrator = Narrator(tmp_path, log, rank=0, waited_s=lambda: 0.0)
    log.emit(Event(EventName.RESTORED, 1.0, 5, seconds=0.5))
    log.emit(Event(EventName.RESTORED, 2.0, 6, seconds=90.0))
    narrator.close()
    assert told(caplog) == [f"step 6 is restored from {tmp_path} in 90 s"]


def test_failures_are_counted_at_the_end_and_other_ranks_are_quiet(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "ckpt_core")
    for rank in (0, 1):
        log = EventLog()
        narrator = Narrator(tmp_path, log, rank=rank, waited_s=lambda: 0.25)
        log.emit(Event(EventName.COMMITTED, 1.0, 5, seconds=2.0, nbytes=4096))
        log.emit(Event(EventName.FAILED, 2.0, 6, detail="storage is full"))
        narrator.close()
        narrator.close()
    for level in (logging.INFO, logging.DEBUG):
        saved, end = told(caplog, level)
        assert saved.startswith("step 5 is saved: 4.0 KiB in 2 s, 2.0 KiB/s")
        assert saved.endswith("training waited 0.25 s")
        assert end.startswith("1 step saved, the newest is 5") and end.endswith("; 1 failed")


def test_an_empty_root_is_said_and_a_near_miss_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckpt_core")
    with Checkpointer(tmp_path / "run-llama") as ck:
        assert ck.restore(STATE) is None
        ck.save(7, STATE)
    assert told(caplog)[0] == f"{tmp_path / 'run-llama'} holds no step yet: nothing is restored"
    assert not told(caplog, logging.WARNING)
    with Checkpointer(tmp_path / "run-lama") as ck:
        assert ck.restore(STATE) is None
    (warning,) = told(caplog, logging.WARNING)
    assert f"There are steps in {tmp_path / 'run-llama'} (up to step 7)" in warning


def test_roots_inside_the_root_are_named_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path / "a") as ck:
        ck.save(7, STATE)
    with Checkpointer(tmp_path) as ck:
        assert ck.restore(STATE) is None
    (warning,) = told(caplog, logging.WARNING)
    assert f"{tmp_path / 'a'} (up to step 7)" in warning


def test_numbered_runs_are_no_slips_of_each_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path / "run-17") as ck:
        ck.save(7, STATE)
    with Checkpointer(tmp_path / "run-18") as ck:
        assert ck.restore(STATE) is None
    assert not told(caplog, logging.WARNING)


def test_asking_for_sigterm_that_nobody_watches_is_an_error(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ck, pytest.raises(ConfigError, match="on_sigterm='save'"):
        _ = ck.stop_requested


def test_what_people_print_says_something_in_a_line(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Options(in_flight=3, keep_last=None)) as ck:
        assert repr(ck.options) == "Options(in_flight=3, keep_last=None)"
        handle = ck.save(5, STATE)
        handle.committed.result()
        assert repr(handle) == f"<SaveHandle of step 5: committed in {tmp_path}/step-000000000005>"
        ck.wait()
        assert repr(ck) == f"<Checkpointer of {tmp_path}: 1 step, the newest is 5>"
        restored = ck.restore(STATE)
        assert "tensor" not in repr(restored) and "step=5" in repr(restored)
    assert repr(ck) == f"<Checkpointer of {tmp_path}: closed>"


def test_a_notebook_shows_them_as_tables_and_runs_nothing_of_what_they_hold(tmp_path: Path) -> None:
    root = tmp_path / "<img src=x onerror=alert(1)>"
    with Checkpointer(root, Options(in_flight=3)) as ck:
        handle = ck.save(5, STATE)
        handle.committed.result()
        restored = ck.restore(STATE)
        assert restored is not None
        shown = [one._repr_html_() for one in (ck, handle, restored, ck.options)]
    for text, said in zip(
        shown,
        ("the newest is 5", "committed in", "1.0 MiB", "<th>in_flight</th><td>3"),
        strict=True,
    ):
        assert text.startswith("<table>") and said in text
        assert "<img" not in text
    older = dataclasses.replace(restored, skipped=((7, "chunk 2 <b>"),))
    assert "<th>step 7 passed over</th><td>chunk 2 &lt;b&gt;</td>" in older._repr_html_()
