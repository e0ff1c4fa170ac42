"""Directories of files come to every level, and pointers move there when they may."""

from __future__ import annotations

import dataclasses
import random
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from ckpt_core import Checkpointer, CommitError, Level, bring_directory
from ckpt_core.layout import Manifest
from ckpt_core.levels import Away, Far, read_status, write_plan
from ckpt_core.levels.agent.board import Board, Timing
from ckpt_core.levels.agent.copying import How
from ckpt_core.levels.agent.named_carrying import NamedCarrier
from ckpt_core.system.files import Files
from tests import places
from tests.levels.agents import Agents, plan_of, until
from tests.levels.named_making import FILES, SMALL, damage, far_of, save, save_in, whole
from tests.levels.trainers import end_agent


def pointer(place: Path) -> str | None:
    path = place / "latest"
    return path.read_text() if path.exists() else None


def level(place: Path, **options: object) -> Level:
    return Level(str(place), **{"every": 10, **options})  # type: ignore[arg-type]


# -- with a real agent ---------------------------------------------------------------------------


def test_directories_and_the_pointer_come_to_every_level_and_the_newest_when_training_has_ended(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    with Checkpointer(root, SMALL) as ck:
        process = agents.start(root, plan_of(level(near, every=1), level(far)))
        for step in (10, 15):
            save_in(ck, step)
            until(lambda step=step: f"global_step{step}" in far_of(near).directories())
        until(lambda: pointer(far) == "global_step10")
        until(lambda: pointer(near) == "global_step15")
        assert whole(far) == {"global_step10": 10}
        assert process.poll() is None
        status = read_status(root)
        assert status is not None
        attempts = {name: copy.attempt for name, copy in far_of(far).directories().items()}
        assert status.levels[1].files == attempts
        assert status.levels[1].reached == {}, "no step has come there"
    assert agents.ended(process, root).ended == "up to date"
    assert whole(far) == {"global_step10": 10, "global_step15": 15}
    assert pointer(far) == "global_step15"


def test_the_handle_of_a_directory_says_when_it_has_come_to_a_level(
    root: Path, tmp_path: Path
) -> None:
    far = tmp_path / "far"
    try:
        with Checkpointer(root, SMALL, levels=[level(far)]) as ck:
            handles = []
            for step in (10, 15):
                opened = ck.begin_files(step, f"global_step{step}", pointer="latest")
                opened.add("model.pt", {"w": 1})
                handles.append(opened.seal())
            handles[0].reached(1).result(60)
            assert far_of(far).directories()["global_step10"].step == 10
            with pytest.raises(CommitError, match="every=10"):
                handles[1].reached(1).result(60)
        until(lambda: pointer(far) == "global_step15", what="the newest when training has ended")
    finally:
        end_agent(root)


def test_a_directory_below_the_newest_at_the_level_is_passed_over_and_that_is_said(
    root: Path, tmp_path: Path
) -> None:
    far = tmp_path / "far"
    old, new = save(far, 10), save(far, 20)
    try:
        with Checkpointer(root, SMALL, levels=[level(far, every=1)]) as ck:
            opened = ck.begin_files(15, "global_step15", pointer="latest")
            opened.add("model.pt", {"w": 1})
            handle = opened.seal()
            ck.wait(level=1)
            with pytest.raises(CommitError, match="was passed over: newer ones are there"):
                handle.reached(1).result(60)
            with pytest.raises(
                CommitError, match=r"global_step15 was saved last.*global_step20 is"
            ):
                ck.wait(level=1, last=True)
            status = read_status(root)
            assert status is not None and [*status.levels[0].files_skipped] == ["global_step15"]
        assert whole(far) == {old: 10, new: 20} and pointer(far) == new
    finally:
        end_agent(root)


def test_where_what_was_saved_last_has_been_deleted_the_newest_of_the_rest_is_waited_for(
    root: Path, tmp_path: Path
) -> None:
    far = tmp_path / "far"
    try:
        with Checkpointer(root, SMALL, levels=[level(far, every=100)]) as ck:
            save_in(ck, 1, "good")
            save_in(ck, 2, "bad")
            due = ck._engine.levels._due  # type: ignore[attr-defined]
            good, bad = (far_of(root).directories()[name] for name in ("good", "bad"))
            assert due.newest() == (bad,)
            assert due.left(level(far), None, last=(bad,)) == ["bad"]
            shutil.rmtree(root / "bad")
            assert due.newest() == (good,)
            assert due.left(level(far), None, last=(bad,)) == []
            ck.wait(level=1, last=True)
            assert whole(far) == {"good": 1}
    finally:
        end_agent(root)


def test_retention_at_a_level_leaves_directories_alone(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    far = tmp_path / "far"
    with Checkpointer(root, SMALL) as ck:
        process = agents.start(root, plan_of(level(far, keep_last=1)))
        for step in (10, 20, 30):
            save_in(ck, step)
            until(lambda step=step: pointer(far) == f"global_step{step}")
    agents.ended(process, root)
    assert set(whole(far).values()) == {10, 20, 30}


def test_a_directory_that_is_saved_again_replaces_the_one_at_the_level(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    far = tmp_path / "far"
    with Checkpointer(root, SMALL) as ck:
        process = agents.start(root, plan_of(level(far)))
        for step in (10, 20):
            save_in(ck, step, "best", pointer=None)
            until(lambda step=step: whole_number(far, "best") == step)
    agents.ended(process, root)
    assert whole(far) == {"best": 20} and pointer(far) is None


def test_a_run_goes_back_where_newer_tags_are_deleted_here_and_at_the_level(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    far, fresh = tmp_path / "far", tmp_path / "fresh"
    with Checkpointer(root, SMALL) as ck:
        process = agents.start(root, plan_of(level(far)))
        for step in (10, 20, 30):
            save_in(ck, step)
            until(lambda step=step: pointer(far) == f"global_step{step}")
    agents.ended(process, root)
    for place in (root, far):
        for name in ("global_step20", "global_step30"):
            shutil.rmtree(place / name)
    assert bring_directory(fresh, [Level(str(far))], pointer="latest") == "global_step10"
    with Checkpointer(root, SMALL) as ck:
        process = agents.start(root, plan_of(level(far)))
        save_in(ck, 20)
        until(lambda: pointer(far) == "global_step20")
    agents.ended(process, root)
    assert whole(far) == {"global_step10": 10, "global_step20": 20}
    assert pointer(root) == "global_step20"


def whole_number(place: Path, name: str) -> int | None:
    copy = far_of(place).directories().get(name)
    return None if copy is None else copy.step


@pytest.mark.parametrize("first", ["near", "far"])
def test_what_only_an_earlier_level_holds_takes_no_later_directorys_place_behind_it(
    first: str, root: Path, tmp_path: Path, agents: Agents
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    places = [near, far] if first == "near" else [far, near]
    for place in places:
        save(place, 10)
    later = far_of(places[1]).directories()
    save(root, 20)
    agents.run(root, plan_of(level(near), level(far)))
    assert set(whole(far).values()) == {10, 20} and pointer(far) == "global_step20"
    assert far_of(far).directories().items() >= later.items()


def test_a_damaged_directory_is_not_sent_and_that_is_said(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    far = tmp_path / "far"
    old, new = save(root, 10), save(root, 20)
    damage(root / new / FILES[1])
    status = agents.run(root, plan_of(level(far, backlog=5)))
    assert whole(far) == {old: 10} and pointer(far) == old
    assert "global_step20 is damaged and was not sent" in status.levels[0].problem


def test_an_agent_that_is_killed_again_and_again_never_shows_anything_by_halves(
    root: Path, tmp_path: Path, agents: Agents
) -> None:
    far, dice = tmp_path / "far", random.Random(places.run_number())
    names = [save(root, step) for step in range(10, 70, 10)]
    write_plan(root, plan_of(level(far, backlog=10)))
    last = -1
    for _ in range(4):
        process = agents.start(root)
        time.sleep(dice.uniform(0.3, 1.0))
        process.kill()
        process.wait()
        seen = whole(far)
        if (now := pointer(far)) is not None:
            assert seen[now] >= last
            last = seen[now]
    assert agents.run(root).ended == "up to date"
    assert set(whole(far)) == set(names) and pointer(far) == names[-1]


# -- every call of a level fails once, or is the last ---------------------------------------------


MOST = 8


class Killed(BaseException):
    """Stands for the end of the process."""


class Spoiled:
    """A level of which one call goes wrong, before or after it is done."""

    def __init__(self, far: Far, number: int, error: Callable[[], BaseException], after: bool):
        self._far, self.left, self._error, self._after = far, number, error, after

    def __getattr__(self, name: str) -> object:
        found = getattr(self._far, name)
        if not callable(found):
            return found

        def call(*args: object, **more: object) -> object:
            self.left -= 1
            spoil = self.left == 0
            if spoil and not self._after:
                raise self._error()
            answer = found(*args, **more)
            if spoil:
                raise self._error()
            return answer

        return call


def carry(root: Path, place: Path, far: Far, *, most: int = 30) -> None:
    """Turns of a fresh carrier until nothing is left to do; a failure is followed by another turn."""
    here = level(place, backlog=5)
    board = Board(plan_of(here), None)
    board.alive = False
    carrier = NamedCarrier(str(place), board, files=Files(), timing=Timing(others_s=0.0))
    for _ in range(most):
        try:
            # As many calls each time: nothing is read back by chance.
            if not carrier.turn(far, here, [root], lambda *_: How(sample=0.0)):
                return
        except Away:
            continue
    raise AssertionError("it does not come to an end")


def check(place: Path, names: Iterable[str]) -> None:
    """What is to be seen at a level is whole."""
    seen = whole(place)
    assert set(seen) <= set(names)
    if (now := pointer(place)) is not None:
        assert now in seen


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", [Away, Killed])
def test_whichever_call_goes_wrong_pointers_name_what_is_whole_and_all_comes_there_in_the_end(
    kind: type[BaseException], after: bool, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    names = [save(root, 10), save(root, 25, "last")]
    counting = Spoiled(far_of(tmp_path / "counted"), 0, Killed, after)
    carry(root, tmp_path / "counted", counting)  # type: ignore[arg-type]
    calls = -counting.left
    assert calls > 20
    for number in places.some(range(1, calls + 1), MOST, of=f"{kind} {after}"):
        place = tmp_path / f"far-{number}"
        spoiled = Spoiled(far_of(place), number, lambda: kind("spoilt"), after)
        try:
            carry(root, place, spoiled)  # type: ignore[arg-type]
        except Killed:
            check(place, names)
            carry(root, place, far_of(place))
        check(place, names)
        assert set(whole(place)) == set(names) and pointer(place) == "last"
        shutil.rmtree(place)
        assert spoiled.left <= 0


def test_a_level_is_asked_nothing_where_the_root_has_no_directories(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root", SMALL) as ck:
        ck.save(10, {"x": 1}).committed.result()
    carry(tmp_path / "root", tmp_path / "far", None)  # type: ignore[arg-type]


def test_a_directory_of_which_other_nodes_have_a_part_is_not_sent_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, far = tmp_path / "root", tmp_path / "far"
    path = root / save(root, 10) / "manifest.json"
    manifest = Manifest.decode(path.read_bytes(), path=path)
    path.write_bytes(dataclasses.replace(manifest, world_size=2).encode())
    carry(root, far, far_of(far))
    assert not far.exists()
    assert "other nodes have a part of it" in caplog.text
