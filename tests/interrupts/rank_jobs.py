"""One of two ranks is interrupted in what both do together; both do it again."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch

from ckpt_core import Checkpointer, RestoreError
from tests import places
from tests.crash.promises import QuickFiles
from tests.interrupts.scenarios import SOON_S, options
from tests.interrupts.trap import Boom, Trap
from tests.multirank.crew import Rank

KINDS = {"interrupt": KeyboardInterrupt, "error": Boom}


def restores(who: Rank, root: str, struck: int, kind: str, most: int) -> dict[str, Any]:
    """Strike at lines of `restore` in one rank; then both restore.

    Returns:
        Where it has struck, how often this rank has heard of it, and what else was raised.
    """
    error = KINDS[kind]
    coordination = who.meet()
    calls = coordination._session._gatherings
    found: dict[str, Any] = {"told": 0, "odd": [], "where": []}
    saved = {"w": torch.arange(6000.0), "mine": torch.full((9,), float(who.rank)), "step": 1}
    ck = Checkpointer(
        Path(root), options(timeout=SOON_S), coordination=coordination, files=QuickFiles()
    )
    with ck:
        ck.save(1, saved, per_rank=["mine"]).committed.result(SOON_S)

        def restore(trap: Trap) -> int:
            into = {key: torch.zeros_like(saved[key]) for key in ("w", "mine")} | {"step": 0}
            trap.run(lambda: ck.restore(into))
            assert torch.equal(into["w"], saved["w"]) and torch.equal(into["mine"], saved["mine"])
            return trap.lines

        # The first times do more.
        counted = [restore(Trap(-1, error)) for _ in range(3)][-1]
        lines = coordination.gather("lines", counted, SOON_S)[struck]
        for n in places.some(range(lines), most, of=f"ranks {struck} {kind}"):
            trap = Trap(n if who.rank == struck else -1, error)
            begun = calls._calls
            for turn in itertools.count():
                try:
                    restore(trap if turn == 0 else Trap(-1))
                except (RestoreError, error) as exc:
                    heard = "injected" in str(exc) or "cut short" in str(exc)
                    if turn == 0 and (heard or type(exc) is error):
                        found["told"] += 1
                    else:
                        found["odd"].append(f"{n}, {trap.struck}: {exc!r}")
                if calls._calls >= begun + 2:
                    break
            found["where"].append(trap.struck)
    return found
