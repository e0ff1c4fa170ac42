"""The life of a step, from `begin` to its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_core.errors import CommitError, ConfigError
from ckpt_core.store import StepStore, committed_steps, step_path
from ckpt_core.system.files import Files
from tests.store.harness import (
    NoExchange,
    QuickFiles,
    fill,
    left,
    make_store,
    mark_of,
    save,
)


def test_a_step_exists_once_it_is_published_and_not_before(store: StepStore) -> None:
    attempt = store.begin(120)
    assert attempt.path == store.root / ".inflight" / attempt.id
    assert attempt.id.startswith("000000000120-") and len(attempt.id) == 21
    fill(store, attempt, mark=1)
    assert store.steps() == ()
    assert store.latest() is None
    path = store.publish(attempt)
    assert path == step_path(store.root, 120)
    assert store.steps() == (120,)
    assert mark_of(path) == 1
    assert left(store.root) == []


def test_real_files_give_the_same_with_every_sync(root: Path) -> None:
    store = make_store(root / "deep" / "down", Files(), keep_last=1)
    store.open()
    for step in (1, 2, 2, 3):
        save(store, step)
        store.retire()
    assert store.steps() == (3,)
    assert mark_of(step_path(store.root, 3)) == 3
    store.close()


def test_saves_of_one_step_have_directories_of_their_own(store: StepStore) -> None:
    first, second = store.begin(5), store.begin(5)
    assert first.path != second.path
    fill(store, first, mark=1)
    fill(store, second, mark=2)
    store.publish(first)
    assert mark_of(step_path(store.root, 5)) == 1
    store.publish(second)
    assert mark_of(step_path(store.root, 5)) == 2
    assert left(store.root) == []


@pytest.mark.parametrize("since", ["a later save", "a later one, retired", "a restore"])
def test_a_save_that_was_given_up_does_not_take_the_place_of_what_came_since(
    store: StepStore, since: str
) -> None:
    ids = [f"{5:012d}-{number:08x}" for number in range(2)]
    for name in ids:
        store.admitted(name)
    late, young = (store.begin(5, name) for name in ids)
    fill(store, late, mark=1)
    fill(store, young, mark=2)
    if since == "a restore":
        store.gone_back()
        store.abandon(young)
    else:
        store.publish(young)
    if since == "a later one, retired":
        save(store, 6)
        save(store, 7)
        assert store.retire() == (5,)
    there = store.steps()
    with pytest.raises(CommitError, match="step 5 was not published: a later save"):
        store.publish(late)
    store.abandon(late)
    assert store.steps() == there
    assert since != "a later save" or mark_of(step_path(store.root, 5)) == 2
    assert left(store.root) == []


def test_a_step_that_is_brought_is_never_late(store: StepStore) -> None:
    brought = store.begin(5, brought=True)
    fill(store, brought, mark=1)
    save(store, 5, mark=2)
    store.gone_back()
    store.publish(brought)
    assert mark_of(step_path(store.root, 5)) == 1


def test_a_save_that_is_ended_after_a_later_one_of_its_step_replaces_it(store: StepStore) -> None:
    name = f"{5:012d}-{1:08x}"
    store.admitted(name)
    opened = store.begin(5, name)
    save(store, 5, mark=2)
    store.admitted(name)  # as a layer-wise save that is sealed
    fill(store, opened, mark=1)
    store.publish(opened)
    assert mark_of(step_path(store.root, 5)) == 1


def test_an_older_step_published_late_never_becomes_the_latest(store: StepStore) -> None:
    late = store.begin(10)
    fill(store, late, mark=10)
    save(store, 20)
    save(store, 30)
    store.publish(late)
    assert store.latest() == 30
    assert store.retire() == (10,)
    assert store.steps() == (20, 30)


@pytest.mark.parametrize("base", [QuickFiles, NoExchange])
def test_a_step_is_replaced_and_its_old_file_recycled(root: Path, base: type[Files]) -> None:
    store = make_store(root, base())
    store.open()
    save(store, 7, mark=1)
    save(store, 7, mark=2)
    assert mark_of(step_path(root, 7)) == 2
    assert (left(root), len(left(root, ".slots"))) == ([], 1)
    store.close()


def test_an_attempt_without_a_manifest_is_never_published(store: StepStore) -> None:
    attempt = store.begin(3)
    with pytest.raises(CommitError, match="no manifest") as caught:
        store.publish(attempt)
    assert caught.value.step == 3
    assert store.steps() == ()


def test_something_foreign_with_the_name_of_a_step_is_not_replaced(store: StepStore) -> None:
    target = step_path(store.root, 3)
    target.write_text("mine")
    attempt = store.begin(3)
    fill(store, attempt, mark=1)
    with pytest.raises(CommitError, match="no step"):
        store.publish(attempt)
    store.abandon(attempt)
    assert target.read_text() == "mine"
    assert left(store.root) == []


def test_an_abandoned_attempt_leaves_nothing(store: StepStore) -> None:
    attempt = store.begin(3)
    fill(store, attempt, mark=1)
    (attempt.path / "nested").mkdir()
    (attempt.path / "nested" / "file").write_text("x")
    store.abandon(attempt)
    store.abandon(attempt)
    assert left(store.root) == []
    assert store.steps() == ()


@pytest.mark.parametrize("step", [-1, 1.5, "3", 10**18])
def test_a_bad_step_is_refused(store: StepStore, step: object) -> None:
    with pytest.raises(ConfigError, match="step="):
        store.begin(step)  # type: ignore[arg-type]


def test_a_closed_store_changes_nothing(root: Path) -> None:
    store = make_store(root)
    with pytest.raises(ConfigError, match="closed"):
        store.begin(1)
    store.open()
    attempt = store.begin(1)
    fill(store, attempt, mark=1)
    store.close()
    store.close()
    with pytest.raises(CommitError, match="closed"):
        store.publish(attempt)
    with pytest.raises(ConfigError, match="closed"):
        store.retire()
    assert committed_steps(root) == ()
