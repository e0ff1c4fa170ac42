"""Trainer and agent together: each is killed, the other goes on; nothing that is seen is ever in part."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

import ckpt_core
from ckpt_core import Checkpointer, CommitError, ConfigError, Level, RootBusy
from ckpt_core.levels import read_plan, read_status
from ckpt_core.levels.claiming import claim_word
from ckpt_core.store import RootLock, committed_steps, step_path, writer_of
from tests.crash.promises import QuickFiles
from tests.crash.warm import Warm
from tests.faults.mounts import mount, mounted
from tests.levels.agents import Agents
from tests.levels.servers.faulty import SECRET, FaultServer, always, in_environment, never
from tests.levels.servers.moto import needs_store
from tests.levels.trainers import SOON_S, agent_of, end_agent, options, processes, until
from tests.levels.training_jobs import is_of_step, make_state

JOBS = "tests.levels.training_jobs:"
SLOW = "400KB"
"""A step takes a quarter of a second, so that whoever is killed is in the middle of something."""


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """A process with torch imported; its forked children may be killed."""
    with Warm() as process:
        yield process


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """With the real agent, which is ended."""
    made = tmp_path / "root"
    yield made
    end_agent(made)


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return tmp_path / "far"


def opened(root: Path, far: Path, **changes: Any) -> Checkpointer:
    level = Level(str(far), **changes)
    return Checkpointer(root, options(), levels=[level], files=QuickFiles())


def check_whole(place: Path) -> None:
    """Every step that is seen is bit for bit what was saved."""
    steps = committed_steps(place)
    assert not steps or ckpt_core.verify(place).ok
    for step in steps:
        found = ckpt_core.load(step_path(place, step))
        assert found["step"] == step and is_of_step(found)


def as_first_root(far: Path) -> Checkpointer:
    """A level opened by somebody who keeps all; an agent has its lock for moments."""

    def made() -> Checkpointer | None:
        with suppress(RootBusy):
            return Checkpointer(far, options(keep_last=None))
        return None

    found: Checkpointer = until(made, "the lock of the level")
    return found


def all_ended(root: Path) -> None:
    until(lambda: not processes(root), "the end of the agent")


def test_what_a_killed_trainer_had_committed_goes_on_and_the_agent_ends(
    warm: Warm, root: Path, far: Path
) -> None:
    levels = [{"url": str(far), "every": 2, "bandwidth": SLOW}]
    warm.call(JOBS + "killed", root=str(root), levels=levels, steps=9, die_at=7)
    all_ended(root)
    # The newest, although it is no multiple of 2.
    assert committed_steps(far)[-1] == 7
    check_whole(far)
    status = read_status(root)
    assert status is not None and status.ended == "up to date"


def test_a_trainer_that_starts_again_at_once_is_followed_by_the_same_agent(
    warm: Warm, root: Path, far: Path
) -> None:
    levels = [{"url": str(far), "bandwidth": "20KB"}]
    warm.call(JOBS + "killed", root=str(root), levels=levels, steps=9, die_at=3)
    before, pid = read_plan(root), until(lambda: agent_of(root), "an agent")
    assert before is not None
    with opened(root, far) as ck:
        found = ck.restore(make_state(0))
        assert found is not None and found.step == 3
        assert ck.save(4, make_state(4)).reached(1).result(SOON_S) is None
        assert agent_of(root) == pid
        after = read_plan(root)
        assert after is not None and after.run == before.run and after.session > before.session
    all_ended(root)
    assert committed_steps(far)[-1] == 4
    check_whole(far)


def test_trainers_that_are_killed_again_and_again_lose_nothing(
    warm: Warm, root: Path, far: Path
) -> None:
    levels = [{"url": str(far), "bandwidth": SLOW, "every": 3, "keep_last": None}]
    for newest in (2, 5, 6, 9):
        warm.call(JOBS + "killed", root=str(root), levels=levels, steps=9, die_at=newest)
        check_whole(root)
        check_whole(far)
    warm.call(JOBS + "train", root=str(root), levels=levels, steps=1)
    all_ended(root)
    assert committed_steps(far)[-1] == 10
    check_whole(far)


def test_an_agent_that_is_killed_under_way_is_followed_by_one_that_finishes(
    root: Path, far: Path
) -> None:
    with opened(root, far, bandwidth="20KB", keep_last=None) as ck:
        for step in range(1, 4):
            handle = ck.save(step, make_state(step))
            handle.committed.result(SOON_S)
            until(lambda step=step: ck.gauges.levels()[0].sending == step, "the sending")
            pid = until(lambda: agent_of(root), "an agent")
            os.kill(pid, signal.SIGKILL)
            assert handle.reached(1).result(SOON_S) is None
            check_whole(far)
    all_ended(root)
    assert committed_steps(far) == (1, 2, 3)


def test_a_root_that_was_lost_goes_on_from_the_level_and_stays_the_same_run(
    root: Path, far: Path
) -> None:
    with opened(root, far) as ck:
        for step in (1, 2):
            ck.save(step, make_state(step)).committed.result(SOON_S)
        ck.wait(level=1)
        before = read_plan(root)
    all_ended(root)
    shutil.rmtree(root)
    with opened(root, far) as ck:
        state = make_state(0)
        found = ck.restore(state)
        assert found is not None and found.step == 2 and is_of_step({**state, "step": 2})
        assert ck.save(3, make_state(3)).reached(1).result(SOON_S) is None
        after = read_plan(root)
    assert before is not None and after is not None
    assert after.run == before.run and after.session > before.session
    check_whole(far)
    check_whole(root)


def test_a_copy_of_a_root_takes_no_level_from_whoever_is_at_work_and_goes_on_behind_its_end(
    root: Path, far: Path
) -> None:
    copy = root.with_name("copy")
    try:
        with opened(root, far) as ck:
            ck.save(1, make_state(1)).reached(1).result(SOON_S)
            # The agent replaces that file while it is at work.
            shutil.copytree(root, copy, ignore=shutil.ignore_patterns("*status.json"))
            with pytest.raises(RootBusy, match="at work in this run"):
                opened(copy, far)
            ck.save(2, make_state(2)).reached(1).result(SOON_S)
        all_ended(root)
        with opened(copy, far) as ck:
            found = ck.restore(make_state(0))
            assert found is not None and found.step == 2
            ck.save(3, make_state(3)).reached(1).result(SOON_S)
    finally:
        end_agent(copy)


def check_next_machine(warm: Warm, root: Path, url: str, **environ: str) -> None:
    levels = [{"url": url, "every": 50, "bandwidth": SLOW}]
    steps = [50, 60, 73]
    warm.call(JOBS + "ended", root=str(root), levels=levels, steps=steps, environ=environ)
    assert not processes(root)
    root.rename(root.with_name("lost"))
    with Checkpointer(root, options(), levels=[Level(url, every=50)], files=QuickFiles()) as ck:
        state = make_state(0)
        found = ck.restore(state)
        assert found is not None and found.step == 73 and is_of_step({**state, "step": 73})


def test_the_last_step_that_was_waited_for_is_there_when_trainer_and_agent_are_killed_at_once(
    warm: Warm, root: Path, far: Path
) -> None:
    check_next_machine(warm, root, str(far))


@needs_store
def test_the_last_step_that_was_waited_for_is_in_the_store_when_all_are_killed_at_once(
    warm: Warm, root: Path
) -> None:
    with FaultServer() as server, in_environment(server.environ()):
        check_next_machine(warm, root, server.url("run"), **server.environ())
        end_agent(root)


def test_a_program_that_goes_on_behind_its_last_step_keeps_to_every(root: Path, far: Path) -> None:
    with opened(root, far, every=50, keep_last=None) as ck:
        ck.wait(level=1, last=True)
        for step in (3, 50):
            ck.save(step, make_state(step))
            ck.wait(level=1, last=step == 3)
            ck.wait(level=1, last=True)
        ck.save(51, make_state(51)).committed.result(SOON_S)
        ck.save(100, make_state(100)).reached(1).result(SOON_S)
        assert committed_steps(far) == (3, 50, 100)


def test_the_last_directories_of_files_are_waited_for_too(root: Path, far: Path) -> None:
    with opened(root, far, every=50, bandwidth=SLOW) as ck:
        files = ck.begin_files(7, "global_step7", pointer="latest")
        files.add("a.pt", {"w": make_state(7)["w"]})
        files.seal()
        ck.wait(level=1)
        assert not (far / "global_step7").exists()
        ck.wait(level=1, last=True)
        assert (far / "global_step7" / "a.pt").is_file()


def test_waiting_for_a_level_waits_for_directories_of_files_too(root: Path, far: Path) -> None:
    with opened(root, far, bandwidth=SLOW) as ck:
        files = ck.begin_files(7, "global_step7", pointer="latest")
        files.add("a.pt", {"w": make_state(7)["w"]})
        handle = files.seal()
        handle.committed.result(SOON_S)
        ck.wait(level=1)
        assert handle.reached(1).result(SOON_S) is None
        assert (far / "global_step7" / "a.pt").is_file()


def test_waiting_for_every_level_in_a_row(root: Path, far: Path, tmp_path: Path) -> None:
    farther = tmp_path / "farther"
    levels = [Level(str(far)), Level(str(farther), every=2)]
    with Checkpointer(root, options(), levels=levels, files=QuickFiles()) as ck:
        handles = [ck.save(step, make_state(step)) for step in (1, 2, 3)]
        ck.wait(level=1)
        ck.wait(level=2)
        assert [gauge.newest for gauge in ck.gauges.levels()] == [3, 2]
        assert handles[2].reached(1).result(SOON_S) is None
        assert handles[1].reached(2).result(SOON_S) is None
        ck.events.write_timeline(tmp_path / "trace.json")
        reached = [
            (event.step, event.detail)
            for event in ck.events.events()
            if event.name == "level_reached"
        ]
        assert (3, str(far)) in reached and (2, str(farther)) in reached
    all_ended(root)
    # When the run is over its last step goes everywhere.
    assert committed_steps(farther)[-1] == 3


@needs_store
def test_a_store_that_is_away_stops_no_training_and_is_caught_up(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = FaultServer()
    url = server.url("run")
    with in_environment(server.environ()):
        with Checkpointer(root, options(), levels=[Level(url)], files=QuickFiles()) as ck:
            assert ck.save(1, make_state(1)).reached(url).result(SOON_S) is None
            server.fault = always("503")
            for step in (2, 3, 4):
                handle = ck.save(step, make_state(step))
                handle.committed.result(SOON_S)
            until(lambda: ck.gauges.levels()[0].problem, "the problem")
            assert not handle.reached(1).done()
            server.fault = never
            ck.wait(level=1)
            assert handle.reached(1).result(SOON_S) is None
            until(lambda: not ck.gauges.levels()[0].problem, "its end")
        all_ended(root)
        said = [one.getMessage() for one in caplog.records if url in one.getMessage()]
        assert ["does not go on" in one for one in said] == [True, False]
        assert SECRET not in "".join([*said, *map(str, ck.events.events())])
        shutil.rmtree(root)
        with Checkpointer(root, options(), levels=[Level(url)], files=QuickFiles()) as ck:
            found = ck.restore(make_state(0))
            assert found is not None and found.step == 4
        all_ended(root)
    server.close()


@needs_store
def test_a_level_that_is_saved_to_as_a_first_root_loses_nothing_to_the_agent_it_was_a_level_of(
    root: Path, far: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    levels = [Level(str(far), keep_last=1), Level(str(other), keep_last=None)]
    with Checkpointer(root, options(), levels=levels, files=QuickFiles()) as ck:
        ck.save(1, make_state(1)).reached(1).result(SOON_S)
        with as_first_root(far) as there:
            assert there.restore(make_state(0)) is not None
        assert ck.save(2, make_state(2)).reached(1).result(SOON_S) is None, "it was only read"
        until(lambda: committed_steps(far) == (2,), "the retention of the level")
        with as_first_root(far) as there:
            for step in (3, 4, 5):
                there.save(step, make_state(step)).committed.result(SOON_S)
        ck.save(6, make_state(6)).reached(2).result(SOON_S)
        problem = until(lambda: ck.gauges.levels()[0].problem, "the problem")
        assert f"{far} is a first root now: process {os.getpid()} on" in problem
        with pytest.raises(CommitError, match=r"first root now.*start this run anew"):
            ck.wait(level=1)
        assert committed_steps(far) == (2, 3, 4, 5)
    # It is still the level of this run, for whoever says so.
    with Checkpointer(root, options(), levels=levels, files=QuickFiles()) as ck:
        until(lambda: committed_steps(far) == (6,), "the retention of the level")
        assert ck.save(7, make_state(7)).reached(1).result(SOON_S) is None
    all_ended(root)


def test_a_level_that_has_become_the_first_root_keeps_all_though_the_old_roots_agent_starts_again(
    root: Path, far: Path, agents: Agents
) -> None:
    for first, second, steps in ((root, far, (1, 2, 3)), (far, root, (4, 5, 6))):
        level = Level(str(second), keep_last=2)
        with Checkpointer(first, options(keep_last=10), levels=[level], files=QuickFiles()) as ck:
            for step in steps:
                ck.save(step, make_state(step)).reached(1).result(SOON_S)
        all_ended(first)
    # By its plan of before, as a service does.
    process = agents.start(root)

    def problem() -> str:
        status = read_status(root)
        is_its = status is not None and status.pid == process.pid and bool(status.levels)
        return status.levels[0].problem if status is not None and is_its else ""

    assert "is a first root now" in until(problem, "the problem")
    assert committed_steps(far) == (2, 3, 4, 5, 6)


@pytest.mark.parametrize("case", ["no word", "no file", "no lock", "locked"])
def test_a_word_that_cannot_be_changed_stops_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    made, folder = tmp_path / "root", tmp_path / "root/.levels"
    with Checkpointer(made, options()):
        folder.mkdir()
    (folder / "run.json").write_bytes(claim_word("ab" * 8, 3, host="other", pid=1))
    if case == "no word":
        (folder / "run.json").write_text("{")
    if case == "no file":
        (folder / "run.json").unlink()
        os.mkfifo(folder / "run.json")
    if case == "no lock":
        (folder / ".words").write_text("in the way")
    with ExitStack() as stack:
        if case == "locked":
            (folder / ".words").mkdir()
            stack.enter_context(RootLock(folder / ".words"))
        with Checkpointer(made, options(keep_last=None)) as ck:
            for step in (1, 2):
                ck.save(step, make_state(step)).committed.result(SOON_S)
    assert committed_steps(made) == (1, 2)
    said = [record.getMessage() for record in caplog.records if "level of some run" in record.msg]
    assert len(said) == (case in ("no lock", "locked"))


def test_a_bucket_that_is_not_there_is_said_when_the_checkpointer_is_made(root: Path) -> None:
    server = FaultServer(buckets=())
    with (
        in_environment(server.environ()),
        pytest.raises(ConfigError, match=re.escape(server.url("run"))),
    ):
        Checkpointer(root, options(), levels=[Level(server.url("run"))])
    server.close()
    assert writer_of(root) is None and not processes(root)


def test_a_forked_child_has_none_of_it_and_its_end_ends_nothing(root: Path, far: Path) -> None:
    with opened(root, far) as ck:
        handle = ck.save(1, make_state(1))
        handle.committed.result(SOON_S)
        pid = until(lambda: agent_of(root), "an agent")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                handle.reached(1)
            except ConfigError as exc:
                code = 0 if "fork" in str(exc) else 2
            finally:
                ck.close()
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert agent_of(root) == pid
        assert handle.reached(1).result(SOON_S) is None


def files_of(pid: int) -> list[str]:
    """What the process has open; it works meanwhile, so some may be closed as they are read."""
    found = []
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(one))
    return found


def test_the_agent_has_none_of_the_trainers_files_and_a_session_of_its_own(
    root: Path, far: Path, tmp_path: Path
) -> None:
    with (tmp_path / "open by the trainer").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        with opened(root, far):
            pid = until(lambda: agent_of(root), "an agent")
            assert not [one for one in files_of(pid) if "open by the trainer" in one]
            assert os.getsid(pid) == pid
            loaded = Path(f"/proc/{pid}/maps").read_text()
            assert "libtorch" not in loaded


# -- a disk that is not mounted ----------------------------------------------------------------------


def train(root: Path, far: Path, step: int) -> None:
    with opened(root, far) as ck:
        ck.restore(make_state(0))
        ck.save(step, make_state(step)).reached(1).result(SOON_S)
    all_ended(root)


def problem(root: Path) -> str:
    status = read_status(root)
    return status.levels[0].problem if status is not None and status.levels else ""


def unmount(disk: Path) -> None:
    subprocess.run(["umount", "-l", disk], check=True)
    assert not list(disk.iterdir())


def test_whoever_is_started_anew_writes_nothing_where_the_disk_of_a_level_is_not_mounted(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mounted("ext4", tmp_path) as disk:
        train(root, disk / "far", 1)
        unmount(disk)
        with opened(root, disk / "far") as ck:
            assert "mount it again" in caplog.text
            handle = ck.save(2, make_state(2))
            until(lambda: "mount it again" in problem(root))
            os.kill(until(lambda: agent_of(root)), signal.SIGKILL)
            until(lambda: agent_of(root) is None)
            (root / ".levels" / "status.json").unlink()
            until(lambda: "mount it again" in problem(root))
            assert not list(disk.iterdir())
            mount("ext4", tmp_path)
            handle.reached(1).result(SOON_S)
        all_ended(root)
        assert committed_steps(disk / "far") == (1, 2)


def test_a_level_begins_anew_below_a_disk_that_is_gone_once_somebody_says_so(
    root: Path, tmp_path: Path
) -> None:
    with mounted("tmpfs", tmp_path) as disk:
        train(root, disk / "far", 1)
        unmount(disk)
        with opened(root, disk / "far") as ck:
            handle = ck.save(2, make_state(2))
            until(lambda: f"make the directory {disk / 'far' / '.levels'}" in problem(root))
            (disk / "far" / ".levels").mkdir(parents=True)
            handle.reached(1).result(SOON_S)
        all_ended(root)
        train(root, disk / "far", 3)


def test_a_level_whose_disk_is_empty_or_whose_directory_is_gone_begins_anew(
    root: Path, tmp_path: Path
) -> None:
    with mounted("tmpfs", tmp_path) as disk:
        train(root, disk / "far", 1)
        unmount(disk)
        mount("tmpfs", tmp_path)  # as after a reboot
        train(root, disk / "far", 2)
        assert committed_steps(disk / "far")[-1:] == (2,)
        shutil.rmtree(disk / "far")
        train(root, disk / "far", 3)
        assert committed_steps(disk / "far")[-1:] == (3,)
