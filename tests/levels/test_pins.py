"""A step that is pinned in a root is pinned at every level, and stays there when the root is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_core import Checkpointer, Level, PersistError
from ckpt_core.levels import open_far, read_plan, read_status, write_plan
from ckpt_core.levels.far.directory import DirectoryFar
from ckpt_core.levels.trainer import levels as trainer
from ckpt_core.store import UNPINNED, committed_steps, pinned_steps, unpinned_marks
from ckpt_core.system.files import Files
from tests.crash.promises import QuickFiles
from tests.levels.agents import Agents, plan_of, until
from tests.levels.making import look, make_store, save
from tests.levels.servers.faulty import FaultServer, in_environment
from tests.levels.servers.moto import needs_store
from tests.levels.trainers import SOON_S, agent_of, end_agent, options, wait_for_agent
from tests.levels.training_jobs import make_state


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """A root, whose real agent is ended."""
    made = tmp_path / "root"
    yield made
    end_agent(made)


def opened(root: Path, url: str) -> Checkpointer:
    levels = [Level(url, keep_last=2)]
    return Checkpointer(root, options(), levels=levels, files=QuickFiles())


def lose(root: Path) -> None:
    """Its disk is gone, once its agent has ended."""
    wait_for_agent(root)
    shutil.rmtree(root)


def train(root: Path, url: str, *steps: int) -> None:
    with opened(root, url) as ck:
        ck.restore(make_state(0))
        for step in steps:
            ck.save(step, make_state(step)).reached(1).result(SOON_S)


def check_survives(root: Path, url: str) -> None:
    with opened(root, url) as ck:
        ck.save(1, make_state(1)).reached(1).result(SOON_S)
        ck.pin(1)
        for step in (2, 3):
            ck.save(step, make_state(step)).reached(1).result(SOON_S)
        ck.wait(level=1)
    lose(root)
    train(root, url, 4, 5)
    with open_far(url) as far:
        until(lambda: set(far.steps()) == {1, 4, 5})
        assert far.pins() == {1}
    # It never was in this root, so that it is not known here that it is pinned.
    wait_for_agent(root)
    with opened(root, url) as ck:
        ck.unpin(1)
        for step in (6, 7):
            ck.save(step, make_state(step)).reached(1).result(SOON_S)
        with open_far(url) as far:
            until(lambda: set(far.steps()) == {6, 7} and not far.pins())
        until(lambda: not unpinned_marks(root))


def test_a_pin_survives_the_loss_of_the_root_until_somebody_unpins_the_step(
    here: Path, tmp_path: Path
) -> None:
    check_survives(here, str(tmp_path / "far"))


@needs_store
def test_a_pin_survives_the_loss_of_the_root_in_a_store_too(here: Path) -> None:
    with FaultServer() as server, in_environment(server.environ()):
        check_survives(here, server.url("run"))
        end_agent(here)


def pins(place: Path) -> frozenset[int]:
    return DirectoryFar(place, files=Files()).pins()


def pin_the_first(root: Path, *steps: int) -> None:
    """A root with these steps, and nobody who has it open."""
    store = make_store(root)
    for step in steps:
        save(store, step)
    store.pin(steps[0])
    store.close()


def unpin(root: Path, step: int) -> None:
    """As somebody does who opens the root for it alone."""
    store = make_store(root)
    store.unpin(step)
    store.close()


def test_a_step_that_is_pinned_while_it_is_sent_is_seen_there_with_its_pin(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    far, store = tmp_path / "far", make_store(root)
    store.pin(5)
    for step in (4, 5):
        save(store, step)
    process = agents.start(root, plan_of(Level(str(far), backlog=2)))

    def seen() -> bool:
        steps = committed_steps(far)
        assert 5 not in steps or pins(far) == {5}
        return 5 in steps

    until(seen)
    store.close()
    assert agents.ended(process, root).levels[0].pinned == [5]


def test_what_is_unpinned_while_a_level_is_away_is_unpinned_there_later(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    near, far, store = tmp_path / "near", tmp_path / "far", make_store(root)
    save(store, 1)
    store.pin(1)
    process = agents.start(root, plan_of(Level(str(near)), Level(str(far))))
    until(lambda: pins(near) == pins(far) == {1})
    far.rename(tmp_path / "aside")
    far.write_text("a file")
    store.unpin(1)
    until(lambda: not pins(near))
    process.kill()
    process.wait()
    assert list(unpinned_marks(root).values()) == [1], "the other one has not heard of it"
    far.unlink()
    (tmp_path / "aside").rename(far)
    store.close()
    agents.run(root)
    assert not pins(far) and not unpinned_marks(root)


def test_a_level_that_always_has_something_to_send_hears_of_what_is_unpinned(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    far = tmp_path / "far"
    pin_the_first(root, 1)
    agents.run(root, plan_of(Level(str(far))))
    store = make_store(root)
    save(store, 3, nbytes=200_000)
    save(store, 4)
    store.pin(4)
    store.unpin(1)
    plan = plan_of(Level(str(far), backlog=9, keep_last=1, bandwidth="100KB/s"))
    agents.start(root, plan)
    until(lambda: (found := read_status(root)) and found.levels[0].sending == 3)
    save(store, 5, nbytes=8 << 20)  # so that it is on its way to the end of the test

    def seen() -> bool:
        assert pins(far) & {1, 4}, "the one before stays until the best step has come"
        return pins(far) == {4} and committed_steps(far) == (4,)

    until(seen)
    store.close()


def test_a_step_that_is_pinned_again_stays_pinned(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    far, store = tmp_path / "far", make_store(root)
    save(store, 1)
    plan = plan_of(Level(str(far)))
    write_plan(root, plan)
    for _ in range(3):
        store.pin(1)
        store.unpin(1)
    store.pin(1)
    store.close()
    assert not unpinned_marks(root)
    agents.run(root)
    assert pins(far) == {1}
    store = make_store(root)
    store.unpin(1)
    store.unpin(1)
    assert len(unpinned_marks(root)) == 1
    store.close()
    agents.run(root)
    assert not pins(far) and not unpinned_marks(root)


def test_a_pin_that_is_refused_unpins_nothing_at_a_level(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    far = tmp_path / "far"
    pin_the_first(root, 1, 2)
    agents.run(root, plan_of(Level(str(far), backlog=2)))
    shutil.rmtree(root)
    store = make_store(root)
    save(store, 3)
    write_plan(root, plan_of(Level(str(far)), session=2))
    with pytest.raises(Exception, match="step 1 is not in"):
        store.pin(1)
    store.close()
    agents.run(root)
    assert pins(far) == {1}


def test_of_two_nodes_with_one_level_the_last_to_unpin_decides(
    tmp_path: Path, agents: Agents
) -> None:
    far, roots = tmp_path / "far", [tmp_path / "a", tmp_path / "b"]
    stores = [make_store(root) for root in roots]
    attempt = save(stores[0], 1, ranks=[0], world=2)
    save(stores[1], 1, ranks=[1], world=2, attempt=attempt)
    for store in stores:
        store.pin(1)
    for n, root in enumerate(roots):
        agents.start(root, plan_of(Level(str(far)), sweeps=n == 0))
    until(lambda: committed_steps(far) == (1,) and pins(far) == {1})
    stores[0].unpin(1)
    until(lambda: not unpinned_marks(roots[0]))
    until(lambda: pins(far) == {1})
    stores[1].unpin(1)
    until(lambda: not unpinned_marks(roots[1]))
    assert pins(far) == frozenset()
    for store in stores:
        store.close()


def test_what_was_unpinned_before_the_run_went_on_elsewhere_is_in_doubt_and_stays_pinned(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    far = tmp_path / "far"
    pin_the_first(root, 1)
    agents.run(root, plan_of(Level(str(far)), session=1))
    store = make_store(root)
    store.unpin(1)
    # Another root of the run has had session 2.
    write_plan(root, plan_of(Level(str(far)), session=3))
    store.close()
    agents.run(root)
    assert pins(far) == {1}
    unpin(root, 1)
    agents.run(root, plan_of(Level(str(far)), session=4))
    assert not pins(far)


def begin_in_vain(root: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that has claimed the level, and comes to no plan."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as start:
        start.setattr(trainer, "write_plan", full)
        with pytest.raises(PersistError, match="the plan for the agent"):
            opened(root, url)


def pin_and_unpin(root: Path, url: str) -> None:
    """A run whose agent has not heard yet that the first step is unpinned."""
    with opened(root, url) as ck:
        ck.save(1, make_state(1)).reached(1).result(SOON_S)
        ck.pin(1)
        ck.save(2, make_state(2)).reached(1).result(SOON_S)
        ck.wait(level=1)
    wait_for_agent(root)
    unpin(root, 1)
    assert unpinned_marks(root)


def test_starts_that_come_to_no_plan_leave_to_the_next_what_was_unpinned_before(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = tmp_path / "far"
    pin_and_unpin(here, str(far))
    for _ in range(2):
        begin_in_vain(here, str(far), monkeypatch)
    train(here, str(far), 3, 4)
    until(lambda: committed_steps(far) == (3, 4) and not pins(far))


def test_a_start_that_comes_to_no_plan_hides_no_other_root_that_had_the_run_before_it(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, other = tmp_path / "far", tmp_path / "other"
    pin_and_unpin(here, str(far))
    try:
        train(other, str(far), 3)
        wait_for_agent(other)
    finally:
        end_agent(other)
    for _ in range(2):
        begin_in_vain(here, str(far), monkeypatch)
    train(here, str(far), 4)
    wait_for_agent(here)
    assert pins(far) == {1}


def test_what_was_unpinned_before_a_root_was_copied_is_in_doubt_and_stays_pinned(
    here: Path, tmp_path: Path
) -> None:
    far, copy = tmp_path / "far", tmp_path / "copy"
    pin_and_unpin(here, str(far))
    shutil.copytree(here, copy)
    try:
        train(copy, str(far), 3, 4)
        wait_for_agent(copy)
    finally:
        end_agent(copy)
    assert pins(far) == {1}


def test_what_was_unpinned_is_unpinned_at_the_levels_though_the_files_of_the_root_were_touched(
    here: Path, tmp_path: Path
) -> None:
    far = tmp_path / "far"
    pin_and_unpin(here, str(far))
    # As the owner of a volume that is mounted anew, or of a backup, does.
    (here / ".levels/run").chmod(0o600)
    shutil.copytree(here, tmp_path / "backup", copy_function=os.link)
    train(here, str(far), 3, 4)
    until(lambda: committed_steps(far) == (3, 4) and not pins(far))


def test_a_later_session_elsewhere_has_its_pins_left_alone(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    far = tmp_path / "far"
    pin_the_first(root, 1)
    agents.run(root, plan_of(Level(str(far))))
    word = json.dumps({"run": "ab" * 8, "session": 9, "host": "elsewhere", "pid": 1}).encode()
    words = DirectoryFar(far, files=Files())
    claimed = words.read_word("run.json")
    assert claimed is not None
    words.write_word("run.json", word, over=claimed.tag)
    unpin(root, 1)
    assert agents.run(root).ended == "fenced"
    assert pins(far) == {1}


def test_an_agent_that_was_killed_is_followed_by_one_that_unpins(
    here: Path, tmp_path: Path
) -> None:
    far = tmp_path / "far"
    with opened(here, str(far)) as ck:
        ck.save(1, make_state(1)).reached(1).result(SOON_S)
        ck.pin(1)
        ck.wait(level=1)
        os.kill(until(lambda: agent_of(here)), signal.SIGKILL)
        ck.unpin(1)
        assert pinned_steps(here) == frozenset()
        until(lambda: not pins(far))
    assert read_plan(here) is not None and (here / UNPINNED).is_dir()


def test_what_is_removed_by_hand_after_it_was_unpinned_goes_at_the_levels_too(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    far, store = tmp_path / "far", make_store(root)
    for step in (1, 2):
        save(store, step)
    store.pin(2)
    store.close()
    agents.run(root, plan_of(Level(str(far), backlog=2)))
    store = make_store(root)
    store.unpin(2)
    store.close()
    command = [sys.executable, "-m", "ckpt_core", "rm", str(root), "--after", "1", "--yes"]
    subprocess.run(command, check=True, capture_output=True)
    assert set(look(far)) == {1}
