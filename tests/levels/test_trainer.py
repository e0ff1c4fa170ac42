"""What a training loop has of its levels: futures, waits, events, gauges, retention that waits."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import (
    Auto,
    Checkpointer,
    CommitError,
    ConfigError,
    LastStep,
    Level,
    Options,
    PersistError,
    SaveHandle,
)
from ckpt_core.layout import Manifest
from ckpt_core.levels import LevelStatus, claiming, read_plan
from ckpt_core.levels.errands import Errands
from ckpt_core.levels.mailbox import is_copied
from ckpt_core.levels.trainer import following, joining, rhythm, tending
from ckpt_core.levels.trainer import levels as trainer
from ckpt_core.levels.trainer.joining import read_run, write_run
from ckpt_core.observe import EventName
from ckpt_core.save import Followed
from ckpt_core.store import committed_steps
from ckpt_core.system.files import Files
from ckpt_core.types import step_dir_name
from tests.crash.layers import hooked
from tests.crash.promises import QuickFiles
from tests.levels.trainers import SOON_S, Bench, agent_of, attempt_of, bench, end_agent, until

__all__ = ["bench"]


def save(ck: Checkpointer, step: int) -> SaveHandle:
    """Committed."""
    handle = ck.save(step, {"w": torch.full((100,), float(step))})
    handle.committed.result(SOON_S)
    return handle


def saves(bench: Bench, *steps: int) -> dict[int, str]:
    """These steps of the root, with their attempts."""
    return {step: attempt_of(bench.root, step) for step in steps}


def failure(handle: SaveHandle, level: int | str = 1) -> str:
    error = handle.reached(level).exception(SOON_S)
    assert isinstance(error, CommitError)
    return str(error)


# -- reached -----------------------------------------------------------------------------------------


def test_a_save_has_reached_a_level_when_the_agent_has_seen_this_very_save_there(
    bench: Bench,
) -> None:
    with bench.open() as ck:
        handle = save(ck, 1)
        future = handle.reached(1)
        bench.say(LevelStatus(bench.url))
        ck._engine.levels._tender.do(lambda: None)  # type: ignore[attr-defined]
        assert not future.done()
        bench.say(LevelStatus(bench.url, steps=saves(bench, 1), reached=saves(bench, 1)))
        assert future.result(SOON_S) is None
        assert handle.reached(bench.url + "/").result(SOON_S) is None


def test_what_the_agent_says_is_heard_when_it_says_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tending, "_LOOK_S", 1000.0)
    with bench.open() as ck:
        for step in (1, 2):
            handle = save(ck, step)
            future = handle.reached(1)
            bench.say(LevelStatus(bench.url, steps={step: attempt_of(bench.root, step)}))
            assert future.result(SOON_S) is None
            assert handle.reached(1).result(SOON_S) is None, "it is known, and nothing is to come"


def test_a_step_that_was_retired_there_since_has_reached_it(bench: Bench) -> None:
    with bench.open() as ck:
        first = save(ck, 1)
        was = saves(bench, 1)
        second = save(ck, 2)
        there = saves(bench, 2)
        bench.say(LevelStatus(bench.url, steps=there, reached=was | there))
        assert first.reached(1).result(SOON_S) is second.reached(1).result(SOON_S) is None


def test_another_save_of_a_step_is_not_taken_for_this_one(bench: Bench) -> None:
    with bench.open() as ck:
        save(ck, 1)
        old = attempt_of(bench.root, 1)
        again = save(ck, 1)
        future = again.reached(1)
        bench.say(LevelStatus(bench.url, steps={1: old}, reached={1: old}, skipped={1: old}))
        until(lambda: ck.gauges.levels()[0].newest == 1)
        assert not future.done()
        bench.say(LevelStatus(bench.url, steps=saves(bench, 1), reached=saves(bench, 1)))
        assert future.result(SOON_S) is None


def test_a_save_that_another_one_of_its_step_has_replaced_does_not_come_there(bench: Bench) -> None:
    with bench.open() as ck:
        first = save(ck, 1)
        early = first.reached(1)
        second = save(ck, 1)
        bench.say(LevelStatus(bench.url, steps=saves(bench, 1)))
        assert second.reached(1).result(SOON_S) is None
        assert "was replaced by another save of that step" in str(early.exception(SOON_S))
        assert "was replaced by another save of that step" in failure(first)


def test_a_step_that_is_passed_over_says_so(bench: Bench) -> None:
    with bench.open() as ck:
        handle = save(ck, 1)
        bench.say(LevelStatus(bench.url, skipped=saves(bench, 1), problem="the bucket is full"))
        assert "passed over, since the level lags behind (the bucket is full)" in failure(handle)


def test_a_step_that_the_level_does_not_take_says_so(bench: Bench) -> None:
    with bench.open(Level(bench.url, every=10)) as ck:
        assert "every=10" in failure(save(ck, 7))


def test_a_save_that_fails_fails_there_too(bench: Bench) -> None:
    with bench.open(on_error="warn") as ck:
        save_ = ck.begin(1, {"w": torch.zeros(3)})
        save_.stage(["w"])
        handle = save_.seal()
        handle.committed.result(SOON_S)
        for entry in bench.root.glob(".inflight/*"):
            entry.rmdir()
        (bench.root / ".inflight").rmdir()
        (bench.root / ".inflight").write_text("in the way")
        bad = ck.save(2, {"w": torch.zeros(3)})
        future = bad.reached(1)
        assert future.exception(SOON_S) is bad.committed.exception(SOON_S) is not None


def test_named_files_reach_a_level_like_steps(bench: Bench) -> None:
    with bench.open() as ck:
        files = ck.begin_files(5, "global_step5", pointer="latest")
        files.add("a.pt", {"w": torch.zeros(3)})
        handle = files.seal()
        path = handle.committed.result(SOON_S) / "manifest.json"
        mine = Manifest.decode(path.read_bytes(), path=path).attempt
        future = handle.reached(1)
        bench.say(LevelStatus(bench.url, files={"global_step5": "000000000005-00000000"}))
        bench.say(LevelStatus(bench.url, files={"global_step5": mine}))
        assert future.result(SOON_S) is None


def test_named_files_that_newer_ones_have_overtaken_are_passed_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "_GRACE_S", 0.0)
    with bench.open() as ck:
        files = ck.begin_files(5, "global_step5")
        files.add("a.pt", {"w": torch.zeros(3)})
        handle = files.seal()
        handle.committed.result(SOON_S)
        bench.say(LevelStatus(bench.url, files={"global_step6": "000000000006-00000000"}))
        assert "was passed over" in failure(handle)
        first, second = save(ck, 6), save(ck, 7)
        bench.say(LevelStatus(bench.url, steps=saves(bench, 7), reached=saves(bench, 7)))
        assert second.reached(1).result(SOON_S) is None
        assert "was passed over" in failure(first)


def test_a_level_that_is_none_is_refused_with_those_that_are(bench: Bench) -> None:
    with bench.open() as ck:
        handle = save(ck, 1)
        for level in (0, 2, True, "/elsewhere", "s3://bucket/run"):
            with pytest.raises(ConfigError, match=rf"no level .*1 \({bench.url}\)"):
                handle.reached(level)
            with pytest.raises(ConfigError, match="no level"):
                ck.wait(level=level)


def test_without_levels_asking_for_one_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root") as ck:
        with pytest.raises(ConfigError, match="has no levels"):
            save(ck, 1).reached(1)
        with pytest.raises(ConfigError, match="has no levels"):
            ck.wait(level=1)


def test_who_waits_when_the_checkpointer_is_closed_is_told_so(bench: Bench) -> None:
    with bench.open() as ck:
        handle = save(ck, 1)
        future = handle.reached(1)
    error = future.exception(SOON_S)
    assert isinstance(error, CommitError) and "the agent goes on" in str(error)
    assert "the agent goes on" in failure(handle)


def test_what_had_come_there_by_the_close_is_known_after_it(bench: Bench) -> None:
    with bench.open() as ck:
        handle = save(ck, 1)
        bench.say(LevelStatus(bench.url, steps=saves(bench, 1), reached=saves(bench, 1)))
    assert handle.reached(1).result(SOON_S) is None


# -- wait --------------------------------------------------------------------------------------------


def test_waiting_for_a_level_waits_for_what_is_due_there(bench: Bench) -> None:
    with bench.open(Level(bench.url, every=2)) as ck:
        save(ck, 2)
        due = attempt_of(bench.root, 2)
        save(ck, 3)
        threading.Timer(
            0.5, lambda: bench.say(LevelStatus(bench.url, steps={2: due}, reached={2: due}))
        ).start()
        ck.wait(level=1)
        assert ck.gauges.levels()[0].newest == 2
        ck.wait(level=bench.url)


def test_waiting_for_a_level_ends_by_the_timeout_and_says_why(bench: Bench) -> None:
    with bench.open(timeout=5.0) as ck:
        save(ck, 2)
        bench.say(LevelStatus(bench.url, problem="no route to host"))
        with pytest.raises(CommitError, match="has not got step 2: no route to host"):
            ck.wait(level=1)


def test_a_level_that_waits_for_somebody_is_not_waited_for(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with bench.open(timeout=600.0) as ck:
        save(ck, 2)
        bench.say(LevelStatus(bench.url, problem="no such bucket. Make it.", hopeless=True))
        with pytest.raises(CommitError, match=r"no such bucket\. Make it\. All of it is safe"):
            ck.wait(level=1)
    assert "does not go on (no such bucket. Make it), until somebody" in caplog.text


def test_a_step_that_never_goes_there_is_not_waited_for(bench: Bench) -> None:
    with bench.open(timeout=600.0) as ck:
        save(ck, 2)
        bench.say(LevelStatus(bench.url, skipped=saves(bench, 2), problem="step 2 is damaged"))
        with pytest.raises(
            CommitError, match=r"steps \[2\] were passed over .*: step 2 is damaged"
        ):
            ck.wait(level=1)


def test_a_last_step_that_does_not_come_is_told(bench: Bench) -> None:
    with bench.open(Level(bench.url, every=10), timeout=5.0) as ck:
        save(ck, 2)
        ck.wait(level=1)
        with pytest.raises(CommitError, match="has not got step 2 within `timeout`"):
            ck.wait(level=1, last=True)
        bench.say(LevelStatus(bench.url, skipped=saves(bench, 2), problem="step 2 is damaged"))
        with pytest.raises(CommitError, match="step 2 is damaged"):
            ck.wait(level=1, last=True)
        with pytest.raises(ConfigError, match="say at which level"):
            ck.wait(last=True)


OLD = "000000000030-0000000a"


def test_a_last_step_below_newer_ones_at_the_level_is_told_at_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with bench.open(timeout=600.0) as ck:
        handle = save(ck, 15)
        bench.say(LevelStatus(bench.url, steps={30: OLD}, skipped=saves(bench, 15)))
        assert "passed over: step 30 is there, of before training went back" in failure(handle)
        ck.wait(level=1)
        with pytest.raises(CommitError, match=r"step 30 is in .*far, .*ckpt-core rm .* --after 15"):
            ck.wait(level=1, last=True)
        save(ck, 16)
        until(lambda: "step 15 is saved while the level" in caplog.text)
        bench.say(LevelStatus(bench.url, steps={}))
        bench.say(LevelStatus(bench.url, steps={30: OLD}))
        ck._engine.levels._tender.do(lambda: None)  # type: ignore[attr-defined]
    assert caplog.text.count("a restart resumes from step 30") == 1


@pytest.mark.parametrize("every", [1, 100])
def test_the_last_step_is_what_was_saved_last_and_not_the_highest_number(
    bench: Bench, every: int, caplog: pytest.LogCaptureFixture
) -> None:
    with bench.open(Level(bench.url, every=every), timeout=600.0) as ck:
        save(ck, 30)
        save(ck, 15)
        bench.say(LevelStatus(bench.url, steps=saves(bench, 30) if every == 1 else {}))
        place = bench.url if every == 1 else bench.root
        with pytest.raises(CommitError, match=rf"step 15 was saved last.*: step 30 is in {place}"):
            ck.wait(level=1, last=True)
    assert "holds step 30" in caplog.text and "while the level" not in caplog.text


def test_a_last_step_that_has_replaced_one_below_newer_ones_is_there(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    with bench.open(timeout=600.0) as ck:
        save(ck, 15)
        bench.say(LevelStatus(bench.url, steps={15: "000000000015-0000000a", 30: OLD}))
        there = saves(bench, 15) | {30: OLD}
        threading.Timer(0.5, lambda: bench.say(LevelStatus(bench.url, steps=there))).start()
        ck.wait(level=1, last=True)
        assert ck._engine.levels._following.seen[0].steps == there  # type: ignore[attr-defined]
        until(lambda: "a restart resumes from step 30" in caplog.text)


def test_a_save_that_fails_is_not_what_was_saved_last(bench: Bench) -> None:
    with bench.open(timeout=600.0, on_error="warn") as ck:
        save(ck, 15)
        (bench.root / ".inflight").rmdir()
        (bench.root / ".inflight").write_text("in the way")
        assert ck.save(16, {"w": torch.zeros(3)}).committed.exception(SOON_S)
        bench.say(LevelStatus(bench.url, steps=saves(bench, 15)))
        ck.wait(level=1, last=True)


def test_a_directory_that_is_passed_over_is_not_waited_for(bench: Bench) -> None:
    with bench.open(timeout=600.0) as ck:
        files = ck.begin_files(5, "global_step5")
        files.add("a.pt", {"w": torch.zeros(3)})
        handle = files.seal()
        path = handle.committed.result(SOON_S) / "manifest.json"
        mine = Manifest.decode(path.read_bytes(), path=path).attempt
        newer = {"global_step6": "000000000006-00000000"}
        bench.say(LevelStatus(bench.url, files=newer, files_skipped={"global_step5": mine}))
        assert "was passed over: newer ones are there" in failure(handle)
        with pytest.raises(CommitError, match=r"global_step5 was saved last.*global_step6 is in"):
            ck.wait(level=1, last=True)


# -- retention ---------------------------------------------------------------------------------------


def test_steps_that_the_level_still_wants_stay(bench: Bench) -> None:
    with bench.open(Level(bench.url, every=2, backlog=2)) as ck:
        for step in range(1, 8):
            save(ck, step)
        # Two that are wanted, and the newest.
        assert ck.steps() == (4, 6, 7)
        bench.say(LevelStatus(bench.url, steps=saves(bench, 4), reached=saves(bench, 4), sending=6))
        until(lambda: ck.gauges.levels()[0].newest == 4)
        save(ck, 8)
        assert ck.steps() == (6, 8)
        there = saves(bench, 6, 8)
        bench.say(LevelStatus(bench.url, steps=there, reached=there))
        until(lambda: ck.gauges.levels()[0].newest == 8)
        save(ck, 9)
        assert ck.steps() == (9,)


def test_the_step_on_its_way_stays_although_newer_ones_are_wanted(bench: Bench) -> None:
    with bench.open() as ck:
        save(ck, 1)
        bench.say(LevelStatus(bench.url, sending=1))
        until(lambda: ck.gauges.levels()[0].sending == 1)
        for step in (2, 3, 4):
            save(ck, step)
        assert ck.steps() == (1, 4)


def test_a_step_that_a_directory_before_it_holds_is_not_kept_for_a_level(
    bench: Bench, tmp_path: Path
) -> None:
    second = str(tmp_path / "second")
    with bench.open(Level(bench.url, every=2), Level(second, every=4)) as ck:
        for step in range(1, 6):
            save(ck, step)
        assert ck.steps() == (4, 5)
        near = LevelStatus(bench.url, steps=saves(bench, 4), reached=saves(bench, 4))
        bench.say(near, LevelStatus(second))
        until(lambda: ck.gauges.levels()[0].newest == 4)
        save(ck, 7)
        assert ck.steps() == (7,)


# -- what is told ------------------------------------------------------------------------------------


def test_events_and_gauges_tell_of_each_level(bench: Bench, caplog: Any) -> None:
    with bench.open() as ck:
        (gauge,) = ck.gauges.levels()
        assert (gauge.url, gauge.newest, gauge.lag_steps) == (bench.url, None, None)
        save(ck, 1)
        first = attempt_of(bench.root, 1)
        save(ck, 4)
        bench.say(
            LevelStatus(
                bench.url, steps={1: first}, reached={1: first}, skipped={3: "x"}, problem="full"
            )
        )
        until(lambda: ck.gauges.levels()[0].problem == "full")
        assert ck.gauges.levels()[0].lag_steps == 3
        bench.say(LevelStatus(bench.url, steps={1: first}, reached={1: first}, skipped={3: "x"}))
        until(lambda: ck.gauges.levels()[0].problem == "")
        told = [
            (event.name, event.step, event.detail)
            for event in ck.events.events()
            if event.name.startswith("level")
        ]
        assert told == [
            (EventName.LEVEL_REACHED, 1, bench.url),
            (EventName.LEVEL_PASSED_OVER, 3, bench.url),
            (EventName.LEVEL_PROBLEM, None, f"{bench.url}: full"),
            (EventName.LEVEL_PROBLEM, None, bench.url),
        ]
        ck.events.write_timeline(bench.root.parent / "trace.json")
    lines = [record.getMessage() for record in caplog.records if bench.url in record.getMessage()]
    assert [("does not go on (full)" in line, "goes on again" in line) for line in lines[-2:]] == [
        (True, False),
        (False, True),
    ]


def test_that_nothing_is_kept_for_other_nodes_is_told_once_until_it_is_again(
    bench: Bench, caplog: Any
) -> None:
    def said() -> list[str]:
        lines = [record.getMessage() for record in caplog.records]
        return [line for line in lines if "steps for others" in line]

    with bench.open():
        level = LevelStatus(bench.url)
        bench.say(level, refused="the port is taken")
        until(lambda: len(said()) == 1)
        bench.say(level)
        bench.say(level, refused="the token is gone")
        bench.say(level, serving="10.0.0.1:7000")
        until(lambda: len(said()) == 2)
    assert "keeps no steps for others (the port is taken)" in said()[0]
    assert "again, at 10.0.0.1:7000" in said()[1]


def test_steps_of_an_earlier_run_are_no_news(bench: Bench) -> None:
    with bench.open() as ck:
        save(ck, 5)
    with bench.open() as ck:
        bench.say(LevelStatus(bench.url, steps=saves(bench, 5), reached={4: "x"} | saves(bench, 5)))
        until(lambda: ck.gauges.levels()[0].newest == 5)
        assert not [event for event in ck.events.events() if event.name.startswith("level")]


def test_an_every_that_no_step_meets_is_said_once(bench: Bench, caplog: Any) -> None:
    with bench.open(Level(bench.url, every=100), keep_last=2) as ck:
        for step in range(50, 850, 100):
            save(ck, step)
        until(lambda: "no step goes to the level" in caplog.text)
    assert caplog.text.count("no step goes to the level") == 1


def test_an_every_that_auto_hardly_meets_is_said_when_it_sees_the_checkpointer(
    bench: Bench, caplog: Any
) -> None:
    with bench.open(Level(bench.url, every=100)) as ck:
        (Auto() | LastStep(900)).watch(ck)
        assert f"every=100 lets multiples of 100 alone go to the level {bench.url}" in caplog.text


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (range(30, 300, 30), False),
        (range(1, 99), False),
        (range(50, 1000, 100), True),
        (range(937, 12_000, 937), True),
        ((50, 150), False),
        ((50, 150, 200), False),
    ],
)
def test_which_steps_never_meet_every_100(steps: Any, said: bool, caplog: Any) -> None:
    looking = rhythm.Rhythm([Level("/far", every=100)], Path("/root"))
    for step in steps:
        done: Future[Path] = Future()
        done.set_result(Path())
        looking.follow(Followed(step, "", done))
        looking.look(())
    assert ("no step goes" in caplog.text) is said
    found = re.search(r"Give the level every=(\d+), .* save at multiples of 100", caplog.text)
    assert (found is not None) is said
    if found is not None:
        assert all(step % int(found[1]) == 0 for step in steps) and int(found[1]) in (50, 937)


def test_newer_steps_at_a_level_are_compared_with_the_root_once_for_each_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listings = []

    def list_root(root: Path) -> tuple[int, ...]:
        listings.append(root)
        return committed_steps(root)

    monkeypatch.setattr(rhythm, "committed_steps", list_root)
    looking = rhythm.Rhythm([Level("/far")], tmp_path)
    (tmp_path / step_dir_name(300)).mkdir()
    (tmp_path / step_dir_name(300) / "manifest.json").touch()
    seen = [LevelStatus("/far", steps={300: "newest"})]
    for count, step in enumerate((101, 102), 1):
        done: Future[Path] = Future()
        done.set_result(tmp_path)
        looking.follow(Followed(step, "", done))
        for _ in range(5):
            looking.look(seen)
        assert len(listings) == count
    seen[0].steps[301] = "newer"
    looking.look(seen)
    assert len(listings) == 3


# -- the agent beside it -----------------------------------------------------------------------------


def test_the_id_of_a_run_that_a_kill_cut_off_leaves_nothing_behind_the_next_one(
    tmp_path: Path,
) -> None:
    class Killed(BaseException):
        pass

    class Killing(QuickFiles):
        def rename(self, source: Path, target: Path) -> None:
            raise Killed

    for _ in range(2):
        with pytest.raises(Killed):
            write_run(tmp_path, "one", files=Killing())
    write_run(tmp_path, "one", files=QuickFiles())
    assert os.listdir(tmp_path / ".levels") == ["run"]


def test_a_root_knows_whether_it_is_a_copy(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_copied(bench.root), "it has no plan yet"
    bench.open().close()
    end_agent(bench.root)
    copy, linked, moved = (bench.root.with_name(name) for name in ("copy", "linked", "moved"))
    shutil.copytree(bench.root, copy)
    assert is_copied(copy) and not is_copied(bench.root)
    bench.root.rename(moved)
    assert not is_copied(moved), "it has another name, and is the same"
    shutil.copytree(moved, linked, copy_function=os.link)
    assert is_copied(linked)
    moved.rename(bench.root)
    file = bench.root / ".levels/run"
    file.chmod(0o600)
    assert file.stat().st_nlink == 2
    assert not is_copied(bench.root), "a backup by links, or a mount, has touched it"
    bench.root.rename(moved)
    copy.rename(bench.root)
    assert is_copied(bench.root)
    monkeypatch.setattr(Files, "is_local", lambda self, path: False)
    assert not is_copied(bench.root), "it may be the same, numbered anew"
    plan = bench.root / ".levels/plan.json"
    of_before = {
        name: value for name, value in json.loads(plan.read_text()).items() if name != "place"
    }
    plan.write_text(json.dumps(of_before))
    monkeypatch.undo()
    assert not is_copied(bench.root), "a release of before has told nothing of it"


def test_a_root_whose_agent_is_at_work_is_no_copy_though_its_files_were_touched(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claiming, "WATCH_S", 0.0)
    asked = []
    claim = joining.errand("claim")
    monkeypatch.setattr(
        joining,
        "errand",
        lambda _: lambda request, tell: asked.append(request) or claim(request, tell),
    )
    with bench.open():
        until(lambda: agent_of(bench.root) is not None, "the agent")
        file = bench.root / ".levels/run"
        file.touch()
        assert is_copied(bench.root)
        joining.claim_here(bench.root, [Level(bench.url)], Errands())
    end_agent(bench.root)
    file.touch()
    joining.claim_here(bench.root, [Level(bench.url)], Errands())
    assert [request["copied"] for request in asked] == [False, False, True]


def test_an_agent_that_is_killed_is_started_again_with_one_warning(
    bench: Bench, caplog: Any
) -> None:
    with bench.open():
        for _ in range(2):
            pid = until(lambda: agent_of(bench.root), "an agent")
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: agent_of(bench.root) not in (None, pid), "another agent")
    said = [one for one in caplog.records if "is started anew" in one.getMessage()]
    assert len(said) == 1 and "status -9" in said[0].getMessage()


def test_closing_says_so_in_the_plan_and_leaves_the_agent_alone(bench: Bench) -> None:
    with bench.open():
        plan = read_plan(bench.root)
        assert plan is not None and not plan.closed and plan.sweeps
        assert [level.url for level in plan.levels] == [bench.url]
        until(lambda: agent_of(bench.root), "an agent")
    closed = read_plan(bench.root)
    assert closed is not None and closed.closed
    assert (closed.run, closed.session, closed.token) == (plan.run, plan.session, plan.token)
    assert bench.run == plan.run
    # This one ends when no trainer has the root: it was not ended.
    until(lambda: agent_of(bench.root) is None, "its end")


def test_the_next_trainer_keeps_the_run_and_has_a_newer_session(bench: Bench) -> None:
    plans = []
    for _ in range(3):
        with bench.open():
            plans.append(read_plan(bench.root))
    assert len({plan.run for plan in plans if plan}) == 1
    sessions = [plan.session for plan in plans if plan]
    assert sessions == sorted(set(sessions))


def test_another_checkpointer_that_goes_on_with_the_run_is_told_of_once(
    bench: Bench, caplog: Any
) -> None:
    with bench.open() as ck:
        handle = save(ck, 1)
        bench.say(ended="fenced")
        assert "another Checkpointer" in failure(handle)
        with pytest.raises(CommitError, match="another Checkpointer"):
            ck.wait(level=1)
        assert "another Checkpointer" in ck.gauges.levels()[0].problem
        save(ck, 2)
    assert caplog.text.count("another Checkpointer goes on with this run, so that") == 1


def test_an_agent_that_says_nothing_any_more_is_told_of_once(
    bench: Bench, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench.open() as ck:
        bench.say()
        until(lambda: ck._engine.levels._following.seen[0])  # type: ignore[attr-defined]
        monkeypatch.setattr(trainer, "_SILENT_S", 0.5)
        until(lambda: "has said nothing for" in ck.gauges.levels()[0].problem)
        monkeypatch.setattr(trainer, "_SILENT_S", 60.0)
        until(lambda: ck.gauges.levels()[0].problem == "")
    assert caplog.text.count("has said nothing for") == 1


RUN_STEPS = ("mkdir", "sync_dir", "write_new", "rename", "sync_dir")


@pytest.mark.parametrize("number", range(len(RUN_STEPS)))
def test_the_id_of_the_run_is_kept_whole_or_not_at_all_whatever_fails(
    tmp_path: Path, number: int
) -> None:
    done: list[str] = []

    def fail(name: str, args: Any, act: Any) -> Any:
        done.append(name)
        if len(done) > number:
            raise OSError(28, "No space left on device", "disk")
        return act()

    run = "ab" * 16
    with pytest.raises(PersistError, match="No space left"):
        write_run(tmp_path, run, files=hooked(QuickFiles, fail, RUN_STEPS))
    assert tuple(done) == RUN_STEPS[: number + 1]
    assert read_run(tmp_path) == (run if number == 4 else None)
    write_run(tmp_path, run, files=QuickFiles())
    assert read_run(tmp_path) == run


def test_no_thread_no_file_and_no_import_without_levels(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = f"""
import sys, threading
from ckpt_core import Checkpointer
with Checkpointer({str(tmp_path / "root")!r}) as ck:
    ck.save(1, {{"step": 1}}).committed.result()
    print([one.name for one in threading.enumerate() if "level" in one.name],
          [name for name in sys.modules if name.startswith("ckpt_core.levels")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[] []\n", done.stderr
    assert not (tmp_path / "root" / ".levels").exists()


# -- what is wrong is said when it is made -------------------------------------------------------------


@pytest.mark.parametrize("inside", ["", "inner", ".."])
def test_a_level_in_the_root_or_around_it_is_refused(tmp_path: Path, inside: str) -> None:
    root = tmp_path / "a" / "root"
    with pytest.raises(ConfigError, match=r"the root .* inside it or above it"):
        Checkpointer(root, levels=[os.path.join(root, inside)])
    assert not root.exists()


def test_a_level_in_an_earlier_level_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the level .* inside it or above it"):
        Checkpointer(tmp_path / "root", levels=["s3://bucket/run", "s3://bucket/run/more"])
    (tmp_path / "link").symlink_to(tmp_path / "far")
    with pytest.raises(ConfigError, match=r"the level .* inside it or above it"):
        Checkpointer(tmp_path / "root", levels=[tmp_path / "far", tmp_path / "link" / "more"])


def test_a_root_that_is_a_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the first level is a directory"):
        Checkpointer("s3://bucket/run")


def test_levels_that_are_given_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="given twice"):
        Checkpointer(tmp_path / "root", Options(levels=["/far"]), levels=["/far"])


def test_a_level_on_the_same_filesystem_is_pointed_out(bench: Bench, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING), bench.open():
        pass
    assert caplog.text.count("is on the same filesystem") == 1
    assert "Give it a directory on another disk" in caplog.text


def test_levels_of_the_environment_and_the_file_of_events(bench: Bench, tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    environ = {"CKPT_CORE_LEVELS": f'[{{"url": "{bench.url}", "every": 3}}]'}
    with Checkpointer(bench.root, Options.from_env(environ, events_file=events)) as ck:
        assert ck.options.levels == (Level(bench.url, every=3),)
        assert not committed_steps(bench.root)
    assert '"every": 3' in events.read_text()
