"""An interrupt as files of unchanged leaves are given up for others: none of them stays held."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ckpt_core.save import unchanged
from tests import places
from tests.engine.test_unchanged import Job, held
from tests.interrupts.trap import Trap

MOST = 20


def held_after(root: Path, trap: Trap) -> int:
    """Files that are held after the structure has changed in a save that is interrupted."""
    with Job(root, frozen=["base"]) as job:
        job.save_all(range(1, 3))
        job.base = [tensor.reshape(50, 40) for tensor in job.base]
        with contextlib.suppress(KeyboardInterrupt):
            trap.run(lambda: job.ck.save(3, job.state))
        job.ck.wait()  # also where nothing has struck: the next step changes what is staged
        job.save_all(range(4, 6))
        job.check(4, 5)
        return len(held(root))


def test_no_file_stays_held_when_a_save_that_gives_it_up_is_interrupted(tmp_path: Path) -> None:
    place = unchanged.__file__
    counting = Trap(-1, package=place)
    usual = held_after(tmp_path / "whole", counting)
    more = {}
    for n in places.some(range(counting.lines), MOST, of="still files"):
        trap = Trap(n, package=place)
        count = held_after(tmp_path / str(n), trap)
        if count != usual:
            more[trap.struck] = count
    assert counting.lines
    assert not more
