"""What retention takes and what it leaves; removal by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.errors import ConfigError, NotCommitted
from ckpt_core.store import StepStore, step_path
from ckpt_core.store.retention import choose_retired
from tests.store.harness import (
    QuickFiles,
    fill,
    left,
    make_store,
    mark_of,
    save,
)


def test_the_newest_steps_stay_and_the_others_go(store: StepStore) -> None:
    for step in range(1, 6):
        save(store, step)
    assert store.retire() == (1, 2, 3)
    assert store.steps() == (4, 5)
    assert store.retire() == ()


def test_a_run_that_went_back_keeps_its_last_save_beside_the_newest_steps(
    store: StepStore, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (20, 30, 40):
        save(store, step)
        store.retire()
    assert "restart resumes" not in caplog.text
    for step in (11, 12, 13):
        save(store, step)
        store.retire()
        assert store.steps() == (step, 30, 40)
    assert caplog.text.count("a restart resumes from step 40") == 1
    save(store, 41)
    assert store.retire() == (13, 30)
    assert store.steps() == (40, 41)


def test_saves_in_flight_together_that_begin_in_another_order_do_not_go_back(
    store: StepStore, caplog: pytest.LogCaptureFixture
) -> None:
    ids = {step: f"{step:012d}-{step:08x}" for step in (10, 20)}
    for step in (10, 20):
        store.admitted(ids[step])
    for step in (20, 10):
        attempt = store.begin(step, ids[step])
        fill(store, attempt, mark=step)
        store.publish(attempt)
        assert store.retire() == ()
    save(store, 21)
    assert "restart resumes" not in caplog.text
    assert store.retire() == (10,)
    save(store, 11)
    assert "step 11 is saved while" in caplog.text


def test_of_saves_in_flight_together_the_one_that_was_begun_last_is_the_last(
    store: StepStore,
) -> None:
    save(store, 13)
    begun = [store.begin(step) for step in (4, 14)]
    for attempt in reversed(begun):
        fill(store, attempt, mark=attempt.step)
        store.publish(attempt)
    store.retire()
    assert store.steps() == (13, 14), "it went back to 4, and on to 14"


def test_multiples_stay_for_ever(root: Path) -> None:
    store = StepStore(root, files=QuickFiles(), keep_last=1, keep_every=10, spare_slots=0)
    store.open()
    for step in (0, 5, 10, 15, 20, 25):
        save(store, step)
    assert store.retire() == (5, 15)
    assert store.steps() == (0, 10, 20, 25)
    assert left(root, ".slots") == []
    store.close()


def test_nothing_goes_when_all_are_kept(root: Path) -> None:
    store = make_store(root, keep_last=None)
    store.open()
    for step in range(4):
        save(store, step)
    assert store.retire() == ()
    store.close()


def test_pinned_and_protected_steps_stay_until_they_are_let_go(store: StepStore) -> None:
    store.pin(1)
    store.pin(1)
    for step in range(1, 6):
        save(store, step)
    first, second = store.protect(2), store.protect(2)
    assert store.retire() == (3,)
    first.release()
    assert store.retire() == ()
    del second
    assert store.retire() == (2,)
    assert store.pinned() == {1}
    store.unpin(1)
    store.unpin(1)
    assert store.retire() == (1,)


def test_pins_outlive_the_store_and_foreign_files_are_no_pins(root: Path) -> None:
    store = make_store(root)
    store.open()
    store.pin(10**12)
    store.pin(7)
    (root / ".pins" / "notes.txt").write_text("")
    store.close()
    assert make_store(root).pinned() == {7, 10**12}


def test_a_suspect_does_not_count_and_is_moved_aside_whole(store: StepStore) -> None:
    for step in range(1, 5):
        save(store, step)
    store.suspect(4)
    store.suspect(99)
    assert store.retire() == (1,)
    assert store.steps() == (2, 3, 4)
    store.quarantine_suspects()
    assert store.steps() == (2, 3)
    (moved,) = left(store.root, ".corrupt")
    assert moved.startswith("step-000000000004-000000000004-")
    assert len(left(store.root, f".corrupt/{moved}")) == 3
    store.quarantine_suspects()
    save(store, 5)
    assert store.retire() == (2,)
    assert left(store.root, ".corrupt") == [moved]


def test_a_suspect_that_is_being_read_is_moved_later(store: StepStore) -> None:
    save(store, 4)
    hold = store.protect(4)
    store.suspect(4)
    store.quarantine_suspects()
    assert store.steps() == (4,)
    hold.release()
    store.quarantine_suspects()
    assert store.steps() == ()


def test_a_suspect_that_is_saved_again_is_sound(store: StepStore) -> None:
    save(store, 4)
    store.suspect(4)
    save(store, 4, mark=9)
    store.quarantine_suspects()
    assert mark_of(step_path(store.root, 4)) == 9


@given(
    committed=st.sets(st.integers(0, 60), max_size=12),
    keep_last=st.none() | st.integers(0, 5),
    keep_every=st.none() | st.integers(1, 10),
    kept=st.sets(st.integers(0, 60), max_size=4),
    suspect=st.sets(st.integers(0, 60), max_size=6),
)
def test_retention_keeps_what_it_promises(
    committed: set[int],
    keep_last: int | None,
    keep_every: int | None,
    kept: set[int],
    suspect: set[int],
) -> None:
    gone = set(
        choose_retired(
            sorted(committed),
            keep_last=keep_last,
            keep_every=keep_every,
            kept=kept,
            suspect=suspect,
        )
    )
    sound = sorted(committed - suspect)
    assert gone <= committed
    assert not gone & (kept | suspect | set(sound[-(keep_last or 1) :]))
    assert not committed or max(committed) not in gone
    assert not (keep_every and any(step % keep_every == 0 for step in gone))
    if keep_last is not None and keep_every is None:
        stay = set(sound[-max(keep_last, 1) :]) | kept | suspect | {max(committed, default=-1)}
        assert gone == committed - stay


def test_removed_steps_are_gone_and_their_space_is_free(store: StepStore) -> None:
    for step in (1, 2, 3):
        save(store, step)
    store.remove([3, 1, 1])
    assert store.steps() == (2,)
    assert (left(store.root), left(store.root, ".slots")) == ([], [])


def test_nothing_is_removed_when_one_of_the_steps_cannot_be(store: StepStore) -> None:
    for step in (1, 2, 3):
        save(store, step)
    store.pin(2)
    with pytest.raises(ConfigError, match=r"steps \[2\] are pinned"):
        store.remove([1, 2])
    with pytest.raises(NotCommitted, match=r"steps \[4\] are not committed"):
        store.remove([1, 4])
    assert store.steps() == (1, 2, 3)
