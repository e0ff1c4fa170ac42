"""An interrupt, or an error, at every line of the calls that have to do with levels: nothing is left."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt_core import Checkpointer
from ckpt_core.levels import LevelStatus
from ckpt_core.store import writer_of
from tests import places
from tests.interrupts.scenarios import Run, strike
from tests.interrupts.trap import Boom, Trap
from tests.levels.trainers import SOON_S, Bench, attempt_of, bench, processes, until

__all__ = ["bench"]

MOST, FIRST, SECOND = 8, 3, 3


def made(bench: Bench, trap: Trap) -> Checkpointer | None:
    struck = strike(trap, bench.open)
    found: Checkpointer | None = struck.result
    return found


def check_nothing_is_left(bench: Bench, others: Run) -> None:
    """No thread, no lock, no process."""
    others.check_ended()
    assert writer_of(bench.root) is None
    until(lambda: not processes(bench.root), "the end of all processes")


def check_it_opens(bench: Bench) -> None:
    with bench.open() as ck:
        ck.save(1, {"w": torch.ones(3)}).committed.result(SOON_S)
    until(lambda: not processes(bench.root), "the end of the agent")


@pytest.fixture
def others(tmp_path: Path) -> Run:
    """What threads there were before."""
    run = Run(tmp_path / "other")
    run.close()
    return run


def remove(bench: Bench) -> None:
    """None has, nor one of another root with this level, which would wait for the end of the other one."""
    for place in (bench.root, Path(bench.url)):
        shutil.rmtree(place, ignore_errors=True)


def keep(bench: Bench) -> None:
    """Another Checkpointer has been made there before."""


def count(
    bench: Bench, kind: type[BaseException], prepare: Callable[[Bench], None] = keep
) -> range:
    """At its second time, as at all that follow: it is to have the same lines at each strike."""
    for counting in Trap(-1, kind), Trap(-1, kind):
        prepare(bench)
        ck = made(bench, counting)
        assert ck is not None
        ck.close()
        until(lambda: not processes(bench.root), "the end of the agent")
    return range(counting.lines)


@pytest.mark.parametrize("prepare", [remove, keep])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, Boom])
def test_a_checkpointer_whose_making_is_cut_short_leaves_nothing(
    bench: Bench, others: Run, kind: type[BaseException], prepare: Callable[[Bench], None]
) -> None:
    of = f"make with levels {kind} {prepare.__name__}"
    for n in places.some(count(bench, kind, prepare), MOST, of=of):
        prepare(bench)
        trap = Trap(n, kind)
        ck = made(bench, trap)
        if ck is not None:
            ck.close()
        check_nothing_is_left(bench, others)
    check_it_opens(bench)


def test_a_second_interrupt_while_it_cleans_up_leaves_nothing_either(
    bench: Bench, others: Run
) -> None:
    for n in places.some(count(bench, KeyboardInterrupt), FIRST, of="make with levels twice"):
        counting = Trap(n, then=-1)
        ck = made(bench, counting)
        if ck is not None:
            ck.close()
        chance = random.Random(f"{places.run_number()} {n}")
        for then in chance.sample(range(counting.lines), min(SECOND, counting.lines)):
            ck = made(bench, Trap(n, then=then))
            if ck is not None:
                ck.close()
            check_nothing_is_left(bench, others)
    check_it_opens(bench)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Boom])
def test_asking_where_a_save_is_can_be_cut_short_anywhere(
    bench: Bench, kind: type[BaseException]
) -> None:
    with bench.open() as ck:
        handle = ck.save(1, {"w": torch.ones(3)})
        handle.committed.result(SOON_S)
        early = handle.reached(1)
        counting = Trap(-1, kind)
        strike(counting, lambda: handle.reached(1))
        for n in range(counting.lines):
            strike(Trap(n, kind), lambda: handle.reached(1))
        there = {1: attempt_of(bench.root, 1)}
        bench.say(LevelStatus(bench.url, steps=there, reached=there))
        assert early.result(SOON_S) is handle.reached(1).result(SOON_S) is None


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Boom])
def test_waiting_for_a_level_can_be_cut_short_anywhere(
    bench: Bench, kind: type[BaseException]
) -> None:
    with bench.open() as ck:
        ck.save(1, {"w": torch.ones(3)}).committed.result(SOON_S)
    until(lambda: not processes(bench.root), "the end of the agent")

    def waited(trap: Trap) -> None:
        # By a Checkpointer of its own: one that has looked at a level knows the answer for a while.
        with bench.open() as ck:
            there = {1: attempt_of(bench.root, 1)}
            bench.say(LevelStatus(bench.url, steps=there, reached=there))
            strike(trap, lambda: ck.wait(level=1))
            ck.wait(level=1)

    waited(Trap(-1, kind))
    counting = Trap(-1, kind)
    waited(counting)
    for n in places.some(range(counting.lines), FIRST, of=f"wait for a level {kind}"):
        waited(Trap(n, kind))


def test_a_close_that_is_cut_short_can_be_repeated(bench: Bench, others: Run) -> None:
    ck = bench.open()
    counting = Trap(-1)
    strike(counting, ck.close)
    for n in places.some(range(counting.lines), MOST, of="close with levels"):
        ck = bench.open()
        strike(Trap(n), ck.close)
        ck.close()
        check_nothing_is_left(bench, others)
