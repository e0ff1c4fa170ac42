"""One process, end to end: what was saved comes back bit for bit, and the root holds what it should."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_training import Run, bytes_of, same

import ckpt_core
from ckpt_core import (
    Checkpointer,
    ConfigError,
    EveryNSteps,
    Mode,
    Options,
    PersistError,
    StateMismatch,
    verify,
)
from ckpt_core.coordination.options import StoreOptions
from ckpt_core.layout import MANIFEST_NAME
from ckpt_core.system.files import Files

SMALL = Options(chunk_bytes=8192, staging_bytes="256KiB", in_flight=2)


def restored(root: Path, **options: Any) -> Run:
    run = Run(seed=99)
    with Checkpointer(root, SMALL) as ck:
        found = ck.restore(run.state(), **options)
    assert found is not None
    run.step = found.state["step"]
    return run


@pytest.mark.parametrize("mode", ["auto", "host", "direct", "device"])
@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_a_run_that_resumes_ends_like_one_that_never_stopped(
    tmp_path: Path, mode: str, direct_io: str
) -> None:
    run = Run()
    options = Options(chunk_bytes=8192, mode=mode, direct_io=direct_io)
    with Checkpointer(tmp_path, options) as ck:
        for _ in range(5):
            run.forward()
            ck.wait_staged()
            run.update()
            ck.save(run.step, run.state())
    for _ in range(3):
        run.train()
    end = run.copy()
    again = restored(tmp_path)
    assert again.step == 5
    for _ in range(3):
        again.train()
    assert same(again.copy(), end)


def test_an_empty_root_restores_nothing_and_changes_nothing(tmp_path: Path) -> None:
    run = Run()
    before = run.copy()
    with Checkpointer(tmp_path / "not" / "yet") as ck:
        assert ck.restore(run.state()) is None
        assert ck.latest_step() is None
    assert same(run.copy(), before)


def test_a_handle_tells_when_staged_and_where_committed(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, SMALL) as ck:
        handle = ck.save(7, Run().state())
        handle.staged.result(timeout=60)
        path = handle.committed.result(timeout=60)
        assert path == tmp_path / "step-000000000007"
        assert ck.steps() == (7,)
        assert 0 < handle.stall_s < 60


def test_cancelling_a_future_does_not_disturb_the_save(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, SMALL) as ck:
        handle = ck.save(1, Run().state())
        assert not handle.staged.cancel()
        assert not handle.committed.cancel()
        handle.committed.result(timeout=60)


def test_load_gives_the_plain_tree(tmp_path: Path) -> None:
    run = Run()
    run.train()
    with Checkpointer(tmp_path, SMALL) as ck:
        ck.save(1, run.state())
    tree = ckpt_core.load(tmp_path)
    assert tree["step"] == 1
    expected = run.model.state_dict()
    assert all(bytes_of(tree["model"][key]) == bytes_of(expected[key]) for key in expected)
    assert tree["optimizer"]["param_groups"][0]["lr"] == run.optimizer.param_groups[0]["lr"]


def test_retention_keeps_the_newest_the_multiples_and_the_pinned(tmp_path: Path) -> None:
    options = Options(keep_last=2, keep_every=4, chunk_bytes=8192)
    state = {"w": torch.arange(5000.0)}
    with Checkpointer(tmp_path, options) as ck:
        for step in range(1, 11):
            ck.save(step, state).committed.result(timeout=60)
            if step == 3:
                ck.pin(3)
        assert ck.steps() == (3, 4, 8, 9, 10)
        ck.unpin(3)
        ck.save(11, state)
        ck.wait()
        assert ck.steps() == (4, 8, 10, 11)
        ck.pin(10)
        ck.save(12, state).committed.result(timeout=60)
        assert ck.steps() == (4, 8, 10, 11, 12)
        ck.unpin(10, retire=True)
        assert ck.steps() == (4, 8, 11, 12)


def test_storage_is_bounded_and_shard_files_are_recycled(tmp_path: Path) -> None:
    state = {"w": torch.randn(100_000)}
    inodes = []
    with Checkpointer(tmp_path, Options(keep_last=1, in_flight=1)) as ck:
        for step in range(6):
            path = ck.save(step, state).committed.result(timeout=60)
            inodes.append((path / "shard-00000-0.safetensors").stat().st_ino)
        files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(set(inodes)) < len(inodes)
    size = sum(path.stat().st_blocks * 512 for path in files)
    assert size <= 3 * (400_000 + 100_000)  # in_flight + kept + 1


def test_saving_a_step_again_replaces_it_as_a_whole(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, SMALL) as ck:
        ck.save(5, {"w": torch.zeros(3000)}).committed.result(timeout=60)
        ck.save(5, {"w": torch.ones(3000), "more": 1}).committed.result(timeout=60)
        assert ck.steps() == (5,)
    assert ckpt_core.load(tmp_path)["w"].sum() == 3000


def test_a_state_that_grows_and_shrinks_between_saves_is_saved_whole(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Options(keep_last=None, chunk_bytes=8192)) as ck:
        for step, size in enumerate([10, 100_000, 7, 400_000, 0, 1]):
            many = {str(i): torch.full((3,), float(i)) for i in range(size % 1000)}
            ck.save(step, {"w": torch.arange(float(size)), "many": many})
        ck.wait()
        for step, size in enumerate([10, 100_000, 7, 400_000, 0, 1]):
            tree = ckpt_core.load(tmp_path / f"step-{step:012d}")
            assert torch.equal(tree["w"], torch.arange(float(size)))
    assert verify(tmp_path).ok


def test_a_state_without_any_tensor_can_be_saved(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, SMALL) as ck:
        ck.save(1, {"epoch": 3, "name": "x"})
    assert ckpt_core.load(tmp_path) == {"epoch": 3, "name": "x"}


def test_staging_never_exceeds_its_bound_however_large_the_state(tmp_path: Path) -> None:
    state = {f"w{i}": torch.randn(50_000) for i in range(40)}
    options = Options(staging_bytes="512KiB", chunk_bytes="64KiB", in_flight=3)
    with Checkpointer(tmp_path, options) as ck:
        for step in range(6):
            ck.save(step, state)
        ck.wait()
        assert 0 < ck.staging_peak_bytes <= 512 * 1024


def test_a_mismatch_lists_every_difference_and_touches_nothing(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, SMALL) as ck:
        ck.save(1, {"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(3)})
        ck.wait()
        live = {"a": torch.zeros(4), "b": torch.zeros(3, dtype=torch.float64), "d": torch.zeros(3)}
        with pytest.raises(StateMismatch) as info:
            ck.restore(live)
        assert len(info.value.problems) == 4
        assert all(tensor.sum() == 0 for tensor in live.values())


def test_the_callers_mistakes_are_named_and_lose_nothing(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, SMALL) as ck:
        ck.save(1, {"w": torch.ones(3)}).committed.result(timeout=60)
        for bad in (-1, 1.5, "3", True, 10**18):
            with pytest.raises(ConfigError, match="step="):
                ck.save(bad, {"w": torch.ones(3)})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="lock"):
            ck.save(2, {"lock": threading.Lock()})
        ck.save(3, {"w": torch.ones(3)})
        ck.wait()
        assert ck.steps() == (1, 3)
    with pytest.raises(ConfigError, match="closed"):
        ck.save(4, {"w": torch.ones(3)})
    with pytest.raises(ConfigError, match="root="):
        Checkpointer("")
    with pytest.raises(ConfigError, match="options="):
        Checkpointer(tmp_path, {"in_flight": 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="on_sigterm="):
        Checkpointer(tmp_path, on_sigterm="exit")  # type: ignore[arg-type]


NO_STEPS = (torch.tensor(5.5), torch.ones(2), np.array(5.5), np.arange(2), None)


@pytest.mark.parametrize(
    ("field", "call"),
    [
        *[("step=", lambda ck, bad=bad: ck.save(bad, {})) for bad in NO_STEPS],
        *[("step=", lambda ck, bad=bad: ck.restore({}, step=bad)) for bad in NO_STEPS[:-1]],
        *[("step=", lambda ck, bad=bad: ck.pin(bad)) for bad in NO_STEPS],
        *[("step=", lambda _, bad=bad: EveryNSteps(2).should_save(bad)) for bad in NO_STEPS],
        ("coordination=", lambda ck: Checkpointer(ck.root, coordination="torch")),
        ("coordination=", lambda ck: Checkpointer(ck.root, coordination=5)),
        ("tensors=", lambda ck: ck.begin(5, [torch.ones(3)])),
        ("per_rank=", lambda ck: ck.save(5, {}, per_rank=5)),
        ("replicated=", lambda ck: ck.save(5, {}, replicated=5)),
        ("only=", lambda ck: ck.restore({}, only=5)),
        ("rename=", lambda ck: ck.restore({}, rename={"model": 5})),
        ("rename=", lambda ck: ck.restore({}, rename={5: "model"})),
        ("leave_barrier_to_owner", lambda ck: ck.leave_barrier_to_owner(5)),
        ("staging_bytes=", lambda _: Options(staging_bytes="9" * 400)),
        ("staging_bytes=", lambda _: Options(staging_bytes=1 << 63)),
        ("levels: number 1: 1 is no field", lambda _: Options(levels=[{1: 2}])),
        ("levels=", lambda _: Options.from_env({"CKPT_CORE_LEVELS": "[" * 100_000})),
        ("root=", lambda _: Checkpointer("a\0b")),
        ("sigterm_grace=", lambda ck: Checkpointer(ck.root, sigterm_grace=-1)),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(
    tmp_path: Path, field: str, call: Callable[[Checkpointer], object]
) -> None:
    with Checkpointer(tmp_path, SMALL) as ck:
        ck.save(1, {"model": torch.ones(3)}).committed.result(timeout=60)
        with pytest.raises(ConfigError, match=field):
            call(ck)


def test_a_root_in_the_home_is_found_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with Checkpointer("~/ckpts", SMALL) as ck:
        assert ck.root == tmp_path / "ckpts"
        ck.save(1, {"w": torch.ones(3)}).committed.result(timeout=60)
    assert ckpt_core.committed_steps("~/ckpts") == (1,)
    assert not (tmp_path / "~").exists()


def test_a_timeout_of_years_is_waited_with_and_a_longer_one_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Options(timeout=threading.TIMEOUT_MAX)) as ck:
        ck.begin(1, {"w": torch.ones(3)}).abort()
        ck.save(2, {"w": torch.ones(3)}).committed.result(timeout=60)
    for bad in (timedelta.max, 1e10):
        for make in (Options, StoreOptions):
            with pytest.raises(ConfigError, match="timeout="):
                make(timeout=bad)


def test_too_little_staging_memory_is_said_before_anything_starts(tmp_path: Path) -> None:
    options = Options(staging_bytes="64KiB", in_flight=2)
    with Checkpointer(tmp_path, options) as ck:
        with pytest.raises(ConfigError, match="staging_bytes"):
            ck.save(1, {str(i): torch.zeros(1000) for i in range(100)})
        ck.save(2, {"w": torch.zeros(100_000)})
        ck.wait()
        assert ck.steps() == (2,)


def test_a_second_checkpointer_of_the_root_is_refused_and_names_the_owner(tmp_path: Path) -> None:
    with (
        Checkpointer(tmp_path),
        pytest.raises(ckpt_core.RootBusy, match=str(os.getpid())),
    ):
        Checkpointer(tmp_path)
    Checkpointer(tmp_path).close()


def test_prepare_allocates_what_the_saves_will_use(tmp_path: Path) -> None:
    state = {"w": torch.randn(300_000)}
    with Checkpointer(tmp_path, Options(chunk_bytes="64KiB")) as ck:
        ck.prepare(state)
        ck.save(1, state)
    assert torch.equal(ckpt_core.load(tmp_path)["w"], state["w"])


def test_events_tell_the_life_of_each_save(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, SMALL) as ck:
        ck.save(1, Run().state()).committed.result(timeout=60)
        ck.wait()
        names = [str(event.name) for event in ck.events.events() if event.step == 1]
    assert names[0] == "begin"
    assert names[-1] == "committed"
    assert sorted(names) == ["begin", "committed", "persisted", "staged"]


def test_a_save_is_told_to_be_persisted_once_its_files_are_synced(tmp_path: Path) -> None:
    order: list[str] = []

    class Syncs(Files):
        def sync(self, fd: int) -> None:
            super().sync(fd)
            order.append(Path(f"/proc/self/fd/{fd}").readlink().name)

    with Checkpointer(tmp_path, SMALL, files=Syncs()) as ck:
        ck.events.subscribe(lambda event: order.append(event.name))
        path = ck.save(1, Run().state()).committed.result(timeout=60)
    written = {file.name for file in path.iterdir()}
    assert MANIFEST_NAME in written
    assert set(order[: order.index("persisted")]) & written == written - {MANIFEST_NAME}


def test_a_save_whose_sync_fails_is_not_told_to_be_persisted(tmp_path: Path) -> None:
    class Failing(Files):
        def sync(self, fd: int) -> None:
            raise OSError(errno.EIO, "a sync that fails")

    with (
        pytest.raises(PersistError, match="a sync that fails"),
        Checkpointer(tmp_path, SMALL, files=Failing()) as ck,
    ):
        ck.save(1, Run().state())
    names = [event.name for event in ck.events.events()]
    assert "failed" in names and "persisted" not in names


def test_modes_are_all_covered_by_the_round_trip_above() -> None:
    assert {str(mode) for mode in Mode} == {"auto", "host", "direct", "device"}


def test_a_resume_that_is_given_a_step_in_place_of_its_root_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "root") as ck:
        where = ck.save(1, {"w": torch.ones(3)}).committed.result(60)
    before = sorted(where.iterdir())
    with pytest.raises(ConfigError, match=f"one step, or .*, and no root: give .*{where.parent}"):
        Checkpointer(where)
    assert sorted(where.iterdir()) == before
