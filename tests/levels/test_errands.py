"""One process does errands one after the other, and nobody is left with it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.errors import ConfigError
from ckpt_core.levels import Away, errands
from ckpt_core.levels.errands import Errands
from tests.levels.restoring import fill
from tests.levels.trainers import until

WITHIN_S = 60.0


@pytest.fixture
def helper() -> Iterator[Errands]:
    found = Errands()
    yield found
    found.close()


@pytest.fixture
def asked(tmp_path: Path) -> dict[str, Any]:
    """Which steps a directory holds."""
    fill(tmp_path / "level", 10)
    return {"levels": [str(tmp_path / "level")], "timeout_s": WITHIN_S}


def pid(helper: Errands) -> int:
    (process,) = helper._idle
    return process.popen.pid


def lives(number: int) -> bool:
    return Path(f"/proc/{number}").exists()


def test_a_second_errand_is_done_by_the_process_of_the_first(
    helper: Errands, asked: dict[str, Any]
) -> None:
    first = helper.run("steps", asked, timeout_s=WITHIN_S)
    assert [step for step, _ in first[0]["steps"]] == [10]
    one = pid(helper)
    assert helper.run("steps", asked, timeout_s=WITHIN_S) == first
    assert pid(helper) == one
    helper.close()
    assert not lives(one)


def test_an_errand_that_fails_is_no_reason_for_another_process(
    helper: Errands, asked: dict[str, Any]
) -> None:
    helper.run("steps", asked, timeout_s=WITHIN_S)
    one = pid(helper)
    nowhere = {"levels": [{"url": "/dev/null/level"}], "run": None, "leads": False}
    with pytest.raises((ConfigError, Away)):
        helper.run("check", nowhere, timeout_s=WITHIN_S)
    assert helper.run("steps", asked, timeout_s=WITHIN_S)
    assert pid(helper) == one


def test_a_process_that_died_meanwhile_is_followed_by_another(
    helper: Errands, asked: dict[str, Any]
) -> None:
    helper.run("steps", asked, timeout_s=WITHIN_S)
    one = pid(helper)
    os.kill(one, signal.SIGKILL)
    os.waitid(os.P_PID, one, os.WEXITED | os.WNOWAIT)
    assert helper.run("steps", asked, timeout_s=WITHIN_S)
    assert not lives(one)


def test_a_process_that_hangs_is_given_up_and_ends(helper: Errands, asked: dict[str, Any]) -> None:
    helper.run("steps", asked, timeout_s=WITHIN_S)
    one = pid(helper)
    os.kill(one, signal.SIGSTOP)
    with pytest.raises(Away, match=r"nothing was heard of .steps. for 0\.2 s"):
        helper.run("steps", asked, timeout_s=0.2)
    assert not lives(one)
    assert helper.run("steps", asked, timeout_s=WITHIN_S)


def test_modules_of_where_the_program_is_at_work_stand_for_no_others(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secrets.py").write_text("API_KEY = 1\n")
    (tmp_path / "json.py").write_text("raise ImportError('not the one that was meant')\n")
    monkeypatch.chdir(tmp_path)
    helper = Errands()
    try:
        assert helper.run("steps", asked, timeout_s=WITHIN_S)
    finally:
        helper.close()


def test_why_a_process_died_is_told(helper: Errands) -> None:
    with pytest.raises(Away, match=r"the process for .none. died: (.|\n)*KeyError: 'none'"):
        helper.run("none", {}, timeout_s=WITHIN_S)


def test_a_process_that_dies_in_the_middle_of_a_word_is_not_waited_for(
    helper: Errands, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import sys; sys.stdin.readline(); sys.stdout.write('{\"do')"
    monkeypatch.setattr(errands, "child", lambda *_: ([sys.executable, "-c", program], {}))
    with pytest.raises(Away, match="the process for 'steps' died"):
        helper.run("steps", {}, timeout_s=WITHIN_S)


def test_an_interrupt_ends_the_wait_and_the_process(helper: Errands, asked: dict[str, Any]) -> None:
    helper.run("steps", asked, timeout_s=WITHIN_S)
    one = pid(helper)
    os.kill(one, signal.SIGSTOP)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        helper.run("steps", asked, timeout_s=WITHIN_S)
    timer.join()
    assert not lives(one)
    assert helper.run("steps", asked, timeout_s=WITHIN_S)


def test_a_process_with_nothing_to_do_is_ended_after_a_while(
    helper: Errands, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    helper.run("steps", asked, timeout_s=WITHIN_S)
    one = pid(helper)
    helper.look()
    assert lives(one)
    monkeypatch.setattr(errands, "KEPT_S", 0.0)
    helper.look()
    assert not lives(one)
    assert helper.run("steps", asked, timeout_s=WITHIN_S)


def test_a_process_ends_when_whoever_asked_is_gone(helper: Errands, asked: dict[str, Any]) -> None:
    helper.run("steps", asked, timeout_s=WITHIN_S)
    (process,) = helper._idle
    assert process.popen.stdin is not None
    process.popen.stdin.close()
    until(lambda: process.popen.poll() is not None, "the end of the process")
