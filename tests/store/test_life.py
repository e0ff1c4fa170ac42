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
    store.publish(second)
    store.publish(first)
    assert mark_of(step_path(store.root, 5)) == 1
    assert left(store.root) == []


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
