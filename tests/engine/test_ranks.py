"""Checkpointers of several ranks, as threads of one process: real saves and restores, and a real store."""

from __future__ import annotations

import errno
import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import (
    Checkpointer,
    CommitError,
    ConfigError,
    CoordinationTimeout,
    Options,
    RestoreError,
    load,
)
from ckpt_core.layout import MANIFEST_NAME, rank_manifest_name
from ckpt_core.system.files import Files
from tests.coordination.conftest import Ranks, no_name_server, ranks

__all__ = ["no_name_server", "ranks"]

OPTIONS = Options(timeout=60, on_error="warn", keep_last=5)
LONG_S = 60.0


class Hanging(Files):
    """Storage that hangs once, as a file of a step is written."""

    def __init__(self, name: str = MANIFEST_NAME) -> None:
        self.name, self.step = name, -1
        self.reached, self.gate = threading.Event(), threading.Event()

    def write_new(self, path: Path, data: Any) -> None:
        if path.name == self.name and path.parent.name.startswith(f"{self.step:012d}-"):
            self.step = -1
            self.reached.set()
            assert self.gate.wait(LONG_S)
        super().write_new(path, data)


class Full(Files):
    """Storage that has no room for what this rank says of its files."""

    def write_new(self, path: Path, data: Any) -> None:
        if path.name == rank_manifest_name(1):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        super().write_new(path, data)


class Job:
    """A Checkpointer on each rank."""

    def __init__(self, crew: Ranks, roots: list[Path], files: dict[int, Files]) -> None:
        def make(rank: int) -> Checkpointer:
            chosen = files.get(rank, Files())
            store = crew.stores[rank]
            return Checkpointer(roots[rank], OPTIONS, coordination=store, files=chosen)

        self.crew = crew
        self.parts: list[Checkpointer] = self.do(make)

    def do(self, work: Callable[[int], Any]) -> list[Any]:
        """What it returns on every rank."""
        found = self.crew.do(lambda store: work(store.info.rank))
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return found

    def save(self, step: int, value: int) -> list[Any]:
        """The handle of each rank."""
        return self.do(lambda rank: self.parts[rank].save(step, state(value)))

    def commit(self, step: int, value: int) -> None:
        for handle in self.save(step, value):
            handle.committed.result(LONG_S)

    def restore(self) -> list[tuple[int, Any]]:
        """The step and the value of each rank."""

        def work(rank: int) -> tuple[int, Any]:
            found = self.parts[rank].restore(state(0))
            assert found is not None
            return found.step, found.state["value"]

        return self.do(work)

    def give_up(self, handles: list[Any]) -> None:
        """As if the deadline of what is in flight had passed on every rank."""
        for part, handle in zip(self.parts, handles, strict=True):
            flights = part._engine.flights
            for inflight in flights.active():
                inflight.deadline = 0.0
            flights.do(lambda: None)  # the watchdog looks at the clock again
            assert handle.committed.exception(LONG_S) is not None

    def close(self) -> None:
        self.do(lambda rank: self.parts[rank].close())


def state(value: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(value)), "value": value}


def await_nothing_in_flight(root: Path) -> None:
    """The finisher is through with what was given up when its directory is gone."""
    until = time.monotonic() + LONG_S
    while any((root / ".inflight").iterdir()):
        assert time.monotonic() < until, "what was given up is still there"
        time.sleep(0.01)


def test_a_rank_that_has_given_up_a_save_does_not_vote_for_it(
    tmp_path: Path, ranks: Callable[..., Ranks]
) -> None:
    disk = Hanging(rank_manifest_name(1))
    job = Job(ranks(nodes="aa"), [tmp_path] * 2, {1: disk})
    disk.step = 10
    handles = job.save(10, 1)
    assert disk.reached.wait(LONG_S)
    job.parts[1]._engine.flights.settle_all("nobody waits for it")
    disk.gate.set()
    assert "rank 1" in str(handles[0].committed.exception(LONG_S))
    await_nothing_in_flight(tmp_path)
    assert job.parts[0].steps() == ()
    job.commit(10, 2)
    job.close()


@pytest.mark.parametrize("nodes", ["aa", "ab"])
def test_a_save_that_was_given_up_never_replaces_a_later_one_of_its_step(
    tmp_path: Path, ranks: Callable[..., Ranks], nodes: str
) -> None:
    roots, disk = [tmp_path / node for node in nodes], Hanging()
    late = 0 if nodes == "aa" else 1
    job = Job(ranks(nodes=nodes), roots, {late: disk})
    disk.step = 10
    handles = job.save(10, 1)
    assert disk.reached.wait(LONG_S)
    job.give_up(handles)
    job.commit(10, 2)
    disk.gate.set()
    await_nothing_in_flight(roots[late])
    assert load(roots[late] / "step-000000000010")["value"] == 2
    assert job.restore() == [(10, 2)] * 2
    job.close()


def test_a_save_that_was_given_up_never_comes_back_behind_a_restore(
    tmp_path: Path, ranks: Callable[..., Ranks]
) -> None:
    disk = Hanging()
    job = Job(ranks(nodes="aa"), [tmp_path] * 2, {0: disk})
    job.commit(5, 5)
    disk.step = 10
    handles = job.save(10, 1)
    assert disk.reached.wait(LONG_S)
    job.give_up(handles)
    assert job.restore() == [(5, 5)] * 2
    job.commit(6, 6)
    disk.gate.set()
    await_nothing_in_flight(tmp_path)
    assert job.parts[0].steps() == (5, 6)
    job.close()


def test_saves_that_failed_keep_nothing_of_their_state(
    tmp_path: Path, ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "ckpt_core")  # what is captured would keep the errors
    job = Job(ranks(nodes="aa"), [tmp_path] * 2, {1: Full()})
    tensors: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def save(rank: int, step: int) -> None:
        tensor = torch.full((100_000,), float(step))
        tensors.add(tensor)
        with pytest.raises(CommitError, match="No space left"):
            job.parts[rank].save(step, {"w": tensor}).committed.result(LONG_S)

    for step in range(8):
        job.do(lambda rank, step=step: save(rank, step))
    until = time.monotonic() + LONG_S
    while (
        len(tensors) > 4
    ):  # what the last save has left, and what its threads are about to let go of
        assert time.monotonic() < until, len(tensors)
        gc.collect()
    job.close()


def test_a_rank_that_was_interrupted_in_a_restore_takes_part_in_the_next_one(
    tmp_path: Path, ranks: Callable[..., Ranks]
) -> None:
    job = Job(ranks(nodes="aa"), [tmp_path] * 2, {})
    job.commit(5, 5)
    for topic in ("restore.read", "restore.done"):  # the other rank has waited there, and is ahead
        with pytest.raises(CoordinationTimeout):
            job.crew.stores[0].gather(topic, None, 0.1)
    assert job.restore() == [(5, 5)] * 2
    job.close()


def test_a_save_that_one_rank_alone_asked_for_costs_none_behind_the_next_restore(
    tmp_path: Path, ranks: Callable[..., Ranks]
) -> None:
    job = Job(ranks(nodes="aa"), [tmp_path] * 2, {})
    job.commit(5, 5)
    job.crew.stores[0].attempt_id(
        20
    )  # `save` raised an earlier failure there, and was called again
    assert job.restore() == [(5, 5)] * 2
    job.commit(20, 20)
    assert job.restore() == [(20, 20)] * 2
    job.commit(20, 21)
    assert job.restore() == [(20, 21)] * 2
    job.close()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("wrong", ["only", "step", "unsealed", "interrupted"])
def test_what_one_rank_alone_is_refused_before_it_looks_for_steps_the_others_hear(
    wrong: str, rank: int, tmp_path: Path, ranks: Callable[..., Ranks]
) -> None:
    job = Job(ranks(nodes="aa"), [tmp_path] * 2, {})
    job.commit(10, 1)
    own = job.parts[rank]

    def refused() -> BaseException | None:
        opened = own.begin(20, {"w": torch.zeros(3)}) if wrong == "unsealed" else None
        flights = own._engine.flights
        wait = flights.wait_empty
        if wrong == "interrupted":
            flights.wait_empty = _interrupted  # type: ignore[method-assign]
        try:
            own.restore(
                state(0),
                only=[] if wrong == "only" else None,
                step="1" if wrong == "step" else None,  # type: ignore[arg-type]
            )
        except BaseException as exc:
            return exc
        finally:
            flights.wait_empty = wait  # type: ignore[method-assign]
            if opened is not None:
                opened.abort()
        return None

    def turn(at: int) -> BaseException | None:
        if at == rank:
            return refused()
        with pytest.raises(RestoreError, match=f"rank {rank}: its restore was cut short") as told:
            job.parts[at].restore(state(0))
        return told.value

    expected = KeyboardInterrupt if wrong == "interrupted" else ConfigError
    assert isinstance(job.do(lambda at: [turn(at)])[rank][0], expected)
    assert job.restore() == [(10, 1)] * 2
    job.close()


def _interrupted(*, deadline: float) -> bool:
    raise KeyboardInterrupt
