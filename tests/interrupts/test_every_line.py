"""An interrupt, or an error, at every line of every call; then the run goes on with the same Checkpointer.

By default every line of the short calls is tried and a part of those of the long ones, another part in each
scenario and each run; CKPT_PLACES=all tries all of them, which takes some minutes. A second interrupt is
tried at a few lines of what follows the first one, in every run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import places
from tests.interrupts import scenarios
from tests.interrupts.scenarios import SOON_S, Run
from tests.interrupts.trap import Boom, Trap

Call = Callable[[Run, Trap], None]

MOST = 14
"""So many of one scenario; a call of fewer lines is tried at each."""

FIRST, SECOND = 4, 3
"""Of a first interrupt, and for each of these of a second one, which strikes what follows the first."""

CALLS: list[tuple[Call, dict[str, Any]]] = [
    (scenarios.save, {}),
    (scenarios.save, {"mode": "direct"}),
    (scenarios.save, {"blocking": True}),
    (scenarios.save, {"pipelined": False}),
    (scenarios.save, {"on_error": "warn", "eager_leaf_bytes": "1MiB", "staging_bytes": None}),
    (scenarios.begin, {}),
    (scenarios.abort, {}),
    (scenarios.stage, {}),
    (scenarios.stage, {"debug_barrier": True}),
    (scenarios.seal, {}),
    (scenarios.seal, {"blocking": True, "pipelined": False}),
    (scenarios.begin_files, {}),
    (scenarios.add, {}),
    (scenarios.add_all, {}),
    (scenarios.seal_files, {}),
    (scenarios.wait_staged, {}),
    (scenarios.wait, {}),
    (scenarios.prepare, {}),
    (scenarios.restore, {}),
    (scenarios.restore_objects, {}),
    (scenarios.close, {}),
    (scenarios.leave, {}),
    (scenarios.make, {}),
]
NAMES = [f"{call.__name__}-{'-'.join(changes) or 'plain'}" for call, changes in CALLS]


def lines_of(run: Run, call: Call, kind: type[BaseException], most: int = MOST) -> list[int]:
    """Where it strikes: lines of the call, by number.

    At its second time here, as at all that follow: it is to have the same lines at each strike.
    """
    run.settle()
    call(run, Trap(-1, kind))
    run.settle()
    counting = Trap(-1, kind)
    call(run, counting)
    return some_of(run, call, counting, most)


def some_of(run: Run, call: Call, counting: Trap, most: int = MOST) -> list[int]:
    of = f"{call.__name__} {counting.kind} {run.changes}"
    return places.some(range(counting.lines), most, of=of)


def seconds_of(counted: Trap, n: int) -> list[int]:
    """Where the second one strikes: a few of the lines that follow the first, in every run."""
    chance = random.Random(f"{places.run_number()} {n}")
    return sorted(chance.sample(range(counted.lines), min(SECOND, counted.lines)))


@pytest.mark.parametrize(("call", "changes"), CALLS, ids=NAMES)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, Boom])
def test_the_run_goes_on_after_an_interrupt_or_an_error_at_any_line(
    tmp_path: Path, kind: type[BaseException], call: Call, changes: dict[str, Any]
) -> None:
    run = Run(tmp_path / "root", changes)
    for n in lines_of(run, call, kind):
        trap = Trap(n, kind)
        call(run, trap)
        run.check()
    run.close()


@pytest.mark.parametrize("shorter", [0, 1000], ids=["first", "first of its size"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, Boom])
def test_a_first_save_that_is_cut_short_anywhere_poisons_nothing(
    tmp_path: Path, kind: type[BaseException], shorter: int
) -> None:
    def opened(name: str) -> Run:
        run = Run(tmp_path / name)
        if shorter:
            run.train(longer=-shorter)
            run.save().committed.result(SOON_S)
        return run

    run, counting = opened("counted"), Trap(-1, kind)
    scenarios.save(run, counting)
    run.close()
    for n in some_of(run, scenarios.save, counting):
        run = opened(str(n))
        scenarios.save(run, Trap(n, kind))
        run.check()
        run.close()


@pytest.mark.parametrize(("call", "changes"), CALLS, ids=NAMES)
def test_the_run_goes_on_after_a_second_interrupt_of_what_the_first_one_set_off(
    tmp_path: Path, call: Call, changes: dict[str, Any]
) -> None:
    run = Run(tmp_path / "root", changes)
    for n in lines_of(run, call, KeyboardInterrupt, FIRST):
        counting = Trap(n, then=-1)
        call(run, counting)
        run.check()
        for then in seconds_of(counting, n):
            trap = Trap(n, then=then)
            call(run, trap)
            run.check()
    run.close()


def test_an_interrupt_between_two_calls_of_one_line_is_no_other(tmp_path: Path) -> None:
    run = Run(tmp_path / "root")
    run.settle()
    counting = Trap(-1, event="opcode")
    scenarios.save(run, counting)
    for n in places.some(range(counting.lines), MOST, of="instructions"):
        scenarios.save(run, Trap(n, event="opcode"))
        run.check()
    run.close()
