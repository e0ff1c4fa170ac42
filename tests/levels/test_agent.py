"""The agent: what is committed comes to every level, whole, and it ends when nothing is left to do."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckpt_core.levels import LEVELS, read_status, write_plan
from ckpt_core.levels.agent.board import Board, Timing
from ckpt_core.levels.agent.copying import How, send
from ckpt_core.levels.agent.pace import Stopped
from ckpt_core.levels.agent.source import OpenSave
from ckpt_core.levels.agent.trouble import Trouble
from ckpt_core.levels.claiming import claim_word
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.levels.far.door import Away
from ckpt_core.levels.mailbox import PROTOCOL, note_claim
from ckpt_core.options import Level
from ckpt_core.store import step_path
from ckpt_core.system.files import Files
from tests.faults.mounts import bound, mounted, remount
from tests.levels.agents import Agents, log_of, plan_of, until
from tests.levels.making import CHUNK_BYTES, look, make_store, read_step, save

SHARD = "shard-00000-0.safetensors"


def level(path: Path, **options: object) -> Level:
    return Level(str(path), **{"keep_last": None, "backlog": 100, **options})  # type: ignore[arg-type]


def word(place: Path, name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads((place / LEVELS / name).read_text())
    return found


def hold(root: Path) -> subprocess.Popen[bytes]:
    """A process that trains: it has the root's lock until it is killed."""
    text = (
        "import sys, time; from pathlib import Path; from ckpt_core.store import RootLock\n"
        "lock = RootLock(Path(sys.argv[1])); lock.acquire(); print('held', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", text, str(root)],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    return process


def test_what_is_committed_comes_to_every_level_and_then_the_agent_ends(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    store = make_store(root)
    save(store, 1)
    process = agents.start(root, plan_of(level(near, every=1), level(far, every=4)))
    until(lambda: set(look(near)) == {1})
    for step in (2, 3, 4, 5, 6):
        save(store, step)
    until(lambda: set(look(near)) == {1, 2, 3, 4, 5, 6} and set(look(far)) == {4})
    assert process.poll() is None, "somebody trains"
    store.close()
    status = agents.ended(process, root)
    assert set(look(far)) == {4, 6}, "the last step goes everywhere"
    assert status.ended == "up to date"
    assert [*status.levels[0].reached] == [1, 2, 3, 4, 5, 6] and [*status.levels[1].reached] == [
        4,
        6,
    ]
    assert set(status.levels[1].steps) == {4, 6} and status.levels[1].problem == ""
    assert status.levels[1].bytes_all > 2 * 5 * CHUNK_BYTES
    assert not list((near / ".inflight").iterdir())


def test_a_step_is_taken_on_and_told_of_when_it_is_committed_and_not_by_looking_around(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    store = make_store(root)
    save(store, 1)
    # Whoever waited for the next look would wait for longer than this test does.
    agents.start(root, plan_of(level(near), level(far)), poll_s=1000.0)
    for step in (2, 3):
        until(lambda step=step: _told(root) == [[*range(1, step)]] * 2)
        save(store, step)
    until(lambda: _told(root) == [[1, 2, 3]] * 2)
    store.close()


def _told(root: Path) -> list[list[int]]:
    status = read_status(root)
    return [] if status is None else [[*one.reached] for one in status.levels]


def test_a_trainer_that_is_killed_has_its_newest_step_taken_to_every_level(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    store = make_store(root)
    save(store, 7)
    store.close()
    trainer = hold(root)
    far = tmp_path / "far"
    process = agents.start(root, plan_of(level(far, every=100)))
    until(lambda: read_status(root) is not None)
    time.sleep(0.2)
    assert look(far) == {}
    trainer.kill()
    trainer.communicate()
    assert agents.ended(process, root).ended == "up to date"
    assert look(far) == {7: 0}


def test_of_two_agents_of_a_root_one_works(root: Path, tmp_path: Path, agents: Agents) -> None:
    store = make_store(root)
    save(store, 1)
    first = agents.start(root, plan_of(level(tmp_path / "far")))
    until(lambda: look(tmp_path / "far"))
    second = agents.start(root)
    assert second.wait(60) == 0
    status = read_status(root)
    assert status is not None and status.pid == first.pid and first.poll() is None
    store.close()
    assert agents.ended(first, root).pid == first.pid


def test_a_root_without_a_plan_is_told(root: Path, agents: Agents) -> None:
    root.mkdir()
    process = agents.start(root)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and b"no plan of levels" in errors


@pytest.mark.parametrize("session", [5, 6])
def test_an_agent_publishes_and_retires_nothing_where_a_later_session_is(
    session: int, root: Path, tmp_path: Path, agents: Agents
) -> None:
    far = tmp_path / "far"
    store = make_store(root)
    for step in (1, 2):
        save(store, step)
    store.close()
    agents.run(root, plan_of(level(far)))
    store = make_store(root)
    save(store, 3)
    run = json.dumps({"run": "ab" * 8, "session": session, "host": "other", "pid": 1}).encode()
    words = DirectoryFar(far, files=Files())
    claimed = words.read_word("run.json")
    assert claimed is not None
    words.write_word("run.json", run, over=claimed.tag)
    process = agents.start(root, plan_of(level(far, keep_last=1), session=5))
    if session == 6:
        status = agents.ended(process, root)
        assert status.ended == "fenced" and "session 6" in status.levels[0].problem
        assert set(look(far)) == {1, 2}
    else:
        until(lambda: set(look(far)) == {3})
    store.close()


@pytest.mark.parametrize("is_copy", [False, True])
def test_a_start_that_was_cut_off_behind_its_claim_keeps_no_step_from_the_level(
    is_copy: bool, root: Path, tmp_path: Path, agents: Agents
) -> None:
    store, far = make_store(root), tmp_path / "far"
    save(store, 3)
    store.close()
    write_plan(root, plan_of(level(far)))
    note_claim(root, "of the next start")
    if is_copy:  # then it was the other root's start
        place = {"path": "/elsewhere", "file": [1, 2], "touched": 3}
        (root / LEVELS / "plan.json").write_text(
            json.dumps({**word(root, "plan.json"), "place": place})
        )
    claim = claim_word("ab" * 8, 2, host="here", pid=1, token="of the next start")
    DirectoryFar(far, files=Files()).write_word("run.json", claim, over=None)
    status = agents.run(root)
    assert status.ended == ("fenced" if is_copy else "up to date")
    assert set(look(far)) == (set() if is_copy else {3})
    assert word(far, "run.json")["session"] == 2


def test_a_level_of_another_run_is_left_alone(root: Path, tmp_path: Path, agents: Agents) -> None:
    far = tmp_path / "far"
    store = make_store(root)
    save(store, 3)
    run = json.dumps({"run": "cd" * 8, "session": 1}).encode()
    DirectoryFar(far, files=Files()).write_word("run.json", run, over=None)
    agents.start(root, plan_of(level(far)))
    status = until(lambda: (found := read_status(root)) and found.levels[0].problem and found)
    assert "another run" in status.levels[0].problem and status.levels[0].hopeless
    assert look(far) == {}
    store.close()


def test_a_damaged_step_that_is_saved_anew_is_sent_and_no_problem_any_more(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    far = tmp_path / "far"
    store = make_store(root)
    save(store, 2)
    shard = step_path(root, 2) / SHARD
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    agents.start(root, plan_of(level(far)))
    until(lambda: (found := read_status(root)) and found.levels[0].problem)
    save(store, 2, attempt="000000000002-0badcafe")
    until(lambda: DirectoryFar(far, files=Files()).steps() == {2: "000000000002-0badcafe"})
    until(lambda: (found := read_status(root)) and not found.levels[0].problem)
    store.close()


def test_a_damaged_step_is_never_sent_on_and_the_newer_one_is(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    far = tmp_path / "far"
    store = make_store(root)
    for step in (1, 2):
        save(store, step)
    shard = step_path(root, 2) / SHARD
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    process = agents.start(root, plan_of(level(far, backlog=1)))
    status = until(lambda: (found := read_status(root)) and found.levels[0].problem and found)
    assert "step 2 is damaged" in status.levels[0].problem and [*status.levels[0].skipped] == [2]
    until(lambda: set(look(far)) == {1})
    save(store, 3)
    until(lambda: set(look(far)) == {1, 3})
    store.close()
    status = agents.ended(process, root)
    assert status.ended == "up to date" and status.levels[0].problem == ""
    assert set(look(far)) == {1, 3}
    assert "step 2 is damaged" in log_of(root)


def test_a_damaged_step_is_taken_from_the_next_level_that_has_it(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    store = make_store(root)
    save(store, 1)
    store.close()
    agents.run(root, plan_of(level(near)))
    shard = step_path(root, 1) / SHARD
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    agents.run(root, plan_of(level(near), level(far)))
    assert read_step(far, 1) == 0


def test_what_only_an_earlier_level_holds_takes_no_later_saves_place_behind_it(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    # `near` was left out while training had gone back to 1; 5 is the one that a clock set back calls later.
    fill(near, {1: 1, 2: 2, 3: 3, 4: 14, 5: 25, 6: 6})
    fill(far, {1: 1, 2: 12, 3: 13, 4: 4, 5: 15})
    store = make_store(root)
    save(store, 3, mark=3)
    save(store, 5, mark=1)
    store.close()
    status = agents.run(root, plan_of(level(near), level(far)))
    assert look(near) == {1: 1, 2: 2, 3: 3, 4: 14, 5: 1, 6: 6}
    assert look(far) == {1: 1, 2: 12, 3: 3, 4: 14, 5: 1, 6: 6}, (
        "the root's own always, else later ones"
    )
    assert [*status.levels[1].skipped] == [2]


def test_of_several_levels_before_one_the_later_save_goes_on(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    near, next_, far = tmp_path / "near", tmp_path / "next", tmp_path / "far"
    fill(near, {1: 1, 2: 2, 3: 30})
    fill(next_, {1: 1, 2: 12, 3: 13})
    store = make_store(root)
    save(store, 4, mark=14)
    store.close()
    agents.run(root, plan_of(level(near), level(next_), level(far)))
    assert look(far) == {1: 1, 2: 12, 3: 30, 4: 14}


def test_a_level_does_not_hold_what_the_one_behind_it_does_not_take(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    fill(near, {1: 1, 2: 2, 3: 3})
    fill(far, {1: 11, 2: 12, 3: 13})
    store = make_store(root)
    save(store, 4, mark=14)
    save(store, 5, mark=15)
    store.close()
    agents.run(root, plan_of(level(near, keep_last=2), level(far)))
    assert look(near) == {4: 14, 5: 15}
    assert look(far) == {1: 11, 2: 12, 3: 13, 4: 14, 5: 15}


def fill(place: Path, marks: dict[int, int]) -> None:
    """Steps of a level, one attempt for each mark, which is also when it was saved."""
    store = make_store(place)
    for step, mark in marks.items():
        save(store, step, mark=mark, attempt=f"{step:012d}-{mark:08x}")
    store.close()


def test_a_level_keeps_what_it_is_told_to_and_what_the_next_one_has_not(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    far.write_text("in the way")
    store = make_store(root)
    levels = [level(near, keep_last=2, keep_every=4), level(far, every=3, backlog=1)]
    process = agents.start(root, plan_of(*levels))
    for step in range(1, 10):
        save(store, step)
        until(lambda step=step: step in look(near))
        if step == 5:
            DirectoryFar(near, files=Files()).pin(5, True)
        if step == 6:
            store.pin(6)
    # Of the steps that the far one wants, the newest `backlog`.
    until(lambda: set(look(near)) == {4, 5, 6, 8, 9})
    save(store, 10)
    save(store, 11)
    until(lambda: set(look(near)) == {4, 5, 6, 8, 9, 10, 11})
    far.unlink()
    until(lambda: set(look(far)) == {9})
    until(lambda: set(look(near)) == {4, 5, 6, 8, 10, 11})
    store.close()
    agents.ended(process, root)
    assert set(look(near)) == {4, 5, 6, 8, 10, 11} and set(look(far)) == {9, 11}


def test_what_is_behind_more_than_the_backlog_is_passed_over_and_said(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    store = make_store(root)
    for step in (1, 2, 3, 4):
        save(store, step)
    store.close()
    status = agents.run(root, plan_of(level(tmp_path / "far", backlog=2)))
    assert set(look(tmp_path / "far")) == {3, 4}
    assert [*status.levels[0].skipped] == [1, 2] and [*status.levels[0].reached] == [3, 4]
    assert "step 2 was passed over" in log_of(root)


def test_what_an_earlier_agent_has_said_is_remembered(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    plan = plan_of(level(tmp_path / "far", keep_last=1))
    for step in (1, 2):
        store = make_store(root)
        save(store, step)
        store.close()
        status = agents.run(root, plan)
    assert [*status.levels[0].reached] == [1, 2] and status.levels[0].skipped == {}
    assert set(look(tmp_path / "far")) == {2}


def test_sigterm_ends_it_in_seconds_and_the_next_one_goes_on(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    store = make_store(root)
    save(store, 1, nbytes=1000 * CHUNK_BYTES)
    slow = level(tmp_path / "far", bandwidth=200_000)
    process = agents.start(root, plan_of(slow))
    until(lambda: (found := read_status(root)) and found.levels[0].sent_bytes)
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert agents.ended(process, root).ended == "stopped"
    assert time.monotonic() - begun < 60 and look(tmp_path / "far") == {}
    process = agents.start(root, plan_of(level(tmp_path / "far")))
    until(lambda: look(tmp_path / "far") == {1: 0})
    store.close()
    agents.ended(process, root)


def test_a_new_plan_is_followed_without_a_restart(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    one, two, three = (level(tmp_path / name) for name in ("one", "two", "three"))
    store = make_store(root)
    save(store, 1)
    process = agents.start(root, plan_of(one, two))
    until(lambda: look(tmp_path / "one") and look(tmp_path / "two"))
    plan = plan_of(one, three, session=2)
    write_plan(root, plan)
    until(lambda: look(tmp_path / "three"))
    save(store, 2)
    until(lambda: 2 in look(tmp_path / "one") and 2 in look(tmp_path / "three"))
    assert set(look(tmp_path / "two")) == {1}
    store.close()
    status = agents.ended(process, root)
    assert status.token == plan.token
    assert [one.url for one in status.levels] == [str(tmp_path / "one"), str(tmp_path / "three")]


def test_another_bandwidth_of_a_new_plan_counts_for_the_copy_that_is_under_way(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    far = tmp_path / "far"
    store = make_store(root)
    save(store, 1, nbytes=1 << 20)
    process = agents.start(root, plan_of(level(far, bandwidth="1kB/s")))
    until(lambda: (found := read_status(root)) and found.levels[0].sent_bytes)
    write_plan(root, plan_of(level(far), session=2))
    until(lambda: look(far))
    store.close()
    agents.ended(process, root)


def test_a_plan_that_says_closed_ends_nothing_while_somebody_trains(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    store = make_store(root)
    save(store, 1)
    process = agents.start(root, plan_of(level(tmp_path / "far", every=10), closed=True))
    until(lambda: read_status(root))
    time.sleep(0.6)
    assert process.poll() is None and look(tmp_path / "far") == {}
    save(store, 10)
    until(lambda: look(tmp_path / "far") == {10: 0})
    store.close()
    agents.ended(process, root)


@pytest.mark.parametrize("change", [{"protocol": PROTOCOL + 1}, {"release": "99.0"}])
def test_a_plan_of_another_release_ends_it(
    change: dict[str, object], root: Path, tmp_path: Path, agents: Agents
) -> None:
    store = make_store(root)
    save(store, 1)
    process = agents.start(root, plan_of(level(tmp_path / "far")))
    until(lambda: look(tmp_path / "far"))
    write_plan(root, plan_of(level(tmp_path / "far"), **change))
    assert agents.ended(process, root).ended == "another release"
    store.close()


def test_a_root_that_is_removed_ends_it(root: Path, tmp_path: Path, agents: Agents) -> None:
    store = make_store(root)
    process = agents.start(root, plan_of(level(tmp_path / "far")))
    until(lambda: read_status(root))
    root.rename(tmp_path / "moved")
    assert process.wait(60) == 0
    assert not root.exists()
    store.close()


def test_a_level_that_is_away_is_told_once_and_caught_up_with(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    far.write_text("a file")
    store = make_store(root)
    process = agents.start(root, plan_of(level(near), level(far)))
    for step in (1, 2, 3):
        save(store, step)
        until(lambda step=step: step in look(near))
    status = until(lambda: (found := read_status(root)) and found.levels[1].problem and found)
    assert status.levels[1].since_s > 0 and status.levels[0].problem == ""
    time.sleep(0.5)
    far.unlink()
    until(lambda: set(look(far)) == {1, 2, 3})
    until(lambda: (found := read_status(root)) and not found.levels[1].problem)
    store.close()
    agents.ended(process, root)
    assert log_of(root).count("WARNING") == 1 and "well again" in log_of(root)


def test_a_new_plan_is_tried_at_once_and_not_told_of_what_was_mended_before_it(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    far = tmp_path / "far"
    far.write_text("a file")
    store = make_store(root)
    save(store, 1)
    # Whoever waited for the next try would wait for longer than this test does.
    process = agents.start(root, plan_of(level(far)), again_most_s=10_000.0)
    until(lambda: (found := read_status(root)) and found.levels[0].hopeless)
    far.unlink()
    plan = plan_of(level(far), session=2)
    write_plan(root, plan)
    status = until(lambda: (found := read_status(root)) and found.token == plan.token and found)
    assert (status.levels[0].problem, status.levels[0].hopeless) == ("", False)
    until(lambda: look(far))
    store.close()
    assert agents.ended(process, root).levels[0].since_s == 0


def test_what_a_turn_has_met_that_began_before_a_plan_is_not_told_of_it(tmp_path: Path) -> None:
    before, now, then = (plan_of(level(tmp_path), session=session) for session in (1, 2, 3))
    board = Board(before, None)
    trouble = Trouble(str(tmp_path), board, Timing())
    problem = Away("it is away", hopeless=True)
    board.follow(now)
    trouble.failed(problem, before.token)
    assert board.told().levels[0].problem == "" and not trouble.is_there
    trouble.failed(problem, now.token)
    assert board.told().levels[0].problem == "it is away" and trouble.is_there
    board.follow(then)
    assert board.told().levels[0].problem == "" and not trouble.is_there


@pytest.mark.parametrize(
    ("error", "text", "hopeless"),
    [
        (MemoryError(), "no memory is left for the agent", False),
        (RuntimeError("can't start new thread"), "no threads are left for the agent", False),
        (AssertionError(), "AssertionError", True),
    ],
)
def test_every_problem_of_a_level_has_a_text_and_what_this_machine_lacks_comes_back(
    error: Exception, text: str, hopeless: bool, tmp_path: Path
) -> None:
    plan = plan_of(level(tmp_path))
    board = Board(plan, None)
    Trouble(str(tmp_path), board, Timing()).failed(error, plan.token)
    told = board.told().levels[0]
    assert told.problem.startswith(f"{tmp_path}: {text}") and told.hopeless is hopeless


def test_an_agent_without_progress_gives_up_when_nobody_trains(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    (tmp_path / "far").write_text("a file")
    store = make_store(root)
    save(store, 1)
    store.close()
    status = agents.run(root, plan_of(level(tmp_path / "far")), patience_s=1)
    assert status.ended == "no progress" and status.levels[0].problem


def test_a_step_that_is_saved_again_is_replaced_at_the_level(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    store = make_store(root)
    save(store, 1, mark=1)
    process = agents.start(root, plan_of(level(tmp_path / "far")))
    until(lambda: look(tmp_path / "far") == {1: 1})
    attempt = save(store, 1, mark=2)
    until(lambda: look(tmp_path / "far") == {1: 2})
    store.close()
    assert agents.ended(process, root).levels[0].steps == {1: attempt}


def test_a_level_directory_that_is_removed_is_made_again_for_the_next_step(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    store = make_store(root)
    save(store, 1)
    process = agents.start(root, plan_of(level(tmp_path / "far")))
    until(lambda: look(tmp_path / "far"))
    (tmp_path / "far").rename(tmp_path / "gone")
    save(store, 2)
    until(lambda: 2 in look(tmp_path / "far"))
    store.close()
    agents.ended(process, root)


def test_a_disk_that_is_unmounted_or_read_only_for_a_while_is_caught_up_with(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    store = make_store(root)
    with mounted("tmpfs", tmp_path) as disk:
        save(store, 1)
        process = agents.start(root, plan_of(level(disk / "far")))
        until(lambda: look(disk / "far"))
        # As a mount that others still use: it is gone from here, and comes back as it was.
        (tmp_path / "aside").mkdir()
        subprocess.run(["mount", "--bind", disk, tmp_path / "aside"], check=True)
        subprocess.run(["umount", "-l", disk], check=True)
        try:
            save(store, 2)
            until(lambda: read_status(root))
            until(lambda: "mount it again" in read_status(root).levels[0].problem)  # type: ignore[union-attr]
            assert not list(disk.iterdir())
            subprocess.run(["mount", "--bind", tmp_path / "aside", disk], check=True)
            until(lambda: 2 in look(disk / "far"))
            remount(disk, "bind,ro")
            save(store, 3)
            until(lambda: "ead-only" in read_status(root).levels[0].problem)  # type: ignore[union-attr]
            remount(disk, "bind,rw")
            until(lambda: 3 in look(disk / "far"))
        finally:
            subprocess.run(["umount", "-l", tmp_path / "aside"], check=True)
        store.close()
        assert agents.ended(process, root).levels[0].problem == ""


def test_the_lease_is_renewed_while_somebody_trains_and_closed_at_the_end(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    store = make_store(root)
    save(store, 1)
    far = tmp_path / "far"
    process = agents.start(root, plan_of(level(far), session=3))
    until((far / LEVELS / "lease.json").exists)
    first = word(far, "lease.json")
    assert first["session"] == 3 and first["pid"] == process.pid and first["closed"] is False
    until(lambda: word(far, "lease.json")["beat"] != first["beat"])
    store.close()
    agents.ended(process, root)
    assert word(far, "lease.json")["closed"] is True


def test_a_level_that_is_filled_anew_is_claimed_anew(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    far = tmp_path / "far"
    store = make_store(root)
    save(store, 1)
    agents.start(root, plan_of(level(far), session=3))
    until(lambda: 1 in look(far))
    far.rename(tmp_path / "gone")
    save(store, 2)
    until(lambda: 2 in look(far))
    claim = word(far, "run.json")
    assert (claim["run"], claim["session"]) == ("ab" * 8, 3)
    store.close()


def test_an_agent_that_does_not_sweep_has_no_lease_and_retires_nothing(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    store = make_store(root)
    for step in (1, 2):
        save(store, step)
    store.close()
    agents.run(root, plan_of(level(tmp_path / "far", keep_last=1), sweeps=False))
    assert set(look(tmp_path / "far")) == {1, 2}
    assert not (tmp_path / "far" / LEVELS / "lease.json").exists()


def test_nodes_with_roots_of_their_own_make_one_step_of_their_parts(
    tmp_path: Path, agents: Agents
) -> None:
    far, roots = tmp_path / "far", [tmp_path / "a", tmp_path / "b"]
    stores = [make_store(root) for root in roots]
    running = [
        agents.start(root, plan_of(level(far, keep_last=2), sweeps=not node))
        for node, root in enumerate(roots)
    ]
    for step in (1, 2, 3, 4):
        attempt = f"{step:012d}-0000abcd"
        for node, store in enumerate(stores):
            save(store, step, ranks=(node,), world=2, attempt=attempt)
    until(lambda: 4 in look(far))
    for store in stores:
        store.close()
    for process, root in zip(running, roots, strict=True):
        status = agents.ended(process, root)
        assert status.ended == "up to date" and 4 in status.levels[0].reached
    assert set(look(far)) <= {3, 4}


def test_a_part_that_goes_while_it_waits_for_those_of_other_nodes_is_sent_again(
    tmp_path: Path, agents: Agents
) -> None:
    far, roots, attempt = (
        tmp_path / "far",
        [tmp_path / "a", tmp_path / "b"],
        "000000000001-0000abcd",
    )
    stores = [make_store(root) for root in roots]
    save(stores[0], 1, ranks=(0,), world=2, attempt=attempt)
    running = [agents.start(roots[0], plan_of(level(far)))]
    part = far / ".inflight" / attempt / "rank-00000.json"
    until(part.exists)
    until(lambda: (found := read_status(roots[0])) and found.levels[0].sending is None)
    make_store(far).close()  # as a command does that opens it as a root
    until(part.exists, what="it is believed to be there")
    save(stores[1], 1, ranks=(1,), world=2, attempt=attempt)
    running.append(agents.start(roots[1], plan_of(level(far), sweeps=False)))
    until(lambda: look(far) == {1: 0})
    for store in stores:
        store.close()
    for process, root in zip(running, roots, strict=True):
        assert agents.ended(process, root).ended == "up to date"


def test_a_node_that_dies_before_it_publishes_leaves_that_to_those_that_wait(
    tmp_path: Path, agents: Agents
) -> None:
    def die() -> None:
        raise Stopped("now")

    far, roots, attempt = (
        tmp_path / "far",
        [tmp_path / "a", tmp_path / "b"],
        "000000000001-0000abcd",
    )
    stores = [make_store(root) for root in roots]
    for node, store in enumerate(stores):
        save(store, 1, ranks=(node,), world=2, attempt=attempt)
    # Each turn looks at the level anew: that is no reason not to look for the parts of others.
    process = agents.start(roots[0], plan_of(level(far)), poll_s=1.0, others_s=0.5)
    until((far / ".inflight" / attempt / "rank-00000.json").exists)
    until(lambda: (found := read_status(roots[0])) and found.levels[0].sending is None)
    with OpenSave(step_path(roots[1], 1), files=Files()) as part, pytest.raises(Stopped):
        send(part, DirectoryFar(far, files=Files()), How(may_publish=die))
    until(lambda: look(far) == {1: 0})
    for store in stores:
        store.close()
    assert agents.ended(process, roots[0]).ended == "up to date"


def test_a_full_level_is_told_spares_its_steps_and_is_caught_up_with(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    with mounted("tmpfs", tmp_path) as disk:
        (disk / "ballast").write_bytes(bytes(16 << 20))
        store = make_store(root)
        save(store, 1, nbytes=4 << 20)
        process = agents.start(root, plan_of(level(disk / "far", backlog=1)))
        until(lambda: set(look(disk / "far")) == {1})
        save(store, 2, nbytes=8 << 20)
        problem = until(lambda: (found := read_status(root)) and found.levels[0].problem)
        assert "No space left" in problem and set(look(disk / "far")) == {1}
        (disk / "ballast").unlink()
        until(lambda: set(look(disk / "far")) == {1, 2})
        store.close()
        agents.ended(process, root)


def test_a_level_that_always_has_something_to_send_lets_older_steps_go_meanwhile(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    far, store = tmp_path / "far", make_store(root)
    for step in (1, 2, 3, 4):
        save(store, step)
    save(store, 5, nbytes=8 << 20)  # so that it is on its way to the end of the test
    agents.start(root, plan_of(level(far, keep_last=1, bandwidth="100KB/s")))
    most = 0

    def has_let_go() -> bool:
        nonlocal most
        most = max(most, len(there := look(far)))
        return set(there) == {4}

    until(has_let_go)
    assert most <= 2, "what it is to keep, and the one that has just come"
    store.close()


def test_a_level_that_is_full_goes_on_by_itself_once_it_is_to_keep_fewer_steps(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    with mounted("tmpfs", tmp_path) as disk:
        (disk / "ballast").write_bytes(bytes(8 << 20))
        store = make_store(root)
        for step in (1, 2, 3, 4):
            save(store, step, nbytes=5 << 20)
        plan = plan_of(level(disk / "far"))
        process = agents.start(root, plan)
        problem = until(lambda: (found := read_status(root)) and found.levels[0].problem)
        assert "keep fewer steps" in problem and set(look(disk / "far")) == {1, 2, 3}
        write_plan(root, plan_of(level(disk / "far", keep_last=1)))
        until(lambda: set(look(disk / "far")) == {4})
        store.close()
        assert agents.ended(process, root).levels[0].problem == ""


def test_a_level_that_lets_no_step_go_says_so_and_takes_newer_ones_all_the_same(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    far, store = tmp_path / "far", make_store(root)
    save(store, 1)
    agents.start(root, plan_of(level(far, keep_last=1)))
    until(lambda: set(look(far)) == {1})
    with bound(step_path(far, 1)):  # which nobody can rename
        for step in (2, 3, 4):
            save(store, step)
        until(lambda: {1, 4} <= set(look(far)))
        assert "busy" in until(lambda: (found := read_status(root)) and found.levels[0].problem)
    until(lambda: set(look(far)) == {4})
    store.close()


def test_a_copy_that_is_given_up_for_a_newer_one_gives_its_space_back(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    with mounted("tmpfs", tmp_path) as disk:
        (disk / "ballast").write_bytes(bytes(10 << 20))
        store = make_store(root)
        save(store, 1, nbytes=8 << 20, ranks=(0, 1), world=2)
        process = agents.start(root, plan_of(level(disk / "far", backlog=1)))
        until(lambda: (found := read_status(root)) and found.levels[0].problem)
        assert list(disk.glob("far/.inflight/*/shard-00000-0*")) and look(disk / "far") == {}
        save(store, 2, nbytes=5 << 20, ranks=(0, 1), world=2)
        until(lambda: set(look(disk / "far")) == {2})
        store.close()
        assert [*agents.ended(process, root).levels[0].skipped] == [1]


def test_training_comes_first(root: Path, tmp_path: Path, agents: Agents) -> None:
    import psutil

    store = make_store(root)
    process = agents.start(root, plan_of(level(tmp_path / "far")))
    until(lambda: read_status(root))
    seen = psutil.Process(process.pid)
    assert seen.nice() >= 10 and seen.ionice().ioclass == psutil.IOPRIO_CLASS_IDLE
    store.close()
    agents.ended(process, root)
