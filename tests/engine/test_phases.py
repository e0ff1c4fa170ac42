"""pipelined=False: nothing is written before the whole snapshot is staged, and the bound of memory holds."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_core
from ckpt_core import Checkpointer, CkptError, ConfigError, Options, StagingError
from ckpt_core.system.files import Files
from tests.engine.test_barriers import GatedFiles
from tests.faults.layers import FaultAt

SLOW_S = 60.0
PAGE = 4096


class Watched(Files):
    """Real files that note what shard files are asked for."""

    def __init__(self) -> None:
        self.wrote = threading.Event()
        self.bytes = 0

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        super().pwrite(fd, data, offset)
        if isinstance(data, memoryview):
            self.bytes += len(data)
            self.wrote.set()


def options(**changes: Any) -> Options:
    return Options(
        **({"chunk_bytes": PAGE, "pipelined": False, "in_flight": 1, "keep_last": None} | changes)
    )


def big(value: int = 0) -> dict[str, torch.Tensor]:
    return {name: torch.full((40_000,), float(value + at)) for at, name in enumerate("abcd")}


def many_small() -> dict[str, torch.Tensor]:
    """Copied inside `save`, into several chunks."""
    return {f"small{at:02d}": torch.full((1000,), float(at)) for at in range(40)}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return list(first) == list(second) and all(torch.equal(first[k], second[k]) for k in first)


def shard_bytes(place: Path, state: Any) -> int:
    """How long the shard file of a state is."""
    with Checkpointer(place, Options()) as ck:
        path = ck.save(1, state).committed.result(SLOW_S)
    return (path / "shard-00000-0.safetensors").stat().st_size


@contextmanager
def held_stager(ck: Checkpointer) -> Iterator[None]:
    """The stager stands still inside."""
    go = threading.Event()
    ck._engine.pipeline.stager.submit(lambda: go.wait(SLOW_S))
    try:
        yield
    finally:
        go.set()


@pytest.mark.parametrize("pipelined", [True, False])
def test_no_byte_reaches_the_shard_file_before_all_leaves_are_staged(
    tmp_path: Path, pipelined: bool
) -> None:
    state, files = {**many_small(), **big()}, Watched()
    with Checkpointer(tmp_path, options(pipelined=pipelined), files=files) as ck:
        with held_stager(ck):
            handle = ck.save(1, state)
            # The front is several chunks, which are full by now.
            assert files.wrote.wait(SLOW_S if pipelined else 0.3) is pipelined
            assert not handle.staged.done()
            assert ck.staging_peak_bytes > 8 * PAGE
        handle.committed.result(SLOW_S)
    assert same(ckpt_core.load(tmp_path), state)


@pytest.mark.parametrize("pipelined", [True, False])
def test_nor_do_layers_before_the_save_is_sealed(tmp_path: Path, pipelined: bool) -> None:
    state, files = big(), Watched()
    whole = {"layers": state, "rest": torch.full((30_000,), 7.0), "step": 1}
    with Checkpointer(tmp_path, options(pipelined=pipelined), files=files) as ck:
        save = ck.begin(1, state)
        save.stage("bda")
        ck.wait_staged(["a"])
        assert files.wrote.wait(SLOW_S if pipelined else 0.3) is pipelined
        state["d"].fill_(-1)  # it is copied
        save.stage("c")
        save.seal(whole).committed.result(SLOW_S)
    tree = ckpt_core.load(tmp_path)
    assert tree["layers"]["d"].eq(3).all() and tree["rest"].eq(7).all()
    assert tree["layers"]["c"].eq(2).all()


def test_the_bound_of_memory_is_held_exactly(tmp_path: Path) -> None:
    need = shard_bytes(tmp_path / "other", big())
    with Checkpointer(tmp_path / "it", options(staging_bytes=need)) as ck:
        for step in range(3):
            ck.wait_staged()
            ck.save(step, big(step))
        ck.wait()
        assert ck.staging_peak_bytes == need
        assert same(ckpt_core.load(ck.root / "step-000000000001"), big(1))


def test_too_small_a_bound_is_an_error_with_field_value_and_need(tmp_path: Path) -> None:
    need = shard_bytes(tmp_path / "other", big())
    with (
        Checkpointer(tmp_path / "it", options(staging_bytes=need - 1)) as ck,
        pytest.raises(
            ConfigError,
            match=rf"staging_bytes={need - 1} is too small: with pipelined=False .*"
            rf"at least .* \({need} bytes\) are needed; raise staging_bytes, or set pipelined=True",
        ),
    ):
        ck.save(1, big())
    with Checkpointer(tmp_path / "it", options(staging_bytes=need - 1, mode="direct")) as ck:
        ck.save(1, big(1)).committed.result(SLOW_S)  # a mapped file needs no staging memory
        assert same(ckpt_core.load(ck.root), big(1))
    with Checkpointer(tmp_path / "it", options(staging_bytes=need - 1, pipelined=True)) as ck:
        ck.save(2, big())


def test_a_state_that_grows_is_an_error_or_gets_the_memory_that_it_needs(tmp_path: Path) -> None:
    need = shard_bytes(tmp_path / "other", big())
    with Checkpointer(tmp_path / "it", options(staging_bytes=need)) as ck:
        ck.save(1, big())
        with pytest.raises(ConfigError, match=f"staging_bytes={need} is too small"):
            ck.save(2, big() | {"e": torch.ones(8000)})
        ck.save(3, big())
    with Checkpointer(tmp_path / "it", options()) as ck:
        for step in (4, 5, 6):
            state = big() | {str(at): torch.full((9000,), float(at)) for at in range(step)}
            ck.save(step, state)
            ck.wait_staged()
        ck.wait()
        assert same(ckpt_core.load(tmp_path / "it"), state)


def test_two_in_flight_share_memory_for_one(tmp_path: Path) -> None:
    need = shard_bytes(tmp_path / "other", big()) + PAGE  # each has a front of its own
    files = GatedFiles()
    chosen = options(in_flight=2, staging_bytes=need)
    with Checkpointer(tmp_path / "it", chosen, files=files) as ck:
        first = ck.save(1, big(1))
        ck.wait_staged()
        second = ck.save(2, big(2))
        with pytest.raises(TimeoutError):
            second.staged.result(0.2)  # the first has all the memory until it is written
        files.gate.set()
        for save in (first, second):
            save.committed.result(SLOW_S)
        assert ck.staging_peak_bytes <= need
        assert same(ckpt_core.load(ck.root), big(2))


def test_memory_for_exactly_one_makes_the_next_save_wait_until_it_is_written(
    tmp_path: Path,
) -> None:
    need = shard_bytes(tmp_path / "other", big())
    files = GatedFiles()
    chosen = options(in_flight=2, staging_bytes=need)
    with Checkpointer(tmp_path / "it", chosen, files=files) as ck:
        first = ck.save(1, big(1))
        first.staged.result(SLOW_S)
        opener = threading.Timer(0.2, files.gate.set)
        opener.start()
        ck.save(2, big(2)).committed.result(SLOW_S)
        opener.join()
        assert files.gate.is_set() and ck.steps() == (1, 2)
        assert ck.staging_peak_bytes == need


def test_layers_and_their_rest_are_held_by_two_saves_at_once(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, options(in_flight=2)) as ck:
        states = {step: big(step) for step in (1, 2)}
        open_saves = {step: ck.begin(step, state) for step, state in states.items()}
        for name in "abcd":
            for step in (1, 2):
                open_saves[step].stage(name)
        handles = [
            save.seal({"w": states[step], "m": torch.full((90_000,), float(step))})
            for step, save in open_saves.items()
        ]
        for handle in handles:
            handle.committed.result(SLOW_S)
        for step, state in states.items():
            tree = ckpt_core.load(ck.root / f"step-{step:012d}")
            assert same(tree["w"], state) and tree["m"].eq(step).all()


def test_a_rest_that_does_not_fit_is_refused_and_the_save_stays_open(tmp_path: Path) -> None:
    state, rest = big(), torch.ones(100_000)
    need = 40 * PAGE + sum(t.nbytes for t in state.values())
    with Checkpointer(tmp_path, options(staging_bytes=need)) as ck:
        save = ck.begin(1, state)
        save.stage(state)
        with pytest.raises(ConfigError, match=rf"staging_bytes={need} is too small.* at least \d+"):
            save.seal({"w": state, "rest": rest})
        save.seal({"w": state, "rest": rest[:100].clone()})
        ck.wait()
        assert ck.steps() == (1,) and ck.staging_peak_bytes <= need


@pytest.mark.parametrize("names", [("pwrite",), ("sync",), ("create",)])
def test_a_failed_save_gives_all_its_memory_back(tmp_path: Path, names: tuple[str, ...]) -> None:
    need = shard_bytes(tmp_path / "other", big())
    fault = FaultAt(None, errno.EIO, lasting=True, names=names)
    chosen = options(staging_bytes=need, on_error="warn")
    with Checkpointer(tmp_path / "it", chosen, files=fault.files()) as ck:
        ck.save(1, big(1)).committed.result(SLOW_S)
        fault.n = 0
        assert ck.save(2, big(2)).committed.exception(SLOW_S) is not None
        fault.mend()
        ck.save(3, big(3)).committed.result(SLOW_S)
        assert ck.steps() == (1, 3) and ck.staging_peak_bytes == need
        assert same(ckpt_core.load(ck.root), big(3))
        assert ck._engine.pipeline.memory._pool is not None
        assert ck._engine.pipeline.memory._pool._held == 0


def test_an_aborted_and_an_overdue_save_give_their_memory_back(tmp_path: Path) -> None:
    chosen = options(timeout=8.0, on_error="warn", staging_bytes="1MiB")
    with Checkpointer(tmp_path, chosen) as ck:
        save = ck.begin(1, big())
        save.stage("ab")
        save.abort()
        overdue = ck.begin(2, big())
        overdue.stage("abc")
        ck.save(3, big(3)).committed.result(SLOW_S)  # waits for the place of step 2
        with pytest.raises(CkptError):
            overdue.seal().committed.result(SLOW_S)
        assert ck.steps() == (3,)
        assert ck._engine.pipeline.memory._pool is not None
        assert ck._engine.pipeline.memory._pool._held == 0


def test_a_checkpointer_closes_while_chunks_are_held_back(tmp_path: Path) -> None:
    ck = Checkpointer(tmp_path, options())
    ck.begin(1, big()).stage("ab")
    with pytest.raises(StagingError, match="never sealed"):
        ck.close()
    with Checkpointer(tmp_path) as again:
        assert again.steps() == ()


def test_named_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, options()) as ck:
        with pytest.raises(ConfigError, match=r"pipelined=False: the length of named files"):
            ck.begin_files(1, "tag")
        ck.save(2, big())


def test_a_wait_that_ends_too_early_says_what_is_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(tmp_path) as ck:
        held = ck.begin(7, {"w": torch.ones(4)})
        with monkeypatch.context() as patch:
            patch.setattr(ck._engine, "wait", lambda level, last: False)
            with pytest.raises(StagingError, match=r"step 7, staging for \d\.\d s\. Committed"):
                ck.wait()
        held.abort()
