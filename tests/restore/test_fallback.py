"""Which step is restored when some are bad, what is said about it, and what is left untouched."""

from __future__ import annotations

import errno
import logging
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_core
from ckpt_core.errors import (
    ConfigError,
    CorruptCheckpoint,
    NotCommitted,
    RestoreError,
    StateMismatch,
    UnknownFormat,
)
from ckpt_core.layout import MANIFEST_NAME
from ckpt_core.restore import RestoredStep, RestoreRequest, RestoreWarning, load
from ckpt_core.restore.trail import TOUCHED
from ckpt_core.state import Selection
from ckpt_core.store import StepStore
from ckpt_core.system.files import Files
from tests.restore.harness import (
    RANK,
    SHARD,
    FailingReads,
    HangingReads,
    Interrupting,
    Recipe,
    Witness,
    assert_same,
    flip,
    restore,
    restorer,
    small_state,
    write_step,
    zeros_like,
)
from tests.restore.test_corruption import _reformat

STEPS = (10, 20, 30)
LAST_BYTES = 5000


@pytest.fixture
def steps(root: Path) -> dict[int, Path]:
    return {step: write_step(root, step, small_state(step)) for step in STEPS}


@pytest.fixture
def live() -> Any:
    return zeros_like(small_state())


def passed_over(
    action: Callable[[], RestoredStep | None],
) -> tuple[RestoredStep | None, list[str]]:
    """The result, and the texts of all RestoreWarnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = action()
    assert all(issubclass(item.category, RestoreWarning) for item in caught)
    return found, [str(item.message) for item in caught]


def test_the_newest_step_is_restored(root: Path, steps: dict[int, Path], live: Any) -> None:
    found = restore(root, live)
    assert found is not None
    assert (found.step, found.path, found.skipped) == (30, steps[30], ())
    assert_same(found.state, small_state(30))
    assert found.state["weight"].data_ptr() == live["weight"].data_ptr()


def test_a_root_without_steps_gives_none(root: Path, live: Any) -> None:
    assert restore(root, live) is None
    root.mkdir()
    (root / ".inflight").mkdir()
    assert restore(root, live) is None


@pytest.mark.parametrize("name", [SHARD, RANK, MANIFEST_NAME])
def test_a_corrupt_step_is_passed_over_with_a_warning_that_says_why(
    root: Path,
    steps: dict[int, Path],
    live: Any,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    flip(steps[30] / name, 50)
    guard = Witness()
    with caplog.at_level(logging.WARNING):
        found, texts = passed_over(lambda: restorer(root, store=guard).restore(live))
    assert found is not None
    assert found.step == 20
    assert_same(found.state, small_state(20))
    assert_same({**live, "plain": 0}, {**small_state(20), "plain": 0})
    (text,) = texts
    assert "step 30 was not restored" in text
    assert name in text
    assert text in caplog.text
    assert guard.suspects == [30]
    assert guard.protected == []
    assert [step for step, _ in found.skipped] == [30]
    assert name in found.skipped[0][1]


def test_two_corrupt_steps_are_passed_over(root: Path, steps: dict[int, Path], live: Any) -> None:
    flip(steps[30] / SHARD, LAST_BYTES)
    (steps[20] / SHARD).unlink()
    found, texts = passed_over(lambda: restore(root, live))
    assert found is not None
    assert found.step == 10
    assert [step for step, _ in found.skipped] == [30, 20]
    assert len(texts) == 2
    assert_same(found.state, small_state(10))


def test_when_every_step_is_corrupt_each_is_named_and_nothing_starts_from_scratch(
    root: Path, steps: dict[int, Path], live: Any
) -> None:
    for path in steps.values():
        flip(path / SHARD, LAST_BYTES)
    with pytest.raises(CorruptCheckpoint) as caught:
        passed_over(lambda: restore(root, live))
    text = str(caught.value)
    assert all(f"step {step}: {steps[step]}" in text for step in STEPS)
    assert "Live tensors were overwritten" in text


def test_nothing_is_said_of_live_tensors_when_none_was_touched(
    root: Path, steps: dict[int, Path], live: Any
) -> None:
    for path in steps.values():
        (path / RANK).unlink()
    with pytest.raises(CorruptCheckpoint) as caught:
        passed_over(lambda: restore(root, live))
    assert "Live tensors" not in str(caught.value)
    assert_same(live, zeros_like(small_state()))


def test_strict_raises_at_the_first_corrupt_step(
    root: Path, steps: dict[int, Path], live: Any
) -> None:
    flip(steps[30] / SHARD, LAST_BYTES)
    guard = Witness()
    with pytest.raises(CorruptCheckpoint) as caught:
        restorer(root, store=guard).restore(live, RestoreRequest(strict=True))
    assert caught.value.path == steps[30] / SHARD
    assert "Live tensors were overwritten" in caught.value.__notes__[0]
    assert guard.suspects == [30]


def test_an_explicit_step_is_restored_though_it_is_not_the_newest(
    root: Path, steps: dict[int, Path], live: Any
) -> None:
    found = restore(root, live, step=10)
    assert found is not None
    assert_same(found.state, small_state(10))


def test_an_explicit_step_never_falls_back(root: Path, steps: dict[int, Path], live: Any) -> None:
    flip(steps[20] / SHARD, LAST_BYTES)
    with pytest.raises(CorruptCheckpoint):
        restore(root, live, step=20)


def test_a_missing_explicit_step_names_those_that_are_there(
    root: Path, steps: dict[int, Path], live: Any
) -> None:
    with pytest.raises(NotCommitted, match="10, 20, 30"):
        restore(root, live, step=25)


def test_a_state_that_does_not_fit_is_refused_before_anything_changes(
    root: Path, steps: dict[int, Path], live: Any
) -> None:
    live["weight"] = torch.zeros(50, 61)
    before = {key: value for key, value in live.items() if torch.is_tensor(value)}
    with pytest.raises(StateMismatch, match="weight") as caught:
        restore(root, live)
    assert not any(tensor.any() for tensor in before.values())
    assert not hasattr(caught.value, "__notes__")


def test_a_mismatch_of_an_older_step_says_that_tensors_were_touched(root: Path, live: Any) -> None:
    write_step(root, 1, {"other": torch.zeros(3)})
    flip(write_step(root, 2, small_state()) / SHARD, LAST_BYTES)
    with pytest.raises(StateMismatch) as caught:
        passed_over(lambda: restore(root, live))
    assert "Live tensors were overwritten" in caught.value.__notes__[0]
    assert "nothing but live tensors was changed:\n" in str(caught.value)
    with pytest.raises(StateMismatch, match="places; nothing was changed:\n"):
        restore(root, live, step=1)


def test_whatever_ends_a_fallback_says_that_tensors_were_touched(
    root: Path, steps: dict[int, Path], live: Any
) -> None:
    """Also what is no error of ours, and what comes between two steps."""
    flip(steps[30] / SHARD, LAST_BYTES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RestoreWarning, match="step 30 was not restored") as caught:
            restore(root, live)
    assert [note for note in caught.value.__notes__ if "Live tensors" in note] == [TOUCHED]
    with pytest.raises(ConfigError, match="nothing of that name") as other:
        passed_over(lambda: restore(root, live, part=Selection.of("weight_of_30")))
    assert not hasattr(other.value, "__notes__")


def test_a_newer_format_is_not_passed_over(root: Path, steps: dict[int, Path], live: Any) -> None:
    _reformat(steps[30] / MANIFEST_NAME)
    with pytest.raises(UnknownFormat):
        restore(root, live)


# -- trouble that is no corruption ------------------------------------------------------------------


@pytest.mark.parametrize("name", [SHARD, RANK])
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_step_that_cannot_be_read_is_passed_over_and_not_suspect(
    root: Path, steps: dict[int, Path], live: Any, name: str, code: int
) -> None:
    files = FailingReads(f"{steps[30].name}/{name}", code)
    guard = Witness()
    found, texts = passed_over(lambda: restorer(root, files=files, store=guard).restore(live))
    assert found is not None
    assert found.step == 20
    assert "cannot be read" in texts[0]
    assert guard.suspects == []


def test_a_disk_that_reads_nothing_is_no_corruption(
    root: Path, steps: dict[int, Path], live: Any
) -> None:
    with pytest.raises(RestoreError, match="cannot be read") as caught:
        passed_over(lambda: restorer(root, files=FailingReads("")).restore(live))
    assert not isinstance(caught.value, CorruptCheckpoint)
    with pytest.raises(RestoreError, match="cannot be read") as failed:
        load(steps[10], files=FailingReads(SHARD))
    assert isinstance(failed.value.__cause__, OSError)


@pytest.mark.parametrize("name", [SHARD, RANK])
def test_a_read_that_hangs_is_given_up_and_named(
    root: Path, steps: dict[int, Path], live: Any, name: str
) -> None:
    files = HangingReads(name)
    began = time.monotonic()
    try:
        with pytest.raises(RestoreError, match="storage is probably stuck") as caught:
            restorer(root, files=files, timeout_s=0.3).restore(live)
        assert time.monotonic() - began < 60
        assert caught.value.path is not None
        assert caught.value.path.is_relative_to(steps[30])
    finally:
        files.released.set()
    deadline = time.monotonic() + 60
    while _reading_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _reading_threads(), "threads stay behind after the storage came back"


def _reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ckpt-re")]


# -- a writer in another process --------------------------------------------------------------------


def _retire(path: Path) -> None:
    """What a writer does to a step that it retires: the name goes, then the bytes."""
    gone = path.parent / ".inflight"
    gone.mkdir()
    (gone / "a").mkdir()
    shutil.move(path, gone / "a")
    shard = gone / "a" / path.name / SHARD
    shard.write_bytes(bytes(shard.stat().st_size))


@pytest.mark.parametrize("name", [MANIFEST_NAME, RANK, SHARD])
@pytest.mark.parametrize("checksum", [True, False])
def test_a_step_that_is_retired_while_it_is_read_is_not_taken_for_corrupt(
    root: Path, live: Any, name: str, checksum: bool
) -> None:
    paths = {step: write_step(root, step, small_state(step)) for step in (10, 20)}
    paths[30] = write_step(root, 30, small_state(30), Recipe(checksum=checksum))
    files = Interrupting(f"{paths[30].name}/{name}", lambda: _retire(paths[30]))
    guard = Witness()
    found = restorer(root, files=files, store=guard).restore(live)
    assert found is not None
    assert found.step == 20
    assert_same(found.state, small_state(20))
    assert guard.suspects == []


def test_a_newer_step_that_appears_meanwhile_is_taken(root: Path, live: Any) -> None:
    path = write_step(root, 10, small_state(10))

    def advance() -> None:
        write_step(root, 11, small_state(11))
        _retire(path)

    found = restorer(root, files=Interrupting(RANK, advance)).restore(live)
    assert found is not None
    assert found.step == 11


def test_a_step_that_is_saved_again_meanwhile_is_read_again(root: Path, live: Any) -> None:
    path = write_step(root, 10, small_state(10))

    def replace() -> None:
        _retire(path)
        write_step(root, 10, small_state(11))

    found = restorer(root, files=Interrupting(SHARD, replace)).restore(live)
    assert found is not None
    assert_same(found.state, small_state(11))


def test_load_of_a_root_follows_its_newest_step(root: Path) -> None:
    path = write_step(root, 10, small_state(10))

    def advance() -> None:
        write_step(root, 11, small_state(11))
        _retire(path)

    assert_same(load(root, files=Interrupting(SHARD, advance)), small_state(11))


def test_steps_that_all_vanish_are_no_fresh_start(root: Path, live: Any) -> None:
    path = write_step(root, 10, small_state(10))
    with pytest.raises(RestoreError, match="retired while it was read"):
        restorer(root, files=Interrupting(SHARD, lambda: _retire(path))).restore(live)


def test_the_store_guards_the_step_that_is_read(root: Path, live: Any) -> None:
    paths = {step: write_step(root, step, small_state(step)) for step in STEPS}
    flip(paths[30] / SHARD, LAST_BYTES)
    store = StepStore(root, files=Files(), keep_last=1, keep_every=None, spare_slots=0)
    store.open()
    files = Interrupting(f"{paths[20].name}/{SHARD}", lambda: _check_kept(store))
    reader = restorer(root, files=files)
    reader._guard = store
    found, _ = passed_over(lambda: reader.restore(live))
    assert found is not None
    assert found.step == 20
    store.quarantine_suspects()
    assert store.steps() == (20,)
    store.close()


def _check_kept(store: StepStore) -> None:
    store.retire()
    assert store.steps() == (20, 30)


OLDER_TORCH = """
import sys
import torch

# As in a release that does not have it yet.
kept = torch.float8_e5m2
del torch.float8_e5m2

from ckpt_core import RestoreError, load

try:
    load(sys.argv[1])
except RestoreError as exc:
    print(type(exc).__name__, exc)
"""


def test_what_this_torch_has_no_dtype_for_is_not_called_damaged(root: Path) -> None:
    with ckpt_core.Checkpointer(root) as ck:
        ck.save(20, {"a": torch.zeros(3).to(torch.float8_e5m2)}).committed.result()
    ran = subprocess.run(
        [sys.executable, "-c", OLDER_TORCH, str(root)], capture_output=True, text=True, check=False
    )
    assert ran.stdout.startswith(
        f"RestoreError leaf 'a' is of dtype 'float8_e5m2', which torch {torch.__version__} does not have"
    ), ran
    assert "Nothing is damaged" in ran.stdout
