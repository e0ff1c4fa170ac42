"""A restore takes the newest step that is whole anywhere, and the first root is whole again afterwards."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_core.errors import CorruptCheckpoint, NotCommitted, RestoreError
from ckpt_core.layout import Manifest
from ckpt_core.restore import RestoreWarning, verify
from ckpt_core.store import committed_steps, step_path
from tests.levels.restoring import (
    fill,
    opened,
    restore_alone,
    restored_state,
    shard_in,
)
from tests.restore.harness import assert_same, flip, small_state, write_step, zeros_like


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near"


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return tmp_path / "far"


def test_a_fresh_root_goes_on_from_the_level(root: Path, near: Path) -> None:
    fill(near, 10, 20)
    step, state = restored_state(root, [near])
    assert step == 20
    assert_same(state, small_state(20))
    assert committed_steps(root) == (20,)
    assert verify(root).ok
    for file in step_path(near, 20).iterdir():
        assert (step_path(root, 20) / file.name).read_bytes() == file.read_bytes()


def test_nothing_is_brought_when_the_root_has_the_newest_step(root: Path, near: Path) -> None:
    fill(near, 10, 20)
    fill(root, 20, 30)
    step, state = restored_state(root, [near])
    assert step == 30
    assert_same(state, small_state(30))
    assert committed_steps(root) == (20, 30)


def test_a_newer_step_at_the_level_is_brought_beside_older_ones(root: Path, near: Path) -> None:
    fill(root, 10)
    fill(near, 20)
    assert restored_state(root, [near])[0] == 20
    assert committed_steps(root) == (10, 20)


def test_of_several_levels_the_newest_step_counts_wherever_it_is(
    root: Path, near: Path, far: Path
) -> None:
    fill(near, 10)
    fill(far, 10, 20)
    assert restored_state(root, [near, far])[0] == 20


def test_a_step_that_is_damaged_here_is_brought_anew_and_says_so(root: Path, near: Path) -> None:
    fill(root, 10, 20)
    fill(near, 20)
    flip(shard_in(root, 20), 9000)
    with pytest.warns(RestoreWarning, match=r"step 20 is brought anew from a further level"):
        step, state = restored_state(root, [near])
    assert step == 20
    assert_same(state, small_state(20))
    assert verify(root).ok


def test_a_step_whose_manifest_is_gone_here_is_brought_anew(root: Path, near: Path) -> None:
    fill(root, 10, 20)
    fill(near, 20)
    (step_path(root, 20) / "manifest.json").unlink()
    assert restored_state(root, [near])[0] == 20
    assert verify(root).ok


def test_a_step_that_is_damaged_here_and_at_no_level_is_passed_over(root: Path, near: Path) -> None:
    fill(root, 10, 20)
    fill(near, 10)
    (step_path(root, 20) / "manifest.json").write_bytes(b"{")
    with pytest.warns(RestoreWarning, match=r"step 20 was not restored"):
        assert restored_state(root, [near])[0] == 10


def test_strict_still_raises_for_a_step_that_is_damaged_everywhere(root: Path, near: Path) -> None:
    fill(root, 10, 20)
    fill(near, 20)
    flip(shard_in(root, 20), 9000)
    flip(shard_in(near, 20), 9000)
    with (
        pytest.warns(RestoreWarning, match="brought anew"),
        pytest.raises(CorruptCheckpoint, match="shard-00000-0"),
    ):
        restored_state(root, [near], strict=True)


def test_what_is_damaged_at_the_nearest_level_comes_from_the_next(
    root: Path, near: Path, far: Path
) -> None:
    fill(near, 10, 20)
    fill(far, 10, 20)
    flip(shard_in(near, 20), 9000)
    step, state = restored_state(root, [near, far])
    assert step == 20
    assert_same(state, small_state(20))


def test_a_step_that_is_damaged_at_every_level_is_passed_over_for_an_older_one(
    root: Path, near: Path, far: Path
) -> None:
    fill(near, 10, 20)
    fill(far, 20)
    flip(shard_in(near, 20), 9000)
    shard_in(far, 20).unlink()
    with pytest.warns(RestoreWarning, match=r"step 20 was not restored.*shard-00000-0") as caught:
        assert restored_state(root, [near, far])[0] == 10
    assert "nothing of that name" in str(caught[0].message)
    assert committed_steps(root) == (10,)
    assert not list((root / ".inflight").iterdir())


def test_a_suspect_mark_of_a_step_goes_when_it_is_brought(root: Path, near: Path) -> None:
    fill(root, 10, 20)
    fill(near, 20)
    flip(shard_in(root, 20), 9000)
    with opened(root) as store:
        store.suspect(20)
        with pytest.warns(RestoreWarning, match="brought anew"):
            restore_alone(store, [near], zeros_like(small_state()))
        store.quarantine_suspects()
    assert committed_steps(root) == (10, 20)


def test_a_step_that_is_asked_for_comes_from_a_level_too(root: Path, near: Path) -> None:
    fill(root, 20, 30)
    fill(near, 10, 20)
    step, state = restored_state(root, [near], step=10)
    assert step == 10
    assert_same(state, small_state(10))


def test_a_step_that_is_nowhere_names_those_of_the_root(root: Path, near: Path) -> None:
    fill(root, 20, 30)
    fill(near, 10)
    with pytest.raises(NotCommitted, match=r"step 25 is not committed in .*nearest: 20, 30"):
        restored_state(root, [near], step=25)


def test_another_save_of_the_same_step_at_the_level_does_not_replace_the_one_here(
    root: Path, near: Path
) -> None:
    fill(near, 10)
    fill(root, 10)
    write_step(near, 20, small_state(99))
    manifest = step_path(near, 20) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"0123abcd", b"99999999"))
    fill(root, 20)
    step, state = restored_state(root, [near])
    assert step == 20
    assert_same(state, small_state(20))


def test_of_several_saves_of_a_step_the_one_made_last_is_restored_and_that_is_said(
    root: Path, near: Path, far: Path
) -> None:
    fill(near, 10, 20)
    fill(far, 10)
    save_anew(far, 20, created_unix_s=2.0)
    with pytest.warns(
        RestoreWarning, match="2 different saves of step 20: .*-99999999 is restored"
    ):
        step, state = restored_state(root, [near, far])
    assert step == 20
    assert_same(state, small_state(99))
    # The root's own is not asked about.
    assert restored_state(root, [near, far])[0] == 20


def test_of_several_saves_made_at_once_the_nearest_is_restored(
    root: Path, near: Path, far: Path
) -> None:
    fill(near, 20)
    save_anew(far, 20, created_unix_s=1.0)
    with pytest.warns(RestoreWarning, match="2 different saves of step 20"):
        assert_same(restored_state(root, [near, far])[1], small_state(20))


def save_anew(place: Path, step: int, *, created_unix_s: float) -> None:
    """Another save of a step, of another state."""
    path = write_step(place, step, small_state(99)) / "manifest.json"
    found = Manifest.decode(path.read_bytes(), path=path)
    attempt = found.attempt.replace("0123abcd", "99999999")
    path.write_bytes(replace(found, attempt=attempt, created_unix_s=created_unix_s).encode())


def test_a_level_that_is_away_is_said_and_what_is_here_is_restored(root: Path, near: Path) -> None:
    fill(root, 10)
    near.symlink_to(near)
    with pytest.warns(RestoreWarning, match="a further level cannot be asked"):
        assert restored_state(root, [near / "below"])[0] == 10


def test_with_nothing_here_and_a_level_away_a_run_does_not_begin_anew(
    root: Path, near: Path
) -> None:
    near.symlink_to(near)
    with (
        pytest.warns(RestoreWarning, match="cannot be asked"),
        pytest.raises(RestoreError, match="not every further level could be asked"),
    ):
        restored_state(root, [near / "below"])


def test_levels_without_steps_leave_a_fresh_run_to_begin(root: Path, near: Path) -> None:
    with opened(root) as store:
        assert restore_alone(store, [near], small_state()) is None


def test_a_brought_step_is_no_sign_that_training_has_gone_back(
    root: Path, near: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(root, 20, 30)
    fill(near, 10)
    with opened(root) as store:
        restore_alone(store, [near], zeros_like(small_state()), step=10)
        assert "is saved while" not in caplog.text
        attempt = store.begin(40)
        shutil.copytree(step_path(near, 10), attempt.path, dirs_exist_ok=True)
        store.publish(attempt)
        assert store.retire() == (10, 20)
    assert "is saved while" not in caplog.text


def test_a_step_that_is_brought_for_an_older_one_stays_until_something_newer_is_committed(
    root: Path, near: Path
) -> None:
    fill(root, 20, 30)
    fill(near, 10)
    with opened(root) as store:
        restore_alone(store, [near], zeros_like(small_state()), step=10)
        assert store.steps() == (10, 20, 30)
